"""How ranks on a host tell each other how far they are: a line of memory each, which only its owner writes.

[Note: steps]
All that ranks do in shared memory is a sequence of steps, counted from the first: write, publish, wait until everybody
has published the same step, read. What step s published is read before its reader publishes s + 1, so its writer may
overwrite it once everybody has published s + 1. Hence two places, used in turn, are enough for everything that is
written anew in each step: the lines themselves, with the header of a call, and the slots for data.

[Note: order of stores]
x86-64 makes stores visible in the order in which they are made, and loads are made in order too, so a line that shows a
step shows all that was written before it. Other processors do not promise that, and there this module is not used.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Sequence

from collectives.errors import CommError, CommTimeoutError, PeerLostError

BLOCK = 512  # bytes of a rank's block: two lines for steps, used in turn, and one for its life
_LINE = 16  # words from one line to the next: two cache lines, since processors fetch them in pairs
_LIFE = 2 * _LINE
STEP, SIGNATURE, PLACE, OWNER, DETAILS = range(5)  # words of a line
_KILLED, _LEFT = 1, 2

# How long a rank waits in which way, in seconds: eagerly; then giving its core away between looks, as a peer needs it
# where there are more ranks than cores; then in naps, so short that a peer's coming is noticed in good time.
_SPIN, _YIELD, _YIELD_CROWDED = 100e-6, 2e-3, 300e-6
_NAP, _NAP_LATER, _LATER = 50e-6, 1e-3, 50e-3
_BETWEEN_LOOKS = 0.02  # at whether the peers' processes live


def clear(words: memoryview, block: int) -> None:
    """Make a block that says nothing yet. Peers may learn of it only afterwards."""
    for word in range(BLOCK // 8):
        words[block + word] = 0


class Signals:
    """The lines of a group of ranks on this host, seen from one of them.

    Args:
        blocks: for each member (memory of its segment as words, index of its block).
        me: this rank's index among them.
        names: their ranks in the communicator, for messages.
        pidfds: for each member a descriptor that becomes readable when its process ends, or -1.
        crowded: there are more ranks than cores, so a waiting rank gives its core away at once.
    """

    def __init__(
        self,
        blocks: Sequence[tuple[memoryview, int]],
        me: int,
        names: Sequence[int],
        pidfds: Sequence[int],
        crowded: bool,
    ) -> None:
        self.step = 0
        self.killed = False
        self._words, self._block = blocks[me]
        self._names = names
        self._crowded = crowded
        self._lines = [[(words, block + parity * _LINE) for words, block in blocks] for parity in (0, 1)]
        self._peers = [[line for i, line in enumerate(lines) if i != me] for lines in self._lines]
        self._lives = [(names[i], words, block + _LIFE) for i, (words, block) in enumerate(blocks) if i != me]
        self._rank_of = {fd: names[i] for i, fd in enumerate(pidfds) if fd >= 0 and i != me}
        self._processes = select.poll()
        for fd in self._rank_of:
            self._processes.register(fd, select.POLLIN)

    def publish(self) -> None:
        """All that this rank wrote for the next step is there."""
        self.step = step = self.step + 1
        self._words[self._block + (step & 1) * _LINE] = step

    def announce(self, signature: int, details: Sequence[int], place: int = 0, owner: int = 0) -> None:
        """The same for the first step of a call, with its header: what call it is, and where this rank's data lies."""
        self.step = step = self.step + 1
        words, line = self._words, self._block + (step & 1) * _LINE
        words[line + SIGNATURE] = signature
        words[line + PLACE] = place
        words[line + OWNER] = owner
        for i, detail in enumerate(details, line + DETAILS):
            words[i] = detail
        words[line] = step

    def arrived(self) -> bool:
        """Whether everybody has published the step that this rank published last."""
        step = self.step
        for words, line in self._peers[step & 1]:  # noqa: SIM110  # a generator would cost twice as much
            if words[line] < step:
                return False
        return True

    def agree(self, signature: int) -> bool:
        """Whether everybody's header, in a call's first step, has this signature."""
        for words, line in self._peers[self.step & 1]:  # noqa: SIM110
            if words[line + SIGNATURE] != signature:
                return False
        return True

    def headers(self) -> list[memoryview]:
        """Everybody's line in this step."""
        return [words[line : line + _LINE] for words, line in self._lines[self.step & 1]]

    def wait(self, ready: Callable[[], bool], deadline: float) -> None:
        """Return when ``ready()``. Raises ``CommTimeoutError``, ``PeerLostError`` or, once killed, ``CommError``."""
        if not self._crowded:
            spin_until = time.perf_counter() + _SPIN
            while True:
                for _ in range(20):
                    if ready():
                        return
                if time.perf_counter() > spin_until:
                    break
        start = time.monotonic()
        yield_until = start + (_YIELD_CROWDED if self._crowded else _YIELD)
        while time.monotonic() < yield_until:
            if ready():
                return
            os.sched_yield()
        look = start
        while not ready():
            now = time.monotonic()
            self.check(processes=now >= look, steps=ready == self.arrived)
            if now >= look:
                look = now + _BETWEEN_LOOKS
            if now >= deadline:
                raise CommTimeoutError(self._missing())
            time.sleep(min(_NAP if now < start + _LATER else _NAP_LATER, max(0.0, deadline - now)))

    def check(self, processes: bool = False, steps: bool = True) -> None:
        """Raise if nobody will ever come: killed here, or a peer that is waited for ended.

        ``processes``: also ask the operating system whether the peers' processes live. ``steps``: a peer that has
        published this rank's step is not waited for.
        """
        if self.killed:
            raise CommError("shared memory: the transport was stopped")
        for rank, words, life in self._lives:
            state = words[life]
            if state == _LEFT and steps and not self._has_come(rank):
                raise PeerLostError(f"rank {rank} has left: it closed its communicator", rank)
            if state == _KILLED and not (steps and self._has_come(rank)):
                raise CommError(f"rank {rank} has stopped the communicator")
        if processes:
            for fd, _ in self._processes.poll(0):
                rank = self._rank_of[fd]
                if not (steps and self._has_come(rank)):
                    raise PeerLostError(f"rank {rank} is lost: its process ended", rank)

    def _has_come(self, rank: int) -> bool:
        words, line = self._lines[self.step & 1][list(self._names).index(rank)]
        return bool(words[line] >= self.step)

    def _missing(self) -> str:
        late = [rank for rank in self._names if not self._has_come(rank)]
        return f"nothing came in time from rank {', '.join(map(str, late))} on this host"

    def kill(self) -> None:
        """Wake whoever waits, here and on the peers."""
        self.killed = True
        self._words[self._block + _LIFE] = _KILLED

    def leave(self) -> Callable[[], bool]:
        """This rank publishes no more, and lets go of the memory. Returns what tells whether all others have left."""
        lives = self._lives
        if not self.killed:
            self._words[self._block + _LIFE] = _LEFT
        self._lines, self._peers, self._lives = [[], []], [[], []], []
        self._words, self._block = memoryview(bytearray(BLOCK)).cast("Q"), 0
        return lambda: all(words[life] == _LEFT for _, words, life in lives)
