"""Run a function on every rank of a communicator, from an ordinary test.

Threads run in this process. Every other backend runs in worker processes (tests/worker.py) that are kept alive, one
pool for each (launcher, world size), so that a test costs milliseconds and not a start of Python. Calls and results go
through a side channel with a time-out: a rank that hangs or dies fails the test and takes its pool with it, and the
next test gets a new one.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import pickle
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import pytest

import collectives
from collectives.errors import CommClosedError, PeerLostError

BACKENDS = ["threads", "gloo", "mpi", "ring+gloo", "ring+mpi", "shm+gloo", "shm+mpi"]
ROOT = Path(__file__).resolve().parents[1]
MAX_POOLS = 2
START_TIMEOUT = 120.0
LEAVE = b"leave"  # what a worker is sent instead of a call, at the end
GRACE = 5.0  # how long the others may still answer once one rank has failed
LAUNCHER_PREFIXES = (
    "OMPI_",
    "PMI",
    "PALS_",
    "PRTE_",
    "SLURM",
    "MPI_",
    "MV2_",
    "MVP_",
    "HYDRA",
    "HYDI_",
    "TORCHELASTIC",
)
LAUNCHER_NAMES = {
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "ROLE_WORLD_SIZE",
    "GROUP_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
}  # fmt: skip


class Call(NamedTuple):
    """What a worker is asked to do."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    backend: str


def run_ranks(
    fn: Callable[..., Any],
    *args: Any,
    world_size: int = 2,
    backend: str = "threads",
    timeout: float = 60.0,
    **kwargs: Any,
) -> list[Any]:
    """The results of ``fn(comm, *args, **kwargs)`` on every rank, by rank.

    ``fn`` is a function of a test module; arguments and results are pickled. Raises the error of the rank that failed
    first, with its traceback in the notes, or ``TimeoutError`` with the stacks of the ranks that hang.
    """
    if backend.rpartition("+")[2] == "threads":
        return collectives.run(functools.partial(fn, **kwargs), *args, n=world_size, backend=backend)
    return POOLS.get(family(backend), world_size).run(Call(fn, args, kwargs, backend), timeout)


class Run(Protocol):
    """``run_ranks`` on the backend of the test that asks for the fixture ``run``."""

    def __call__(self, fn: Callable[..., Any], *args: Any, n: int = 2) -> list[Any]: ...


def world_sizes(*usual: int) -> pytest.MarkDecorator:
    """Parametrize a test by ``world_size``: these, and with ``--exhaustive`` the rest of 1 to 4."""
    sizes = sorted({1, 2, 3, 4, *usual})
    params = [pytest.param(n, marks=() if n in usual else pytest.mark.exhaustive) for n in sizes]
    return pytest.mark.parametrize("world_size", params)


def backends(*names: str) -> pytest.MarkDecorator:
    """Parametrize a test by ``backend``: the first of these, and with ``--exhaustive`` the others."""
    others = [pytest.param(name, marks=pytest.mark.exhaustive) for name in names[1:]]
    return pytest.mark.parametrize("backend", [names[0], *others])


PROCESSES = backends("gloo", "mpi", "ring+gloo", "shm+gloo")  # where ranks must not share an interpreter
PRIVATE = backends("threads", "gloo", "mpi", "ring+gloo")  # ranks share no memory


def family(backend: str) -> str:
    """What starts the ranks of a backend: "mpirun", "plain" processes, or "" for threads of this one."""
    base = backend.rpartition("+")[2]
    return {"threads": "", "mpi": "mpirun"}.get(base, "plain")


def grid(
    backends: Iterable[str] = BACKENDS,
    world_sizes: Iterable[int] = (1, 2, 3, 4),
    threads: Iterable[int] = (5, 8),
    full: Callable[[str, int], bool] | None = None,
) -> pytest.MarkDecorator:
    """Parametrize a test by ``backend`` and ``world_size``; ``threads`` are further sizes for that backend.

    Combinations that ``full`` picks run with ``--full`` only; by default those that repeat what the others show. Of
    those that are processes, ``--full`` has a few, and ``--exhaustive`` all.
    """
    repeats = full or (lambda backend, world_size: world_size == 8 or ("+" in backend and world_size in (1, 4)))
    sizes = list(world_sizes)
    pairs = [(b, w) for b in backends for w in [*sizes, *(threads if b == "threads" else ())]]
    return pytest.mark.parametrize(
        ("backend", "world_size"),
        [pytest.param(b, w, marks=_tier(b, w, sizes) if repeats(b, w) else ()) for b, w in pairs],
    )


_USUAL = {"gloo": 2, "mpi": 2, "ring+gloo": 3, "shm+mpi": 2}


