"""One buffer a host: a line of memory for each member that says how often it has retired the buffer, then the data."""

from __future__ import annotations

import contextlib
import faulthandler
import sys
import time
from collections import deque
from collections.abc import Sequence

import torch

from collectives.backends.segment import PAGE, Segment
from collectives.backends.signals import Signals
from collectives.types import SharedBuffer

_LINE = 8  # words from one member's line to the next
_RETIRED, _RELEASED = 0, 1  # words of a line: how often retired; no tensor shows the buffer any more


def header_bytes(members: int) -> int:
    """What lies before the data."""
    return -(-members * _LINE * 8 // PAGE) * PAGE


def clear(words: memoryview, offset: int, members: int) -> None:
    """Make a header that says nothing yet. Peers may learn of it only afterwards."""
    for word in range(members * _LINE):
        words[offset // 8 + word] = 0


class HostBuffer(SharedBuffer):
    """A buffer in the segment of one member of a team.

    Args:
        segment: that member's memory.
        offset: of the header in it.
        signals: the members' lines, for waiting.
        members: how many there are, and ``me`` this one's index.
        numel, dtype: of the tensor.
        one_host: the team is the whole communicator.
    """

    def __init__(
        self,
        segment: Segment,
        offset: int,
        signals: Signals,
        members: int,
        me: int,
        numel: int,
        dtype: torch.dtype,
        one_host: bool,
    ) -> None:
        self.offset = offset
        self.one_host = one_host
        self._fills = 0
        self._segment = segment
        self._signals = signals
        self._words = words = segment.words
        self._lines = [offset // 8 + member * _LINE for member in range(members)]
        self._mine = self._lines[me]
        self._shown: deque[int] = deque()  # as long as there are tensors that show the buffer
        released, shown = self._mine + _RELEASED, self._shown

        def forget() -> None:
            shown.pop()
            if not shown:
                words[released] = 1

        self._forget = forget
        self._first = offset + header_bytes(members)
        shown.extend((1, 1))
        self.tensor = segment.show(self._first, numel, dtype, forget)
        self._writable = segment.lend(self._first, numel, dtype, forget)
        if not faulthandler.is_enabled() and sys.__stderr__ is not None:
            with contextlib.suppress(OSError, ValueError):  # a standard error that is no file
                faulthandler.enable(sys.__stderr__)

    def part(self, start: int, end: int) -> torch.Tensor:
        self._shown.append(1)
        place = self._first + start * self._writable.itemsize
        return self._segment.lend(place, end - start, self._writable.dtype, self._forget)

    def written(self, start: int, end: int) -> torch.Tensor:
        """The same, for collectives, which make no more storages."""
        return self._writable[start:end]

    @property
    def retired(self) -> bool:
        return bool(self._words[self._mine + _RETIRED] == self._fills)

    def retire(self) -> None:
        self._words[self._mine + _RETIRED] = self._fills

    def fill(self) -> None:
        """What comes now is another use."""
        self._fills += 1

    def all_retired(self) -> bool:
        """Whether every member has retired the last use, so that the buffer may be written."""
        words, fills = self._words, self._fills
        return all(words[line + _RETIRED] >= fills for line in self._lines)

    def wait_retired(self, timeout: float) -> None:
        if not self.all_retired():
            self._signals.wait(self.all_retired, time.monotonic() + timeout)

    def guard(self, start: int, end: int, on: bool) -> None:
        self._segment.protect(self._writable[start:end], on)

    def release(self) -> None:
        self.retire()
        self.tensor = self._writable = torch.empty(0, dtype=self.tensor.dtype)


def all_released(words: memoryview, offset: int, members: Sequence[int]) -> bool:
    """Whether no tensor of any of these members shows the buffer any more."""
    return all(words[offset // 8 + member * _LINE + _RELEASED] for member in members)
