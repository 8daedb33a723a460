"""However, whenever and wherever a rank fails, the others say so within two seconds, and the job's exit code tells."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.collectives import failing
from tests.ranks import ROOT, clean_environment, mpirun

HOW = ("SIGKILL", "os._exit", "segfault", "raise", "sys.exit", "SIGSTOP")
WHEN = ("first call", "ring", "sub-group", "split", "close")
BACKENDS = ("gloo", "ring+gloo", "shm+gloo", "mpi", "ring+mpi", "shm+mpi")
SIZE = 3
SOON = 2.0  # seconds from a death, or from the time-out, to the errors of the others
PLAIN = {
    ("SIGKILL", "ring", "ring+gloo", 1),
    ("os._exit", "ring", "shm+gloo", 0),
    ("raise", "first call", "gloo", 1),
    ("sys.exit", "sub-group", "gloo", 1),
    ("segfault", "split", "gloo", 2),
    ("SIGKILL", "close", "shm+gloo", 1),
}
FULL = {
    ("SIGSTOP", "ring", "gloo", 1),
    ("SIGSTOP", "sub-group", "ring+gloo", 0),
    ("SIGSTOP", "split", "shm+gloo", 1),
    ("SIGKILL", "ring", "mpi", 1),
    ("SIGKILL", "sub-group", "shm+mpi", 0),
    ("os._exit", "first call", "ring+mpi", 2),
    ("segfault", "close", "mpi", 1),
    ("raise", "split", "ring+mpi", 1),
    ("sys.exit", "ring", "shm+mpi", 1),
    ("SIGSTOP", "ring", "mpi", 1),
}


def cases() -> list[Any]:
    found = []
    grid = {(how, when, backend, 1) for how in HOW for when in WHEN for backend in BACKENDS}
    for case in sorted(grid | PLAIN | FULL):
        marks = () if case in PLAIN else pytest.mark.full if case in FULL else pytest.mark.exhaustive
        found.append(pytest.param(*case, marks=marks))
    return found


@pytest.mark.parametrize(("how", "when", "backend", "victim"), cases())
def test_a_failing_rank(how: str, when: str, backend: str, victim: int, tmp_path: Path) -> None:
    arguments = (how, when, backend, victim, tmp_path)
    code, output = under_mpirun(arguments) if backend.endswith("mpi") else without_launcher(arguments)
    assert code != 0, output
    check_notes(how, victim, tmp_path, output)


def without_launcher(arguments: tuple[Any, ...]) -> tuple[int, str]:
    """Ranks that nobody ends: the victim's exit code, or that of a survivor where a rank was merely stopped."""
    how, _, _, victim, folder = arguments
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.collectives.failing"])
    processes = []
    with socket.create_server(("127.0.0.1", 0), backlog=128) as store:
        place = {"COLLECTIVES_LAUNCH": "tests", "MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": str(SIZE)}
        place |= {"MASTER_PORT": str(store.getsockname()[1]), "LOCAL_WORLD_SIZE": str(SIZE)}
        for rank in range(SIZE):
            environment = {**clean_environment(), **place, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            given = (environment, None if rank else store, arguments, str(folder / f"log{rank}"))
            processes.append(context.Process(target=failing.start, args=given))
            processes[-1].start()
    deadline = time.monotonic() + 60
    waited_for = [process for rank, process in enumerate(processes) if how != "SIGSTOP" or rank != victim]
    try:
        for process in waited_for:
            process.join(max(0.1, deadline - time.monotonic()))
        codes = [process.exitcode for process in processes]
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()
    output = "\n".join(path.read_text() for path in sorted(folder.glob("log*")))
    assert None not in [process.exitcode for process in waited_for], output
    assert all(code != 0 for code in codes), (codes, output)
    expected = {"SIGKILL": -9, "os._exit": 86, "segfault": -11, "raise": 1, "sys.exit": 3, "SIGSTOP": None}
    assert codes[victim] == expected[how], (codes, output)
    return 1, output


def under_mpirun(arguments: tuple[Any, ...]) -> tuple[int, str]:
    command, environment = mpirun(SIZE)
    return finish([*command, sys.executable], environment, arguments)


def finish(command: list[str], environment: dict[str, str], arguments: tuple[Any, ...]) -> tuple[int, str]:
    """The job's exit code and output. Ranks are ended that are left behind, as those that are stopped may be."""
    folder = arguments[-1]
    process = subprocess.Popen(
        [*command, "-m", "tests.collectives.failing", *map(str, arguments)],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output, _ = process.communicate(timeout=60)
    finally:
        process.kill()
        for path in folder.glob("pid*"):
            kill_leftover(int(path.read_text()))
    return process.returncode, output


def kill_leftover(pid: int) -> None:
    try:
        if "tests.collectives.failing" in Path(f"/proc/{pid}/cmdline").read_text():
            os.kill(pid, signal.SIGKILL)
    except (FileNotFoundError, ProcessLookupError):
        return


def check_notes(how: str, victim: int, folder: Path, output: str, all_live: bool = True) -> None:
    death = float((folder / "death").read_text())
    limit = SOON + (failing.TIMEOUT if how == "SIGSTOP" else 0.0)
    for rank in range(SIZE):
        path = folder / f"rank{rank}"
        if rank == victim or not (all_live or path.exists()):
            continue
        assert path.exists(), f"rank {rank} raised nothing before it was ended\n{output}"
        note = json.loads(path.read_text())
        assert note["error"] in ("PeerLostError", "CommTimeoutError"), note
        assert note["rank"] == note["named"] or f"rank {note['named']}" in note["text"], note
        ended = [error for error in note["pending"] if error != "NoneType"]  # what the victim began may be complete
        assert note["pending"][-len(ended) or len(note["pending"]) :] == ended, note
        assert set(ended) <= {"PeerLostError", "CommTimeoutError"}, note
        assert ended or not note["pending"] or note["refused"], note
        assert note["seen"] - death < limit, note
    if how == "raise":
        assert "ArithmeticError: the first failure" in output


def launches() -> list[Any]:
    cases = itertools.product(("launch", "torchrun"), HOW)
    tiers = {("launch", "SIGKILL"): (), ("launch", "sys.exit"): pytest.mark.full}
    return [pytest.param(*case, marks=tiers.get(case, pytest.mark.exhaustive)) for case in cases]


@pytest.mark.parametrize(("launcher", "how"), launches())
def test_launchers_tell(launcher: str, how: str, tmp_path: Path) -> None:
    """Ranks that a launcher ends early need not raise, but those that do raise the same."""
    start = ["-m", "launch", "-n"] if launcher == "launch" else ["-m", "torch.distributed.run", "--nproc-per-node"]
    arguments = (how, "ring", "gloo", 1, tmp_path)
    code, output = finish([sys.executable, *start, str(SIZE)], clean_environment(), arguments)
    assert code != 0, output
    check_notes(how, 1, tmp_path, output, all_live=False)
