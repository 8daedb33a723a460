"""What the control plane and the failure of a communicator promise whichever thread comes first."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import collectives
from collectives import Communicator
from collectives.control import Control, Waiting
from collectives.errors import CommClosedError, CommError, PeerLostError
from collectives.hub import Lines
from collectives.messages import Ledger, Message
from collectives.progress import Progress
from tests.ranks import run_ranks


class Group:
    """A communicator of which only the end matters."""

    name = ""
    members: Sequence[int] = (0, 1)
    calls = 0
    ledger = Ledger()

    def __init__(self) -> None:
        self.errors: list[CommError] = []

    def waiting(self) -> Waiting | None:
        return None

    def awaits(self, member: int) -> bool:
        return False

    def late_messages(self, now: float) -> list[Message]:
        return []

    def end(self, error: CommError) -> None:
        self.errors.append(error)

    def look(self) -> None:
        return

    def settle(self, seconds: float) -> None:
        return


def meeting() -> Callable[[bytes | None], bytes]:
    """What brings rank 0's bytes to everybody."""
    told: list[bytes] = []
    there = threading.Event()

    def share(data: bytes | None) -> bytes:
        if data is not None:
            told.append(data)
            there.set()
        assert there.wait(10)
        return told[0]

    return share


def test_a_goodbye_arrives_however_slowly_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that reads must not close the socket between close() and its note."""
    send = Lines.send

    def slowly(lines: Lines, **note: Any) -> None:
        if note.get("note") == "bye":
            time.sleep(0.3)
        send(lines, **note)

    share = meeting()
    group = Group()
    first = Control(0, 2, share, "127.0.0.1", 10.0)
    second = Control(1, 2, share, "127.0.0.1", 10.0)
    first.watch(group)
    second.watch(Group())
    monkeypatch.setattr(Lines, "send", slowly)
    second.close()
    deadline = time.monotonic() + 10
    while (1, "") not in first._left and not group.errors and time.monotonic() < deadline:
        time.sleep(0.01)
    first.close()
    assert not group.errors


def test_the_hub_tells_its_own_rank_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the news rank 0 may end the process, and the hub with it; the others must have heard by then."""
    share = meeting()
    controls = [Control(rank, 4, share, "127.0.0.1", 10.0) for rank in range(4)]
    hub = controls[0]._hub
    assert hub is not None
    deadline = time.monotonic() + 10
    while len(hub._peers) < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    rank_of = {lines: rank for rank, lines in hub._peers.items()}
    send, order = Lines.send, list[int]()

    def noted(lines: Lines, **note: Any) -> None:
        if note.get("note") == "lost" and lines in rank_of:
            order.append(rank_of[lines])
        send(lines, **note)

    monkeypatch.setattr(Lines, "send", noted)
    controls[2]._closed = True
    controls[2]._lines.sock.shutdown(socket.SHUT_RDWR)
    while len(order) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert order == [3, 1, 0]
    for rank in (3, 1, 0):
        controls[rank].close()


def law_born_lost(comm: Communicator) -> None:
    control = comm._control
    assert control is not None
    seen: list[CommError | None] = []
    with pytest.MonkeyPatch.context() as patched:

        def watch(group: Progress) -> None:  # everything that the control thread may ask of it, at once
            group.waiting(), group.late_messages(0.0), group.awaits(1 - comm.rank), group.look(), group.settle(0.0)
            group.end(PeerLostError("lost before", 1 - comm.rank))
            seen.append(group.failure)

        patched.setattr(control, "watch", watch)
        group = comm.split(0)
        assert group is not None
    assert [type(error) for error in seen] == [PeerLostError]
    with pytest.raises(CommClosedError):
        group.barrier()
    group.close()
    comm.barrier()


@pytest.mark.parametrize("backend", ["gloo", "mpi", "ring+gloo", "shm+gloo"])
def test_a_communicator_may_be_lost_when_it_is_born(backend: str) -> None:
    """A member can be gone before the last line of the constructor."""
    run_ranks(law_born_lost, world_size=2, backend=backend)


def law_pending_works_have_failed(comm: Communicator) -> None:
    group = comm.split(0)
    assert group is not None
    if comm.rank == 0:
        progress, seen = group._progress, list[BaseException | None]()
        work = group.all_reduce(torch.ones(100_000), async_op=True)
        progress._kill = lambda kill=progress._kill: (seen.append(work.exception()), kill())  # type: ignore[assignment, misc]
        group.abort("enough")
        assert [type(error) for error in seen] == [CommError]
        assert work.exception() is seen[0]
    comm.barrier()


@pytest.mark.parametrize("backend", ["threads", "gloo"])
def test_pending_works_have_failed_once_the_communicator_has(backend: str) -> None:
    """Who learns of the failure from another call asks the work next, while the transport is still being closed."""
    collectives.run(law_pending_works_have_failed, n=2, backend=backend)
