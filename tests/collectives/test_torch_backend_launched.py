"""torch's own layers, and unedited scripts of frameworks, on our communicators under real launchers."""

from __future__ import annotations

import functools
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.collectives.torch_checks import CHECKS
from tests.ranks import ROOT, clean_environment, mpirun

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]  # frameworks take long to import
PROGRAM = str(ROOT / "tests" / "collectives" / "torch_program.py")
FRAMEWORKS = ROOT / "tests" / "collectives" / "frameworks"
STARTERS = ["mpirun", "torchrun"]


def started(starter: str, world_size: int, *arguments: str) -> str:
    """What a Python program, as ranks of a launcher, writes."""
    if starter == "mpirun":
        command, environment = mpirun(world_size)
        command = [*command, sys.executable]
    else:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world_size)]
        environment = clean_environment()
    done = subprocess.run(
        [*command, *arguments],
        cwd=ROOT,
        env={**environment, "TOKENIZERS_PARALLELISM": "false"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize(
    ("starter", "world_size", "backends"),
    [
        pytest.param("torchrun", 2, ["cshm", "cring", "cgloo"], marks=pytest.mark.exhaustive),
        ("mpirun", 2, ["cmpi", "cshm", "cring"]),
        pytest.param("mpirun", 4, ["cmpi", "cshm"], marks=pytest.mark.exhaustive),
        pytest.param("torchrun", 4, ["cshm", "cring", "cgloo"], marks=pytest.mark.exhaustive),
    ],
)
def test_training_is_that_of_gloo(starter: str, world_size: int, backends: list[str]) -> None:
    """DDP, with a hook, with ZeroRedundancyOptimizer, FSDP1, FSDP2 and, at four ranks, FSDP2 in two dimensions."""
    found = started(starter, world_size, PROGRAM, "train", "gloo", *backends)
    losses: dict[tuple[str, str], list[float]] = {}
    for backend, kind, loss in re.findall(r"^(\w+): (\w+) ([\d.]+)$", found, re.MULTILINE):
        losses.setdefault((kind, backend), []).append(float(loss))
    kinds = {kind for kind, _ in losses}
    assert kinds == {"ddp", "ddp_hook", "zero", "fsdp1", "fsdp2", *(["hybrid"] if world_size == 4 else [])}, found
    for kind in kinds:
        for backend in backends:
            assert losses[kind, backend] == pytest.approx(losses[kind, "gloo"], rel=1e-6), (kind, backend)
            assert len(losses[kind, backend]) == 4


@pytest.mark.parametrize("what", ["operations", "dtensors", "checkpoints"])
@pytest.mark.parametrize(
    ("starter", "world_size", "backend"),
    [
        ("torchrun", 2, "cshm"),
        pytest.param("mpirun", 2, "cmpi", marks=pytest.mark.exhaustive),
        pytest.param("mpirun", 3, "cshm", marks=pytest.mark.exhaustive),
        pytest.param("mpirun", 4, "cmpi", marks=pytest.mark.exhaustive),
        pytest.param("torchrun", 4, "cring", marks=pytest.mark.exhaustive),
    ],
)
def test_layers(starter: str, world_size: int, backend: str, what: str) -> None:
    found = started(starter, world_size, PROGRAM, what, backend)
    lines = {"operations": len(CHECKS), "dtensors": 1 if world_size % 2 else 2, "checkpoints": 2}
    assert len(re.findall(rf"^{backend}: ", found, re.MULTILINE)) == lines[what], found


PLAIN = """
import os, sys, torch
import torch.distributed as dist

dist.init_process_group("gloo")
dist.init_process_group("gloo")
tensor = torch.ones(2) * (dist.get_rank() + 1)
dist.all_reduce(tensor)
names = [os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")]
assert int(names[0]) == int(names[2]) == dist.get_rank() and int(names[1]) == dist.get_world_size() and int(names[4])
dist.destroy_process_group()
dist.init_process_group("gloo")
print(f"{dist.get_backend()} {tensor.tolist()} {sys.argv[1:]} {__name__}\\n", end="")
"""


@pytest.mark.parametrize(
    "starter",
    [
        "mpirun",
        "alone",
        pytest.param("torchrun", marks=pytest.mark.exhaustive),
        pytest.param("launch", marks=pytest.mark.exhaustive),
    ],
)
def test_a_script_that_knows_nothing(starter: str, tmp_path: Path) -> None:
    """Its own init_process_group returns the group that is there; said once."""
    script = tmp_path / "script.py"
    script.write_text(PLAIN)
    size = 1 if starter == "alone" else 2
    runner = ["-m", "collectives.torch_backend", "--backend", "cshm", str(script), "one", "--two"]
    if starter == "launch":
        command = [sys.executable, "-m", "launch", "-n", "2", *runner]
    elif starter == "alone":
        command = [sys.executable, *runner]
    if starter in STARTERS:
        found = started(starter, size, *runner)
    else:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=clean_environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=280,
        )
        found = done.stdout + done.stderr
        assert done.returncode == 0, found
    line = f"cshm {[float(size * (size + 1) / 2)] * 2} ['one', '--two'] __main__"
    assert found.count(line) == size, found
    assert found.count("returns the default group that is there already, on cshm") == 1, found


def test_the_command_that_measures_the_adapter() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "collectives.torch_backend.overhead", "--repeats", "2", "--rounds", "1"],
        cwd=ROOT,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(r"^\w+(?:, async)? +[\d.]+ +[\d.]+ +-?[\d.]+ +[\d.]+$", done.stdout, re.MULTILINE)) == 4


@pytest.mark.parametrize("starter", STARTERS)
@pytest.mark.parametrize("framework", ["accelerate", "trainer", "lightning"])
def test_frameworks(framework: str, starter: str) -> None:
    """Scripts as their documentation has them, unedited, get the loss that they get on gloo."""
    needed = {"accelerate": ["accelerate"], "trainer": ["accelerate", "transformers"], "lightning": ["lightning"]}
    missing = [name for name in needed[framework] if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"{' and '.join(missing)} not installed; pip install -e '.[test-frameworks]'")
    script = str(FRAMEWORKS / f"{framework}_script.py")
    found = started(starter, 2, "-m", "collectives.torch_backend", script)
    assert framework_loss(found) == pytest.approx(framework_loss(on_gloo(script)), abs=2e-6)


@functools.cache
def on_gloo(script: str) -> str:
    return started("torchrun", 2, script)


def framework_loss(found: str) -> float:
    losses = re.findall(r"^processes 2 loss ([\d.]+)", found, re.MULTILINE)
    assert len(losses) == 1, found
    return float(losses[0])
