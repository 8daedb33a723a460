"""Ranks that are threads of one process: for notebooks, for tests, and as the simplest backend to read."""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Sequence

import torch

from collectives.backend import Backend, Bootstrap
from collectives.errors import CommError, CommTimeoutError, PeerLostError, UnsupportedError
from collectives.types import P2P


class _Message:
    """A posted send or receive. Like MPI's synchronous send it is done only when both sides have met."""

    def __init__(self, tensor: torch.Tensor, peer: int) -> None:
        self.tensor = tensor
        self.peer = peer
        self.done = False
        self.error: str | None = None


class World:
    """What the ranks share: one lock, and for each (group, src, dst, tag) the posts that wait for their other side."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.changed = threading.Condition()
        self.sends: defaultdict[tuple[str, int, int, int], deque[_Message]] = defaultdict(deque)
        self.recvs: defaultdict[tuple[str, int, int, int], deque[_Message]] = defaultdict(deque)
        self.dead: dict[str, str] = {}  # group -> why
        self.left: set[tuple[str, int]] = set()  # (group, rank) that closed

    def meet(self, key: tuple[str, int, int, int], message: _Message, sends: bool) -> None:
        """Pair a post with the oldest one that waits on the other side, and copy. Called with the lock held."""
        waiting = (self.recvs if sends else self.sends)[key]
        if not waiting:
            (self.sends if sends else self.recvs)[key].append(message)
            return
        other = waiting.popleft()
        source, target = (message, other) if sends else (other, message)
        if source.tensor.nbytes != target.tensor.nbytes:
            message.error = other.error = (
                f"rank {key[1]} sent {source.tensor.nbytes} bytes, rank {key[2]} expected {target.tensor.nbytes}"
            )
        else:
            with torch.inference_mode():
                target.tensor.view(torch.uint8).copy_(source.tensor.view(torch.uint8))
        message.done = other.done = True
        self.changed.notify_all()


class _Pending:
    def __init__(self, backend: ThreadsBackend, messages: list[_Message]) -> None:
        self._backend = backend
        self._messages = messages

    def poll(self) -> bool:
        return all(self._done(message) for message in self._messages)

    def wait(self, i: int, deadline: float) -> None:
        message, world = self._messages[i], self._backend.world
        with world.changed:
            while not self._done(message):
                left = deadline - time.monotonic()
                if left <= 0:
                    raise CommTimeoutError("no peer came")
                world.changed.wait(left)

    def _done(self, message: _Message) -> bool:
        if message.error:
            raise CommError(message.error)
        if not message.done:
            self._backend.check(message.peer)
        return message.done


class ThreadsBackend(Backend):
    """One rank of a ``World``. ``members`` are its ranks in the world, in this group's order."""

    name = "threads"
    polls = True
    waits = True

    def __init__(self, world: World, rank: int, members: Sequence[int] | None = None, group: str = "") -> None:
        self.world = world
        self.members = tuple(members) if members is not None else tuple(range(world.size))
        self.rank = rank
        self.size = len(self.members)
        self.device = torch.device("cpu")
        self.group = group

    def check(self, peer: int) -> None:
        """Raise if an unfinished message with ``peer`` will never be done."""
        if self.group in self.world.dead:
            raise CommError(self.world.dead[self.group])
        if (self.group, peer) in self.world.left:
            raise PeerLostError(f"rank {peer} has left: it closed its communicator", peer)

    def _post(self, ops: Sequence[P2P], tag: int) -> _Pending:
        messages = []
        with self.world.changed:
            for sends, tensor, peer in ops:
                self.check(peer)
                src, dst = (self.rank, peer) if sends else (peer, self.rank)
                messages.append(_Message(tensor, peer))
                self.world.meet((self.group, src, dst, tag), messages[-1], sends)
        return _Pending(self, messages)

    def _split(self, members: Sequence[int], name: str) -> ThreadsBackend:
        return ThreadsBackend(self.world, members.index(self.rank), [self.members[m] for m in members], name)

    def _kill(self) -> None:
        with self.world.changed:
            self.world.dead.setdefault(self.group, f"rank {self.rank} ended the communicator")
            self.world.changed.notify_all()

    def _close(self) -> None:
        with self.world.changed:
            self.world.left.add((self.group, self.rank))
            self.world.changed.notify_all()


def create(bootstrap: Bootstrap) -> ThreadsBackend:
    """For ``init("threads")``: a world of one. More ranks come from ``collectives.run``."""
    if bootstrap.info.world_size > 1:
        raise UnsupportedError(
            f"backend 'threads' keeps all ranks in one process, but this job has {bootstrap.info.world_size} of them; "
            "use collectives.run(fn, n=...) for threads, or another backend here"
        )
    return ThreadsBackend(World(1), 0)
