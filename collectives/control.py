"""The control plane: one connection a rank to a hub on rank 0, so that a failure anywhere is known everywhere.

Data travels over the backend; here travel only short notes about how ranks are. A rank says ``bye`` when it leaves, so
an end-of-file without it means that the rank died, and the hub tells all within milliseconds, whatever they were
waiting for. A call that has waited for a while says which it is; the hub compares, and tells the ranks that wait who is
missing and who called something else. One thread a process reads these notes (see ``hub``) and fails the communicators
they concern.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from collectives.errors import CollectiveMismatchError, CommError, CommTimeoutError, PeerLostError, RendezvousError
from collectives.fork import close_in_child, generation
from collectives.hub import Hub, Lines, Note
from collectives.messages import Ledger, Message

Share = Callable[[bytes | None], bytes]  # rank 0's bytes, on every rank
_TICK = 0.1  # seconds between looks at what is waiting here
_SETTLE = 0.5  # seconds that a program's end gives to what it has not waited for
_UNANSWERED = 0.5  # seconds after which a silent hub is news


class Waiting(NamedTuple):
    """The oldest unfinished collective of a group: its number, what it is, since when (monotonic) and its time-out."""

    call: int
    what: str
    since: float
    timeout: float


class Late(Protocol):
    """Something with a beginning (monotonic) and a time-out, both in seconds."""

    @property
    def since(self) -> float: ...
    @property
    def timeout(self) -> float: ...


def is_late(what: Late, now: float) -> bool:
    """Whether it has waited long enough to be worth a question to the others."""
    return now - what.since > min(1.0, what.timeout / 4)


class Group(Protocol):
    """What the control plane sees of a communicator. ``members`` are ranks of the first communicator, in order."""

    name: str
    members: Sequence[int]
    calls: int  # collectives started so far
    ledger: Ledger

    def waiting(self) -> Waiting | None: ...
    def awaits(self, member: int) -> bool: ...  # a point-to-point operation with that member is pending
    def late_messages(self, now: float) -> list[Message]: ...
    def end(self, error: CommError) -> None: ...
    def look(self) -> None: ...
    def settle(self, seconds: float) -> None: ...


class Control:
    """A rank's side: a thread that hears the hub, and reports what waits here."""

    def __init__(self, rank: int, size: int, share: Share, address: str, timeout: float) -> None:
        """Connect to the hub, made here on rank 0.

        Args:
            share: carries rank 0's bytes to every rank (a store, or an MPI broadcast).
            address: this host's address; on rank 0 the one that the others reach it at.
            timeout: seconds for connecting.

        Raises:
            RendezvousError: no hub answered.
        """
        self.rank = rank
        self.size = size
        self.groups: list[Group] = []
        self._hub: Hub | None = None
        if rank == 0:
            token = secrets.token_hex(16)
            self._hub = Hub(size, address, token)
            share(json.dumps([address, self._hub.port, token]).encode())
            host, port = address, self._hub.port
        else:
            host, port, token = json.loads(share(None))
        try:
            sock = socket.create_connection((host, port), timeout)
        except OSError as error:
            raise RendezvousError(
                f"rank {rank} expected rank 0's control connection at {host}:{port}: {error}; check that this address "
                "can be reached from here"
            ) from error
        sock.settimeout(_TICK)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._lines = Lines(sock)
        self._lines.send(rank=rank, token=token)
        self._lost: dict[int, str] = {}
        self._failed: dict[str, Note] = {}  # by group, what a member said
        self._gone: set[int] = set()
        self._left: dict[tuple[int, str], tuple[float, int]] = {}  # (rank, group) to when, and how many calls it made
        self._reported: dict[str, tuple[int, float]] = {}
        self._answers: dict[str, Note] = {}
        self._asked: dict[str, float] = {}  # group to when it last asked about messages
        self._closing = False
        self._closed = False
        self._generation = generation()
        atexit.register(self._at_exit)
        close_in_child(sock)
        self._thread = threading.Thread(target=self._run, name="collectives control", daemon=True)
        self._thread.start()

    # What this rank tells

    def watch(self, group: Group) -> None:
        """Look after a communicator from now on: what was heard about it before, while it was made, counts too."""
        self.groups.append(group)
        for rank, how in [*self._lost.items()]:
            self._end_for_lost(group, rank, how)
        if (note := self._failed.get(group.name)) is not None:
            self._on_fail(group.name, **note)

    def forget(self, group: Group) -> None:
        """A communicator was closed; a peer that still waits in it learns so."""
        if group in self.groups:
            self.groups.remove(group)
            self._lines.send(note="closed", group=group.name, calls=group.calls)

    def failed(self, group: Group, error: CommError, leaves: bool = False) -> None:
        """A communicator failed here: its other members are told. ``leaves``: because this rank's program ends."""
        kind, rank = type(error).__name__, getattr(error, "rank", -1)
        if leaves:
            kind, rank = PeerLostError.__name__, self.rank
        elif 0 <= rank < len(group.members):
            rank = group.members[rank]
        self._lines.send(note="fail", group=group.name, kind=kind, reason=str(error), rank=rank)

    def close(self) -> None:
        """Say goodbye."""
        if self._closing or generation() != self._generation:
            return
        self._closing = True
        atexit.unregister(self._at_exit)
        # Of a collective that this rank began and did not finish, the others miss its part.
        waiting = {group.name: group.waiting() for group in self.groups}
        calls = {
            group.name: group.calls if (oldest := waiting[group.name]) is None else oldest.call - 1
            for group in self.groups
        }
        self._lines.send(note="bye", calls=calls)
        self._closed = True  # not before: the thread then closes the socket
        with contextlib.suppress(OSError):
            self._lines.sock.shutdown(socket.SHUT_WR)
        # The hub closes its end in return. A thread that the interpreter's end meets inside a library ends in abort().
        if threading.current_thread() is not self._thread:
            self._thread.join(1.0)

    def _at_exit(self) -> None:
        """The program ends without closing: well, or by an exception that nobody caught."""
        error = getattr(sys, "last_value", None)
        if error is not None and generation() == self._generation:
            for group in self.groups:
                ended = CommError(f"its program ended with {type(error).__name__}: {error}")
                self.failed(group, ended, leaves=True)
        elif generation() == self._generation:
            for group in self.groups:
                group.settle(_SETTLE)
        self.close()

    # What this rank hears

    def missing(self, group: Group, call: int, among: Sequence[int] | None = None) -> str:
        """Which members of ``group`` are not known to have come to ``call``, for an error message.

        ``among``: the ranks in ``group`` that should come; None for all.
        """
        reported = self._reported.get(group.name)
        answer = self._answers.get(group.name)
        if answer is None or answer["call"] != call:
            late = reported is not None and time.monotonic() - reported[1] > _UNANSWERED
            hub = f"rank {group.members.index(0)}" if 0 in group.members else "rank 0 of the job"
            return f"{hub} is missing: it serves the control connections and does not answer" if late else ""
        seen = answer["seen"]
        wanted = group.members if among is None else [group.members[rank] for rank in among]
        absent = [member for member in wanted if member not in answer["ranks"]]
        if not absent:
            return "all ranks wait in this call: the transport between them is stuck"
        names = ", ".join(
            f"rank {group.members.index(member)}"
            + (f" (last seen waiting in call {seen[str(member)]})" if str(member) in seen else "")
            for member in absent
        )
        return f"missing: {names}"

    def _run(self) -> None:
        with self._lines.sock:
            while not self._closed:
                try:
                    for note in self._lines.receive():
                        getattr(self, f"_on_{note.pop('note')}")(**note)
                except TimeoutError:
                    pass
                except OSError:
                    if not self._closed and 0 not in self._gone:
                        self._on_lost(0, "end of file")
                    return
                self._look()

    def _look(self) -> None:
        """Report calls that have waited for a while, and fail those that wait for a rank that has left."""
        now = time.monotonic()
        for group in [*self.groups]:
            group.look()
            waiting = group.waiting()
            if waiting is not None and is_late(waiting, now):
                reported = self._reported.get(group.name)
                if reported is None or reported[0] != waiting.call:
                    self._reported[group.name] = (waiting.call, now)
                    self._lines.send(note="wait", group=group.name, call=waiting.call, what=waiting.what)
            self._ask_about_messages(group, now)
            for (rank, name), (since, calls) in [*self._left.items()]:
                if name == group.name and rank in group.members:
                    self._check_left(group, waiting, rank, calls, now - since)

    def _ask_about_messages(self, group: Group, now: float) -> None:
        """Let each peer compare with its own side what has waited here for a while; it may start that side later."""
        late = group.late_messages(now)
        if late and now - self._asked.get(group.name, 0.0) > 1.0:
            self._asked[group.name] = now
            for message in late:
                to = group.members[message.peer]
                self._lines.send(note="message", group=group.name, to=to, message=message)

    def _check_left(self, group: Group, waiting: Waiting | None, rank: int, calls: int, ago: float) -> None:
        member = group.members.index(rank)
        if waiting is not None and calls < waiting.call:
            group.end(
                PeerLostError(
                    f"rank {member} has left: it closed its communicator or ended after {calls} collectives",
                    member,
                )
            )
        elif ago > 1.0 and group.awaits(member):  # whatever it sent before it left has long arrived
            group.end(PeerLostError(f"rank {member} has left; it will not answer a send or receive", member))

    def _on_lost(self, rank: int, how: str) -> None:
        self._lost[rank] = how
        for group in [*self.groups]:
            self._end_for_lost(group, rank, how)

    def _end_for_lost(self, group: Group, rank: int, how: str) -> None:
        if rank in group.members:
            member = group.members.index(rank)
            group.end(PeerLostError(f"rank {member} is lost: its process ended without saying goodbye ({how})", member))

    def _on_left(self, rank: int, calls: Mapping[str, int], gone: bool) -> None:
        now = time.monotonic()
        self._left.update({(rank, group): (now, made) for group, made in calls.items()})
        if gone:
            self._gone.add(rank)
        self._look()

    def _on_waiting(self, group: str, **answer: Any) -> None:
        self._answers[group] = answer

    def _on_message(self, group: str, message: Sequence[Any], by: int) -> None:
        """A peer waits for a message's other side, which may have gone wrong here."""
        for watched in [*self.groups]:
            if watched.name == group and by in watched.members:
                theirs = Message(watched.members.index(by), *message[1:])
                mine = watched.ledger.counterpart(theirs)
                if mine is not None and mine.what != theirs.what:
                    error = CollectiveMismatchError(_differing(watched.members.index(self.rank), mine, theirs))
                    self.failed(watched, error)
                    watched.end(error)

    def _on_mismatch(self, group: str, call: int, whats: Mapping[str, str]) -> None:
        for watched in [*self.groups]:
            if watched.name == group:
                parts = [
                    f"rank {watched.members.index(int(rank))} called {what}"
                    for rank, what in whats.items()
                    if int(rank) in watched.members
                ]
                watched.end(
                    CollectiveMismatchError(
                        f"collective number {call} is not the same on all ranks: {'; '.join(parts)}; "
                        "make the same calls in the same order everywhere"
                    )
                )

    def _on_fail(self, group: str, kind: str, reason: str, rank: int, by: int) -> None:
        if by == self.rank:
            return
        self._failed[group] = {"kind": kind, "reason": reason, "rank": rank, "by": by}
        for watched in [*self.groups]:
            if watched.name == group and by in watched.members:
                member = watched.members.index(rank) if rank in watched.members else -1
                said = f"rank {watched.members.index(by)} failed: {reason}"
                watched.end(
                    PeerLostError(said, member)
                    if kind == "PeerLostError"
                    else CommTimeoutError(said)
                    if kind == "CommTimeoutError"
                    else CollectiveMismatchError(said)
                    if kind == "CollectiveMismatchError"
                    else CommError(said)
                )


def _differing(rank: int, mine: Message, theirs: Message) -> str:
    """What is wrong between two sides of a message, one of them of this ``rank``."""
    sides = {mine.sends: (rank, mine.what), theirs.sends: (mine.peer, theirs.what)}
    (source, sent), (target, expected) = sides[True], sides[False]
    return (
        f"rank {source} sends {sent} to rank {target}, which receives {expected} (message {mine.number} between them "
        f"with tag {mine.tag}); make numel and dtype equal on both sides, and the order of messages with one tag"
    )
