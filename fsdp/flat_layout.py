"""Where every parameter of a unit lies in its one 1-D buffer, and which part of the buffer each rank holds.

Pure arithmetic: numbers in, numbers out.

    buffer   | p0 ........ | p1 ... | p2 ............. | tail |      parameters start on multiples of 16 elements
    cuts     ^0            .    ^1                  ^2      ^3       N + 1 cuts, also on multiples of 16

Rank r holds the elements from cut r to cut r + 1: its shard. A cut may fall inside a parameter, between two, or in the
tail; so a rank's piece of a parameter may be all of it, a part of it, or empty.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

ALIGNMENT = 16  # elements. A matrix multiply over weights 4 bytes off their usual alignment gives other bits.


def aligned(numel: int) -> int:
    """The smallest multiple of ``ALIGNMENT`` that is not below ``numel``."""
    return -(-numel // ALIGNMENT) * ALIGNMENT


class Piece(NamedTuple):
    """What one rank holds of one parameter: ``numel`` elements from element ``start`` of the flattened parameter.

    ``offset`` is where they lie in the rank's shard. Empty pieces have ``numel`` 0.
    """

    start: int
    numel: int
    offset: int


@dataclass(frozen=True)
class FlatLayout:
    """Parameters of ``numels`` elements at ``offsets`` of one buffer that is cut at ``cuts`` (all in elements)."""

    numels: tuple[int, ...]
    offsets: tuple[int, ...]
    cuts: tuple[int, ...]

    @classmethod
    def even(cls, numels: Sequence[int], world_size: int) -> FlatLayout:
        """Shards of equal size, as all_gather and reduce_scatter want them."""
        ends = list(itertools.accumulate((aligned(n) for n in numels), initial=0))
        shard = aligned(-(-ends[-1] // world_size))
        return cls(tuple(numels), tuple(ends[:-1]), tuple(shard * r for r in range(world_size + 1)))

    @property
    def numel(self) -> int:
        """Elements of the whole buffer, padding included."""
        return self.cuts[-1]

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Elements of every rank's shard."""
        return tuple(b - a for a, b in itertools.pairwise(self.cuts))

    @cached_property
    def is_even(self) -> bool:
        """Whether all shards have one size."""
        return len(set(self.sizes)) == 1

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        """What ``rank`` holds, one piece a parameter, in the order of the parameters."""
        first, last = self.cuts[rank], self.cuts[rank + 1]
        pieces = []
        for offset, numel in zip(self.offsets, self.numels, strict=True):
            begin = min(max(offset, first), last)
            end = max(min(offset + numel, last), begin)
            pieces.append(Piece(min(begin - offset, numel) if end > begin else 0, end - begin, begin - first))
        return tuple(pieces)

    def spans(self) -> list[int]:
        """Lengths that split the whole buffer into parameter, gap, parameter, gap, ..."""
        return _alternate(self.offsets, self.numels, self.numel)

    def shard_spans(self, rank: int) -> list[int]:
        """Lengths that split the shard of ``rank`` into piece, gap, piece, gap, ..."""
        pieces = self.pieces(rank)
        return _alternate([p.offset for p in pieces], [p.numel for p in pieces], self.sizes[rank])

    def subset(self, wanted: Sequence[bool]) -> FlatLayout:
        """The wanted parameters alone, closed up. Every rank keeps exactly the elements that it held before.

        So shards differ in size, and may be empty. Everything wanted gives the layout itself.
        """
        if all(wanted):
            return self
        kept = [i for i, want in enumerate(wanted) if want]
        numels = [self.numels[i] for i in kept]
        ends = list(itertools.accumulate((aligned(n) for n in numels), initial=0))
        spans = [(self.offsets[i], self.offsets[i] + aligned(self.numels[i])) for i in kept]
        sizes = [
            sum(max(0, min(end, last) - max(begin, first)) for begin, end in spans)
            for first, last in itertools.pairwise(self.cuts)
        ]
        return FlatLayout(tuple(numels), tuple(ends[:-1]), tuple(itertools.accumulate(sizes, initial=0)))


def _alternate(offsets: Sequence[int], numels: Sequence[int], end: int) -> list[int]:
    """Lengths of filled and empty stretches in turn, from 0 to ``end``."""
    nexts = [*offsets[1:], end][: len(offsets)]  # no parameters: nothing to split
    lengths: list[int] = []
    for offset, numel, following in zip(offsets, numels, nexts, strict=True):
        lengths += (numel, following - offset - numel)
    return lengths


def local_shape(shape: Sequence[int], numel: int) -> tuple[int, ...]:
    """The shape of a shard of ``numel`` elements: as many dimensions as the whole parameter has."""
    if not shape and numel == 1:
        return ()
    return (numel,) + (1,) * (len(shape) - 1)