def _tier(backend: str, world_size: int, sizes: Sequence[int]) -> pytest.MarkDecorator:
    usual = world_size if backend == "threads" else _USUAL.get(backend, 0)
    if usual and usual not in sizes:
        usual = sizes[0]
    return pytest.mark.full if world_size == usual else pytest.mark.exhaustive


def clean_environment() -> dict[str, str]:
    """This environment without what a launcher around the test run may have put there; one thread a rank."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in LAUNCHER_NAMES and not name.startswith(LAUNCHER_PREFIXES)
    }
    path = os.pathsep.join([str(ROOT), *filter(None, [kept.get("PYTHONPATH")])])
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


def mpirun(world_size: int) -> tuple[list[str], dict[str, str]]:
    """The command (to be continued by the program) and environment that start ``world_size`` MPI ranks here."""
    beside = Path(sys.executable).parent / "mpirun"
    found = str(beside) if beside.exists() else shutil.which("mpirun")
    if found is None:
        raise RuntimeError("the tests start ranks with mpirun, and there is none; pip install -e '.[test]' brings one")
    environment = clean_environment()
    environment.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1", OMPI_MCA_mpi_yield_when_idle="1")
    return [found, "-n", str(world_size), "--oversubscribe", "--bind-to", "none"], environment


class Forked:
    """A worker forked from a server process that has PyTorch imported already, with the interface of ``Popen``."""

    def __init__(self, environment: dict[str, str], store: socket.socket | None) -> None:
        from tests import worker

        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.worker"])
        self._process = context.Process(target=worker.start, args=(environment, store))
        self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("worker", timeout or 0.0)
        return self._process.exitcode

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()


class Pool:
    """Worker processes that form one job, and a connection to each."""

    def __init__(self, launcher: str, world_size: int) -> None:
        self.launcher, self.world_size = launcher, world_size
        self.folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        self.processes: list[subprocess.Popen[bytes] | Forked] = []
        self.connections: list[Connection] = []
        self.pids: list[int] = []
        self.closed = False
        address, key = str(self.folder / "socket"), secrets.token_bytes(16)
        try:
            with Listener(address, family="AF_UNIX", backlog=world_size, authkey=key) as listener:
                self._start({"RANKS_SOCKET": address, "RANKS_KEY": key.hex(), "RANKS_LOGS": str(self.folder)})
                self._accept(listener)
        except BaseException:
            self.kill()
            raise

    def _start(self, variables: dict[str, str]) -> None:
        if self.launcher == "mpirun":
            command, environment = mpirun(self.world_size)
            with open(self.folder / "launcher.log", "wb") as log:
                started = subprocess.Popen(
                    [*command, sys.executable, "-m", "tests.worker"],
                    env={**environment, **variables},
                    cwd=ROOT,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            self.processes = [started]
            return
        # As python -m launch does: rank 0 inherits the listening socket of the job's store, so no port is guessed.
        with socket.create_server(("127.0.0.1", 0), backlog=128) as store:
            place = {"COLLECTIVES_LAUNCH": "tests", "MASTER_ADDR": "127.0.0.1"}
            place["MASTER_PORT"] = str(store.getsockname()[1])
            size = str(self.world_size)
            for rank in map(str, range(self.world_size)):
                identity = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}
                environment = {**clean_environment(), **variables, **place, **identity}
                self.processes.append(Forked(environment, store if rank == "0" else None))

    def _accept(self, listener: Listener) -> None:
        """Wait for every worker to say who it is."""
        by_rank: dict[int, tuple[Connection, int]] = {}
        deadline = time.monotonic() + START_TIMEOUT
        expired = threading.Event()

        def wake() -> None:
            while not expired.wait(0.2):
                if time.monotonic() > deadline or any(p.poll() is not None for p in self.processes):
                    expired.set()
                    with socket.socket(socket.AF_UNIX) as knock:
                        knock.connect(str(listener.address))

        waker = threading.Thread(target=wake, daemon=True)
        waker.start()
        try:
            while len(by_rank) < self.world_size:
                connection = listener.accept()
                rank, pid = pickle.loads(connection.recv_bytes())
                by_rank[rank] = connection, pid
        except (EOFError, OSError) as error:
            raise RuntimeError(
                f"only {len(by_rank)} of {self.world_size} workers of {self.launcher!r} came up:\n{self.logs()}"
            ) from error
        finally:
            expired.set()
            waker.join()
        self.connections = [by_rank[rank][0] for rank in range(self.world_size)]
        self.pids = [by_rank[rank][1] for rank in range(self.world_size)]

    def run(self, call: Call, timeout: float) -> list[Any]:
        """The results of a call by rank. What ends it early takes the pool, whose answers would be the next one's."""
        try:
            return self._run(call, timeout)
        except BaseException:
            self.kill()
            raise

    def _run(self, call: Call, timeout: float) -> list[Any]:
        message = pickle.dumps(call)
        for connection in self.connections:
            connection.send_bytes(message)
        results: dict[int, Any] = {}
        failures: list[BaseException] = []
        deadline = time.monotonic() + timeout
        pending = dict(enumerate(self.connections))
        while pending and (left := deadline - time.monotonic()) > 0:
            ready = set(wait(list(pending.values()), left))
            for rank in [rank for rank, connection in pending.items() if connection in ready]:
                results[rank], error = self._answer(rank, pending.pop(rank))
                if error is not None:
                    failures.append(error)
                    deadline = min(deadline, time.monotonic() + GRACE)
        if not failures and not pending:
            return [results[rank] for rank in range(self.world_size)]
        if not failures:
            failures = [TimeoutError(f"ranks {sorted(pending)} of {self.world_size} gave no answer within {timeout} s")]
        # That a peer has left is what follows from a failure elsewhere, so any other error says more.
        error = next((e for e in failures if not isinstance(e, (PeerLostError, CommClosedError))), failures[0])
        if pending:
            add_note(error, f"ranks {sorted(pending)} were still busy:\n{self._stacks(sorted(pending))}")
        raise error

    def _answer(self, rank: int, connection: Connection) -> tuple[Any, BaseException | None]:
        try:
            result, error, trace = pickle.loads(connection.recv_bytes())
        except (EOFError, ConnectionError):
            for process in self.processes:
                wait_briefly(process)
            codes = [process.poll() for process in self.processes]
            return None, RuntimeError(f"rank {rank} died (exit codes of the launched: {codes}):\n{self.logs()}")
        if error is not None:
            add_note(error, f"rank {rank} of {self.world_size} ({self.launcher}) failed:\n{trace}")
        return result, error

    def _stacks(self, ranks: Sequence[int]) -> str:
        for rank in ranks:
            try:
                os.kill(self.pids[rank], signal.SIGUSR1)
            except ProcessLookupError:
                continue
        time.sleep(0.5)
        return self.logs()

    def logs(self) -> str:
        """The end of what each process wrote."""
        texts = {path.name: path.read_text(errors="replace")[-6000:] for path in sorted(self.folder.glob("*.log"))}
        return "\n".join(f"--- {name}\n{text}" for name, text in texts.items() if text)

    def kill(self) -> None:
        """End every process now."""
        self.closed = True
        for pid in self.pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        for process in self.processes:
            if self.launcher == "mpirun":
                process.terminate()
                wait_briefly(process, 10.0)
            process.kill()
            process.wait()
        self._release()

    def close(self) -> str:
        """Let every worker close its communicators and leave; returns what went wrong, or nothing."""
        if self.closed:
            return ""
        self.closed = True
        for connection in self.connections:
            connection.send_bytes(LEAVE)
        for process in self.processes:
            wait_briefly(process, 30.0)
        codes = [process.poll() for process in self.processes]
        trouble = ""
        if any(code != 0 for code in codes):
            stacks = self._stacks(range(self.world_size)) if None in codes else self.logs()
            trouble = f"the {self.launcher} pool of {self.world_size} did not leave cleanly: {codes}\n{stacks}"
            self.kill()
        self._release()
        return trouble

    def _release(self) -> None:
        for connection in self.connections:
            connection.close()
        shutil.rmtree(self.folder, ignore_errors=True)


class Pools:
    """The pools that are alive, the least recently used first."""

    def __init__(self) -> None:
        self.alive: dict[tuple[str, int], Pool] = {}
        self.troubles: list[str] = []

    def get(self, launcher: str, world_size: int) -> Pool:
        key = launcher, world_size
        pool = self.alive.pop(key, None)
        if pool is None or pool.closed:
            while len(self.alive) >= MAX_POOLS:
                self._close(next(iter(self.alive)))
            pool = Pool(launcher, world_size)
        self.alive[key] = pool
        return pool

    def close(self) -> list[str]:
        """Close all; returns everything that went wrong while pools were closed."""
        while self.alive:
            self._close(next(iter(self.alive)))
        return self.troubles

    def _close(self, key: tuple[str, int]) -> None:
        if trouble := self.alive.pop(key).close():
            self.troubles.append(trouble)


POOLS = Pools()


def wait_briefly(process: subprocess.Popen[bytes] | Forked, seconds: float = 2.0) -> None:
    """Give a process some time to end by itself."""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return


def add_note(error: BaseException, note: str) -> None:
    """``BaseException.add_note``, which Python 3.10 lacks."""
    error.__notes__ = [*getattr(error, "__notes__", []), note]
