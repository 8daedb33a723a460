"""What the README says is so."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from collectives import backends
from tests.ranks import ROOT, clean_environment, mpirun

README = (ROOT / "README.md").read_text()


@pytest.fixture
def script(tmp_path: Path) -> Path:
    section = README.split("## Your own script")[1].split("\n## ")[0]
    (code,) = re.findall(r"```python\n(.*?)```", section, flags=re.DOTALL)
    assert len([line for line in code.splitlines() if line.strip()]) == 12
    path = tmp_path / "script.py"
    path.write_text(code)
    return path


def losses(command: list[str], environment: dict[str, str], folder: Path) -> dict[int, float]:
    done = subprocess.run(
        command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=90
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return {int(rank): float(loss) for rank, loss in re.findall(r"rank (\d+) of \d+: loss ([\d.]+)", done.stdout)}


FULL = [pytest.param(launcher, marks=pytest.mark.full) for launcher in ("none", "torchrun", "mpirun")]


@pytest.mark.parametrize("launcher", ["launch", *FULL])
def test_the_script_trains_under_every_launcher(launcher: str, script: Path) -> None:
    command, environment = [sys.executable], clean_environment()
    if launcher == "launch":
        command += ["-m", "launch", "-n", "2"]
    elif launcher == "torchrun":
        command += ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    elif launcher == "mpirun":
        start, environment = mpirun(2)
        command = [*start, *command]
    by_rank = losses([*command, str(script)], environment, script.parent)
    assert sorted(by_rank) == ([0] if launcher == "none" else [0, 1])
    assert all(loss < 1.0 for loss in by_rank.values())  # the targets' mean square is above 16


def test_the_table_lists_the_backends_there_are() -> None:
    table = README.split("## Backends")[1].split("## ")[0]
    names = set(re.findall(r"^\| `([\w+]+)` \|", table, flags=re.MULTILINE))
    assert names == set(backends.REGISTRY) | {f"{layer}+X" for layer in backends.LAYERS}


def test_files_and_modules_that_it_names_exist() -> None:
    for name in re.findall(r"(?<![\w/])((?:launch|tests|\.ci)/[\w./]+)", README):
        assert (ROOT / name.rstrip(".")).exists(), name
    for module in re.findall(r"python -m ((?:launch|collectives)(?:\.\w+)*)", README):
        path = ROOT / module.replace(".", "/")
        assert path.is_dir() or path.with_suffix(".py").exists(), module
