"""The conformance suite as ranks of mpirun and of torchrun: both commands of test_under_launcher.py, started here."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from collectives import conformance
from tests.ranks import ROOT, clean_environment, mpirun

PYTEST = ["-m", "pytest", "--color=no", "-p", "no:cacheprovider", "tests/collectives/test_under_launcher.py"]
SOME = ("all_reduce", "messages", "groups", "failures")
full, exhaustive = pytest.mark.full, pytest.mark.exhaustive


def run_suite(command: list[str], environment: dict[str, str], world_size: int, backends: str, some: bool) -> None:
    groups = [*SOME] if some else [*conformance.GROUPS]
    selection = ["-k", " or ".join(f"-{group}]" for group in groups)] if some else []
    done = subprocess.run(
        [*command, *selection],
        cwd=ROOT,
        env={**environment, "CONFORMANCE_BACKENDS": backends},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=175,
    )
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    passed = re.findall(r"(\d+) passed", output)
    assert passed == [str(len(groups) * len(backends.split(",")))] * world_size, output
    assert "skipped" not in output


@pytest.mark.parametrize(
    ("world_size", "backends", "some"),
    [
        pytest.param(2, "mpi", True, marks=exhaustive),
        pytest.param(3, "ring+mpi,gloo", True, marks=full),
        pytest.param(4, "mpi", False, marks=exhaustive),
        pytest.param(2, "ring+mpi,gloo", False, marks=exhaustive),
    ],
)
def test_mpirun(world_size: int, backends: str, some: bool) -> None:
    command, environment = mpirun(world_size)
    run_suite([*command, sys.executable, *PYTEST, "--with-mpi"], environment, world_size, backends, some)


@full
@pytest.mark.mpich
@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("backends", ["mpi", "ring+mpi", "shm+mpi"])
def test_mpich(mpich: Path, world_size: int, backends: str) -> None:
    command = [str(mpich / "bin" / "mpiexec"), "-n", str(world_size), sys.executable]
    environment = {**clean_environment(), "MPI4PY_LIBMPI": str(mpich / "lib" / "libmpi.so.12")}
    run_suite([*command, *PYTEST, "--with-mpi"], environment, world_size, backends, some=False)


@pytest.mark.parametrize(
    ("world_size", "backends", "some"),
    [
        pytest.param(2, "gloo", False, marks=full),
        pytest.param(4, "gloo", False, marks=exhaustive),
        pytest.param(2, "ring+gloo,shm+gloo", False, marks=exhaustive),
    ],
)
def test_torchrun(world_size: int, backends: str, some: bool) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(world_size)]
    run_suite([*command, *PYTEST], clean_environment(), world_size, backends, some)
