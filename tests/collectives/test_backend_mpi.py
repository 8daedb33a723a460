"""MPI at the seam, below an idle communicator; how a rank's end ends the job; what a site's MPI may get wrong."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from collectives import Communicator
from collectives.backends import mpi
from collectives.errors import CommError, UnsupportedError
from tests.collectives import seam
from tests.ranks import ROOT, clean_environment, mpirun, run_ranks


@pytest.mark.parametrize(
    "world_size",
    [2, pytest.param(3, marks=pytest.mark.full), *(pytest.param(n, marks=pytest.mark.exhaustive) for n in (1, 4))],
)
def test_laws(world_size: int) -> None:
    run_ranks(seam.all_laws, world_size=world_size, backend="mpi")


def law_stopped(comm: Communicator) -> str:
    backend = comm._transport._split(range(comm.world_size), "stopped")
    received = torch.zeros(3)
    pending = backend._post([seam.P2P.recv(received, (comm.rank + 1) % comm.world_size)], 0)
    assert not pending.poll()
    backend._kill()
    with pytest.raises(CommError) as caught:
        seam.finish(backend, pending)
    return str(caught.value)


def test_kill_ends_the_wait() -> None:
    for rank, message in enumerate(run_ranks(law_stopped, backend="mpi")):
        assert message == f"rank {rank}, mpi: the transport was stopped"


def law_from_mpi(comm: Communicator, layers: tuple[str, ...]) -> tuple[int, int, list[float], list[int]]:
    from mpi4py import MPI

    reverse = MPI.COMM_WORLD.Split(0, key=-comm.rank)
    with mpi.from_mpi(reverse, timeout=20.0, layers=layers) as mine:
        total = torch.full((5,), mine.rank + 1.0)
        mine.all_reduce(total)
        ranks = torch.zeros(mine.world_size, dtype=torch.int64)
        mine.all_gather(ranks, torch.tensor([comm.rank]))
    reverse.Barrier()  # the caller's own communicator is still the caller's
    reverse.Free()
    return mine.rank, mine.local_world_size, total.tolist(), ranks.tolist()


@pytest.mark.full
@pytest.mark.parametrize("layers", [(), ("ring",)])
def test_from_mpi_has_the_ranks_of_that_communicator(layers: tuple[str, ...]) -> None:
    results = run_ranks(law_from_mpi, layers, world_size=3, backend="mpi")
    assert results == [(2 - rank, 3, [6.0] * 5, [2, 1, 0]) for rank in range(3)]


# How a rank's end ends the job


def run_exits(how: str, backend: str, world_size: int = 2) -> tuple[int, str]:
    command, environment = mpirun(world_size)
    done = subprocess.run(
        [*command, sys.executable, "-m", "tests.collectives.exits", how, backend],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stdout + done.stderr


def often(how: str, backend: str, rare: bool) -> object:
    return pytest.param(how, backend, marks=pytest.mark.full if rare else ())


@pytest.mark.parametrize(
    ("how", "backend"),
    [often(how, backend, True) for how in ("plain", "close", "late") for backend in ("mpi", "gloo")],
)
def test_good_ends(how: str, backend: str) -> None:
    code, output = run_exits(how, backend)
    assert code == 0, output
    assert "rank 0 is done" in output
    assert "rank 1 is done" in output


@pytest.mark.parametrize(
    ("how", "backend"),
    [
        often(how, backend, backend == "gloo" or how != "thread")
        for how in ("raise", "thread", "sys.exit", "os._exit")
        for backend in ("mpi", "gloo")
    ],
)
def test_bad_ends(how: str, backend: str) -> None:
    """Rank 0 fails while rank 1 waits in a barrier: the job ends, with rank 0's traceback where there is one."""
    code, output = run_exits(how, backend)
    assert code != 0
    if how in ("raise", "thread"):
        assert "ArithmeticError: the first failure" in output
    if how == "sys.exit":
        assert "rank 1 sees PeerLostError" in output


@pytest.mark.full
def test_a_death_while_a_group_is_formed_where_mpi_takes_one_thread_at_a_time() -> None:
    """MPI cannot be left then, so nobody may go in before everybody is there."""
    command, environment = mpirun(3)
    program = (
        "import os, collectives\n"
        "comm = collectives.init('mpi', timeout=60.0)\n"
        "assert comm.split(0).split(0).all_gather_object(comm.rank) == [0, 1, 2]\n"
        "if comm.rank == 1: os._exit(5)\n"
        "try: comm._progress.set_up(lambda: comm._transport._split([0, 1, 2], 'late'), [0, 1, 2], 60.0)\n"
        "except collectives.errors.PeerLostError as error: print(f'rank {comm.rank} sees {error}', flush=True)\n"
        "os._exit(6)"
    )
    done = subprocess.run(
        [*command, sys.executable, "-c", program],
        cwd=ROOT,
        env={**environment, "MPI4PY_RC_THREAD_LEVEL": "serialized"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode in (5, 6), done
    seen = [line for line in done.stdout.splitlines() if "rank 1 is lost" in line]
    assert seen, done


# Before MPI_Init


def test_importing_the_backend_starts_nothing() -> None:
    program = "import sys, collectives, collectives.backends.mpi; sys.exit('mpi4py' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=clean_environment(), timeout=60)
    assert done.returncode == 0


def test_gpu_support_without_its_library() -> None:
    with pytest.raises(UnsupportedError, match=r"MPI_Init would abort; unset MPICH_GPU_SUPPORT_ENABLED"):
        mpi.ensure_mpi({"MPICH_GPU_SUPPORT_ENABLED": "1"})


def test_no_mpi4py(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    with pytest.raises(UnsupportedError, match=r"pip install mpi4py"):
        mpi.ensure_mpi({})


def test_no_mpi_library() -> None:
    """In a process of its own, with the loader pointed at nothing."""
    program = (
        "from collectives.backends import mpi\n"
        "from collectives.errors import UnsupportedError\n"
        "try: mpi.ensure_mpi({})\n"
        "except UnsupportedError as error: print(error)\n"
    )
    environment = {**clean_environment(), "MPI4PY_LIBMPI": "/nowhere/libmpi.so"}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60
    )
    assert "no usable MPI library" in done.stdout, done
    assert "/nowhere/libmpi.so" in done.stdout
    assert "set MPI4PY_LIBMPI" in done.stdout
