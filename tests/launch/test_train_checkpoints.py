"""Training that is interrupted and goes on: the losses are those of the run that was not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from collectives import Communicator
from launch import data
from launch.checkpoints import Saves
from launch.entry import STOPPED, InputError, StoppedError
from launch.model import GPTConfig
from launch.train import TrainConfig, main, train
from tests.ranks import ROOT, clean_environment, run_ranks

TINY = GPTConfig(layers=1, width=16, heads=2, context=16)
SMALL = {"layers": 1, "width": 16, "heads": 2, "context": 16, "held-out": 4, "evaluations": 1, "sample": 4, "seed": 3}
OPTIONS = [word for name, value in SMALL.items() for word in (f"--{name}", str(value))]
STEPS = 6


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "text.py"
    path.write_text(Path(data.__file__).read_text())
    return path


def config(text: Path, folder: Path | None, **changes: Any) -> TrainConfig:
    fields = {"data": (str(text),), "steps": STEPS, "held_out": 4, "evaluations": 1, "sample": 4, "seed": 3, **changes}
    return TrainConfig(folder=None if folder is None else str(folder), model=TINY, **fields)


def stopped(comm: Communicator, settings: TrainConfig, saves: Saves, at: int) -> None:
    """Train until the last rank is asked to end."""
    asked = iter(range(1, STEPS + 1))
    with pytest.raises(StoppedError):
        train(comm, settings, saves, lambda: next(asked) == at and comm.rank == comm.world_size - 1)


@pytest.mark.parametrize(
    ("strategy", "world_size", "then", "after"),
    [("fsdp", 2, "fsdp", 2), ("zero1", 3, "ddp", 1), pytest.param("ddp", 1, "zero2", 3, marks=pytest.mark.full)],
)
def test_losses_are_those_of_the_run_that_went_through(
    strategy: str, world_size: int, then: str, after: int, text: Path, tmp_path: Path
) -> None:
    whole = run_ranks(train, config(text, None, strategy=strategy), world_size=world_size)[0]
    saves = Saves(every=2, keep=1, resume=True)
    run_ranks(stopped, config(text, tmp_path, strategy=strategy), saves, 3, world_size=world_size)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-0000000003"]
    found = run_ranks(train, config(text, tmp_path, strategy=then), saves, world_size=after)[0]
    if (strategy, world_size) == (then, after):
        assert (found.losses, found.grad_norms) == (whole.losses, whole.grad_norms)
        assert (found.held_out_loss, found.sample) == (whole.held_out_loss, whole.sample)
    assert found.losses == pytest.approx(whole.losses, rel=1e-5)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert [line["loss"] for line in lines] == list(found.losses)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [f"step-{STEPS:010d}"]


def test_a_damaged_one_is_passed_over_and_other_settings_are_refused(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saves = Saves(every=2, resume=True)
    whole = run_ranks(train, config(text, tmp_path), saves, world_size=2)[0]
    for name, place in (("step-0000000006", -1), ("step-0000000004", None)):
        file = tmp_path / "checkpoints" / name / "rank-00001.safetensors"
        contents = bytearray(file.read_bytes())
        if place is None:
            file.write_bytes(contents[:-1])
        else:
            contents[place] ^= 1
            file.write_bytes(contents)
    again = run_ranks(train, config(text, tmp_path), saves, world_size=2)[0]
    assert again.losses == whole.losses
    said = capsys.readouterr().out
    assert "as they were written" in said
    assert "going on after step 2" in said
    metrics = (tmp_path / "metrics.jsonl").read_text()
    with pytest.raises(InputError, match="batch_size 12, not 4"):
        run_ranks(train, config(text, tmp_path, batch_size=4), saves, world_size=2)
    assert metrics.count("\n") == STEPS
    assert (tmp_path / "metrics.jsonl").read_text() == metrics


@pytest.mark.parametrize(
    ("options", "found"),
    [
        (["--save-every", "-1"], "save-every: expected at least 0"),
        (["--keep", "0"], "keep: expected at least 1"),
        (["--no-write", "--resume", "auto"], "no-write: expected it without"),
        (["--resume", "now"], "invalid choice: 'now'"),
    ],
)
def test_wrong_values_say_what_was_expected(options: list[str], found: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(options)
    assert ended.value.code == 2
    assert found in capsys.readouterr().err


def start(command: list[str], text: Path, folder: Path, *options: str) -> subprocess.Popen[str]:
    arguments = ["-m", "launch.train", "--data", str(text), "--backend", "gloo", *OPTIONS, *options]
    return subprocess.Popen(
        [*command, *arguments], env=clean_environment(), cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True,
    )  # fmt: skip


def wait_for_steps(process: subprocess.Popen[str], folder: Path, steps: int) -> None:
    metrics = folder / "outputs" / "train" / "metrics.jsonl"
    deadline = time.monotonic() + 60
    while not (metrics.exists() and metrics.read_text().count("\n") > steps):
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)


def ranks_of(process: subprocess.Popen[str]) -> list[int]:
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return sorted(int(child) for child in children)


LAUNCH = [sys.executable, "-m", "launch", "-n", "2"]


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_any_rank_saves_and_ends_all(number: signal.Signals, text: Path, tmp_path: Path) -> None:
    process = start(LAUNCH, text, tmp_path, "--steps", "100000")
    try:
        wait_for_steps(process, tmp_path, 3)
        os.kill(ranks_of(process)[-1], number)
        output, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == STOPPED, output
    assert "--resume auto goes on" in output
    [checkpoint] = (tmp_path / "outputs" / "train" / "checkpoints").iterdir()
    metrics = (tmp_path / "outputs" / "train" / "metrics.jsonl").read_text()
    assert int(checkpoint.name.removeprefix("step-")) == metrics.count("\n")


@pytest.mark.full
def test_killed_and_started_again_the_losses_are_the_same(text: Path, tmp_path: Path) -> None:
    folders = tmp_path / "whole", tmp_path / "killed"
    for folder in folders:
        folder.mkdir()
    steps = ["--steps", "60", "--save-every", "5", "--keep", "2", "--resume", "auto"]
    whole = start(LAUNCH, text, folders[0], *steps)
    output, _ = whole.communicate(timeout=90)
    assert whole.returncode == 0, output
    process = start(LAUNCH, text, folders[1], *steps)
    try:
        wait_for_steps(process, folders[1], 12)
        os.kill(ranks_of(process)[0], signal.SIGKILL)
        process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 128 + signal.SIGKILL
    again = start(LAUNCH, text, folders[1], *steps)
    output, _ = again.communicate(timeout=90)
    assert again.returncode == 0, output
    assert "going on after step" in output
    losses = [
        [json.loads(line)["loss"] for line in (folder / "outputs/train/metrics.jsonl").read_text().splitlines()]
        for folder in folders
    ]
    assert losses[0] == losses[1]


SRUN = """#!/usr/bin/env bash
trap 'echo told; exit 75' USR1
touch "$0.started"
while :; do sleep 0.05; done
"""


@pytest.mark.parametrize("code", [75, 1, 0])
def test_the_slurm_script_queues_the_job_again(code: int, tmp_path: Path) -> None:
    """With a ``srun`` that waits for the signal (code 75), or ends by itself; and a ``scontrol`` that takes notes."""
    (tmp_path / "srun").write_text(SRUN if code == 75 else f"#!/usr/bin/env bash\nexit {code}\n")
    (tmp_path / "scontrol").write_text(f'#!/usr/bin/env bash\necho "$@" > {tmp_path}/asked\n')
    for name in ("srun", "scontrol"):
        (tmp_path / name).chmod(0o755)
    variables = {**clean_environment(), "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    process = subprocess.Popen(
        [str(ROOT / "launch" / "slurm.sbatch")], env=variables, stdout=subprocess.PIPE, text=True
    )
    if code == 75:
        deadline = time.monotonic() + 30
        while not (tmp_path / "srun.started").exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(signal.SIGUSR1)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == code, output
    assert (tmp_path / "asked").exists() is (code == 75)
    if code == 75:
        assert (tmp_path / "asked").read_text() == "requeue 7\n"
