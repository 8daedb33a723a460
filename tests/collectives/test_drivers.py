"""The same laws as ranks of mpirun and of torchrun: both commands of test_under_launcher.py, started here."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.ranks import ROOT, clean_environment, mpirun

LAWS = "tests/collectives/test_under_launcher.py"
PYTEST = ["-m", "pytest", "--color=no", "-p", "no:cacheprovider", LAWS]


def run_laws(command: list[str], environment: dict[str, str], world_size: int) -> None:
    done = subprocess.run(
        command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=150
    )
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    passed = re.findall(r"(\d+) passed in", output)
    assert len(passed) == world_size, output
    assert len(set(passed)) == 1
    assert int(passed[0]) > 40
    assert "skipped" not in output


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.full)])
def test_mpirun(world_size: int) -> None:
    command, environment = mpirun(world_size)
    run_laws([*command, sys.executable, *PYTEST, "--with-mpi"], environment, world_size)


@pytest.mark.full
@pytest.mark.parametrize("world_size", [2, 3])
def test_torchrun(world_size: int) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(world_size)]
    run_laws([*command, *PYTEST], clean_environment(), world_size)
