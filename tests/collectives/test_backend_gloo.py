"""gloo at the seam, its ranks being threads of this process, and the key-value store."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import collectives
from collectives import P2P, Communicator, ReduceOp
from collectives.backend import Backend, Bootstrap
from collectives.backends.torch_dist import create_gloo, create_nccl, local_store, open_store, store_port
from collectives.engine import Engine
from collectives.errors import CommError, CommTimeoutError, PeerLostError, RendezvousError, UnsupportedError
from collectives.operation import Operation
from collectives.types import RankInfo
from tests.collectives import seam
from tests.ranks import run_ranks


def on_threads(size: int, law: Callable[[Backend], Any]) -> list[Any]:
    """``law(backend)`` on ``size`` ranks; results by rank, or the first failure."""
    store = local_store()
    results: list[Any] = [None] * size
    failures: list[BaseException] = []

    def main(rank: int) -> None:
        try:
            info = RankInfo(rank=rank, world_size=size)
            backend = create_gloo(Bootstrap(info, torch.device("cpu"), 20.0, lambda: store))
            results[rank] = law(backend)
            backend._close()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=main, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a rank hangs"
    if failures:
        raise failures[0]
    return results


@pytest.mark.parametrize("law", seam.LAWS)
@pytest.mark.parametrize("size", [1, 2, 3, pytest.param(5, marks=pytest.mark.full)])
def test_law(law: Callable[[Backend], None], size: int) -> None:
    on_threads(size, law)


def test_run_over_gloo() -> None:
    def total(comm: Communicator) -> float:
        tensor = torch.full((5,), comm.rank + 1.0)
        comm.all_reduce(tensor)
        return float(tensor[4])

    assert collectives.run(total, n=3, backend="gloo") == [6.0] * 3


def failure_of(wait: Callable[[], None]) -> CommError:
    with pytest.raises(CommError) as caught:
        wait()
    return caught.value


@pytest.mark.parametrize("native", [False, True])
def test_kill_wakes_whoever_waits(native: bool) -> None:
    """The peer of the killed rank is told as well, through the closed connection."""

    def law(backend: Backend) -> CommError:
        tensor = torch.ones(3)
        if backend.rank == 2:  # present, but never answers
            time.sleep(1.0)
            return CommError()
        peer = 2 if backend.rank == 0 else 0
        pending = backend._all_reduce(tensor, ReduceOp.SUM) if native else backend._post([P2P.recv(tensor, peer)], 0)
        if backend.rank == 0:
            threading.Timer(0.2, backend._kill).start()
        return failure_of(lambda: pending.wait(0, time.monotonic() + 20))

    killed, peer, _ = on_threads(3, law)
    assert not isinstance(killed, CommTimeoutError)
    assert "stopped" in str(killed)
    assert isinstance(peer, PeerLostError)
    assert native or peer.rank == 0


def test_an_expired_wait_is_a_time_out() -> None:
    def law(backend: Backend) -> CommError | None:
        if backend.rank == 1:
            time.sleep(1.0)
            return None
        pending = backend._post([P2P.recv(torch.empty(1), 1)], 0)
        return failure_of(lambda: pending.wait(0, time.monotonic() + 0.2))

    error, _ = on_threads(2, law)
    assert isinstance(error, CommTimeoutError)
    assert isinstance(error.__cause__, RuntimeError)


def test_peers_that_do_not_come() -> None:
    store = local_store()
    bootstrap = Bootstrap(RankInfo(rank=0, world_size=2), torch.device("cpu"), 0.5, lambda: store)
    with pytest.raises(RendezvousError, match="rank 0 expected to connect to 1 peers"):
        create_gloo(bootstrap)


def listening_addresses() -> set[str]:
    """The local addresses at which this process listens on TCP."""
    inodes = set()
    for link in Path("/proc/self/fd").iterdir():
        try:
            inodes.add(str(link.readlink()))
        except FileNotFoundError:  # the descriptor of this very listing
            continue
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                found.add(fields[1].partition(":")[0])
    return found


def test_one_host_listens_on_loopback_only() -> None:
    before = listening_addresses()
    store = open_store("127.0.0.1", 0, is_server=True, world_size=1, timeout=5.0)
    backend = create_gloo(Bootstrap(RankInfo(), torch.device("cpu"), 5.0, lambda: store))
    assert listening_addresses() - before <= {"0100007F"}
    backend._close()


def law_interrupt(comm: Communicator, native: bool) -> float:
    """Rank 0 gets a Ctrl-C while it waits for the others on its main thread; the others learn of it."""
    group = comm.split(0)
    assert group is not None
    tensor = torch.ones(3)
    if comm.rank:
        with pytest.raises(CommError, match=r"rank 0 .*interrupted"):
            group.recv(tensor, 0, timeout=30.0)
        return 0.0
    signal.signal(signal.SIGINT, signal.default_int_handler)
    started = time.monotonic()
    threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        group.all_reduce(tensor) if native else group.recv(tensor, 1)
    return time.monotonic() - started


@pytest.mark.parametrize(
    ("native", "backend", "world_size"),
    [
        (False, "gloo", 2),
        *(pytest.param(*case, marks=pytest.mark.full) for case in ((True, "gloo", 2), (False, "gloo", 3))),
    ],
)
def test_ctrl_c_interrupts_a_wait(native: bool, backend: str, world_size: int) -> None:
    seconds = run_ranks(law_interrupt, native, backend=backend, world_size=world_size)[0]
    assert seconds < 0.2 + 1.0


# The store


def test_store_at_any_free_port() -> None:
    server = open_store("127.0.0.1", 0, is_server=True, world_size=2, timeout=5.0)
    port = store_port(server)
    client = open_store("127.0.0.1", port, is_server=False, world_size=2, timeout=5.0, prefix="job")
    client.set("key", "value")
    assert server.get("job/key") == b"value"
    assert store_port(client) == port


def test_store_on_a_given_socket() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        server = open_store("127.0.0.1", 0, is_server=True, world_size=1, timeout=5.0, listen_fd=listener.detach())
    assert store_port(server) == port
    client = open_store("127.0.0.1", port, is_server=False, world_size=1, timeout=5.0)
    client.set("key", "value")
    assert server.get("key") == b"value"


def test_busy_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(RendezvousError, match=f"127.0.0.1:{port}.*in use"):
            open_store("127.0.0.1", port, is_server=True, world_size=1, timeout=20.0)


def test_nobody_serves() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
    with pytest.raises(RendezvousError, match=f"127.0.0.1:{port} within 0.5 s"):
        open_store("127.0.0.1", port, is_server=False, world_size=2, timeout=0.5)


def test_a_listener_that_never_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(RendezvousError, match=f"127.0.0.1:{port}.*did not answer"):
            open_store("127.0.0.1", port, is_server=False, world_size=2, timeout=1.0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_nccl_without_a_gpu_says_what_to_do() -> None:
    bootstrap = Bootstrap(RankInfo(), torch.device("cpu"), 5.0, local_store)
    with pytest.raises(UnsupportedError, match=r"needs an NVIDIA GPU.*use backend 'gloo'"):
        create_nccl(bootstrap)


def law_no_thread_is_left(comm: Communicator) -> list[str]:
    """After asynchronous collectives and polled messages on a group that is closed."""
    before = set(threading.enumerate())
    group = comm.split(0)
    assert group is not None
    block = Engine._block

    def slow(engine: Engine, operation: Operation) -> None:
        block(engine, operation)
        time.sleep(0.1)  # done, but still on the way back

    with mock.patch.object(Engine, "_block", slow):
        return _threads_left(group, before)


def _threads_left(group: Communicator, before: set[threading.Thread]) -> list[str]:
    works = [group.all_reduce(torch.ones(300_000), async_op=True) for _ in range(3)]
    peer = 1 - group.rank
    messages = [P2P.send(torch.ones(5), peer), P2P.recv(torch.ones(5), peer)]
    works.append(group.exchange(messages, async_op=True))
    while not all(work.is_completed() for work in works):
        time.sleep(0.001)
    group.close()
    return [thread.name for thread in set(threading.enumerate()) - before]


@pytest.mark.parametrize("backend", ["gloo", "ring+gloo", "shm+gloo"])
def test_closing_leaves_no_thread(backend: str) -> None:
    """The interpreter's end would meet it inside a library, and abort."""
    assert run_ranks(law_no_thread_is_left, world_size=2, backend=backend) == [[], []]
