"""One buffer a host: a line of memory for each member that says how often it has retired the buffer, then the data."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from collectives.backends.segment import PAGE, Segment
from collectives.types import SharedBuffer

_LINE = 8  # words from one member's line to the next
_RETIRED, _RELEASED = 0, 1  # words of a line


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
        members: how many there are, and ``me`` this one's index.
        numel, dtype: of the tensor.
    """

    def __init__(self, segment: Segment, offset: int, members: int, me: int, numel: int, dtype: torch.dtype) -> None:
        self.offset = offset
        self._fills = 0
        self._words = segment.words
        first = offset // 8
        self._lines = [first + member * _LINE for member in range(members)]
        self._mine = self._lines[me]
        words, released = segment.words, self._mine + _RELEASED

        def forget() -> None:
            words[released] = 1

        self.tensor = segment.lend(offset + header_bytes(members), numel, dtype, forget)

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

    def release(self) -> None:
        self.retire()
        self.tensor = self.tensor.new_empty(0)


def all_released(words: memoryview, offset: int, members: Sequence[int]) -> bool:
    """Whether no tensor of any of these members shows the buffer any more."""
    return all(words[offset // 8 + member * _LINE + _RELEASED] for member in members)
