"""A program whose ranks share memory under hard conditions: python -m tests.collectives.shm_program WHAT."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch

import collectives
from collectives import Communicator
from collectives.backends import neighbours
from collectives.errors import CommError

NUMEL = 300_000


def works(comm: Communicator) -> None:
    """Small and large, private and shared."""
    total = sum(range(1, comm.world_size + 1))
    for numel in (5, NUMEL):
        for tensor in (torch.empty(numel), comm.allocate(numel, torch.float32)):
            tensor.fill_(comm.rank + 1)
            comm.all_reduce(tensor)
            assert bool((tensor == total).all())
    comm.barrier()


def held() -> tuple[int, int]:
    """Open descriptors, and mappings of anonymous files."""
    return len(os.listdir("/proc/self/fd")), Path("/proc/self/maps").read_text().count("/memfd:")


def prove(comm: Communicator) -> None:
    works(comm)
    print(f"rank {comm.rank}: {comm._transport.name} with {len(neighbours_of(comm))} here", flush=True)


def neighbours_of(comm: Communicator) -> list[int]:
    team = getattr(comm._transport, "team", None)
    return [comm.rank] if team is None else list(team.ranks)


def open_and_close(rounds: int) -> None:
    before: list[tuple[int, int]] = []
    for _ in range(rounds):
        comm = collectives.init("shm+gloo", timeout=30.0)
        works(comm)
        half = comm.split(comm.rank % 2)
        assert half is not None
        works(half)
        comm.close()
        del comm, half
        assert held()[1] == 0, "memory is given back at once"
        gc.collect()  # other connections
        before.append(held())
    least, deadline = min(before[4:]), time.monotonic() + 10
    while held() > least and time.monotonic() < deadline:  # the transport below closes connections on a thread
        time.sleep(0.05)
    assert held() <= least, before
    print("flat", flush=True)


def die() -> None:
    Path(os.environ["SEEN"], "killed").write_text(str(time.time()))
    os.kill(os.getpid(), signal.SIGKILL)


def killed(how: str) -> None:
    comm = collectives.init("shm+gloo", timeout=30.0)
    works(comm)
    tensor = comm.allocate(NUMEL, torch.float32)
    if comm.rank == comm.world_size - 1:
        if how == "inside":
            threading.Timer(0.3, die).start()
        else:
            die()
    with contextlib.suppress(CommError):
        while True:
            comm.all_reduce(tensor)
    Path(os.environ["SEEN"], str(comm.rank)).write_text(str(time.time()))
    try:
        comm.barrier()
    except CommError as error:
        print(f"rank {comm.rank}: {error.__cause__ or error}", flush=True)
    os._exit(0)


def overwrites(what: str) -> None:
    """The last rank writes into memory that others read."""
    comm = collectives.init("shm+gloo", timeout=30.0)
    buffer = comm.allocate_shared(NUMEL * comm.world_size, torch.float32)
    assert buffer is not None
    own = comm.rank * NUMEL, (comm.rank + 1) * NUMEL
    mine = buffer.part(*own)
    buffer.guard(*own, True)
    buffer.guard(*own, False)
    mine.fill_(comm.rank)
    comm.all_gather(buffer.tensor, mine)
    buffer.guard(*own, True)
    if comm.rank == comm.world_size - 1:
        the_offender(buffer.tensor if what == "tensor" else mine)
    try:
        comm.barrier()
    except CommError:
        assert buffer.tensor[0] == 0
        assert buffer.tensor[-1] == comm.world_size - 1
        print(f"rank {comm.rank} reads on", flush=True)
        os._exit(0)


def the_offender(tensor: torch.Tensor) -> None:
    tensor.numpy()[:] = 7


def forked() -> None:
    comm = collectives.init("shm+gloo", timeout=30.0)
    works(comm)
    child = os.fork()
    if not child:
        try:
            comm.barrier()
        except CommError:
            os._exit(7)
        os._exit(1)
    works(comm)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    comm.close()
    print("forked", flush=True)


def refused(why: str) -> None:
    """The machine of one rank cannot share memory."""
    logging.basicConfig(level=logging.INFO, format="LOG %(message)s")
    if os.environ["RANK"] == "1":
        if why == "memfd":

            def refuse(*_: object) -> int:
                raise PermissionError(1, "Operation not permitted")

            os.memfd_create = refuse  # type: ignore[assignment]
        else:
            neighbours.platform.machine = lambda: why
    with collectives.init("shm+gloo", timeout=30.0) as comm:
        prove(comm)


def main(what: str, *arguments: str) -> None:
    if what == "open_and_close":
        open_and_close(int(arguments[0]))
    elif what == "killed":
        killed(arguments[0])
    elif what == "overwrites":
        overwrites(arguments[0])
    elif what == "forked":
        forked()
    elif what == "refused":
        refused(arguments[0])
    else:
        with collectives.init(what, timeout=30.0) as comm:
            prove(comm)


if __name__ == "__main__":
    main(*sys.argv[1:])
