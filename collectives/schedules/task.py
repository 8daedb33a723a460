"""What every operation means: whose contributions each rank has before the first round, and must have in the end."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

UNROOTED = ("all_gather", "all_reduce", "all_to_all", "barrier", "reduce_scatter")
ROOTED = ("broadcast", "gather", "reduce", "scatter")
REDUCTIONS = ("all_reduce", "reduce", "reduce_scatter")
CHUNKS_ALIKE = ("all_reduce", "broadcast", "reduce")  # no chunk belongs to a rank


class Value(NamedTuple):
    """Chunk ``chunk`` with the contributions of ``ranks`` (a bit set).

    ``in_order`` says that they were added in rank order, one at a time; ``final`` that the result was rounded to the
    tensor's dtype and, for AVG, divided.
    """

    chunk: int
    ranks: int
    in_order: bool = True
    final: bool = False

    def __str__(self) -> str:
        return f"chunk {self.chunk} of {name_ranks(self.ranks)}"


class Task(NamedTuple):
    """What is to be proved: this operation, for these many ranks.

    ``whole``: the tensor is one chunk, not one for each rank; only for operations whose chunks are alike.
    """

    operation: str
    size: int
    root: int | None = None
    in_rank_order: bool = False
    whole: bool = False

    @property
    def chunks(self) -> int:
        return 1 if self.whole else self.size

    @property
    def reduces(self) -> bool:
        return self.operation in REDUCTIONS

    def inputs(self, rank: int) -> dict[int, Value]:
        """IN as it is before the first round: empty where it does not exist."""
        match self.operation:
            case "all_reduce" | "reduce" | "reduce_scatter" | "all_to_all":
                chunks: Iterable[int] = range(self.chunks)
            case "gather":
                chunks = (rank,)
            case "scatter":
                chunks = range(self.size) if rank == self.root else ()
            case _:
                chunks = ()
        return {chunk: Value(chunk, 1 << rank) for chunk in chunks}

    def outputs(self, rank: int) -> dict[int, Value]:
        """OUT as it is before the first round, where that is not IN."""
        if self.size == 1:
            return self.wanted(rank)
        match self.operation:
            case "all_gather" | "barrier" | "all_to_all":
                return {rank: Value(rank, 1 << rank)}
            case "broadcast" if rank == self.root:
                return self.wanted(rank)
            case _:
                return {}

    def wanted(self, rank: int) -> dict[int, Value]:
        """OUT as it must be after the last round: empty where it does not exist."""
        everyone, root = (1 << self.size) - 1, self.root or 0
        match self.operation:
            case "all_gather":
                return {chunk: Value(chunk, 1 << chunk) for chunk in range(self.size)}
            case "all_to_all":
                return {source: Value(rank, 1 << source) for source in range(self.size)}
            case "barrier":
                return {rank: Value(rank, everyone)}
            case "broadcast":
                return {chunk: Value(chunk, 1 << root) for chunk in range(self.chunks)}
            case "scatter":
                return {rank: Value(rank, 1 << root)}
            case "gather":
                chunks = range(self.size) if rank == root else range(0)
                return {chunk: Value(chunk, 1 << chunk) for chunk in chunks}
            case "reduce":
                chunks = range(self.chunks) if rank == root else range(0)
            case "reduce_scatter":
                chunks = range(rank, rank + 1)
            case _:
                chunks = range(self.chunks)
        return {chunk: Value(chunk, everyone, final=True) for chunk in chunks}


def name_ranks(bits: int) -> str:
    """The ranks of a bit set in words."""
    found = [rank for rank in range(bits.bit_length()) if bits >> rank & 1]
    return ("rank " if len(found) == 1 else "ranks ") + spell(found)


def spell(numbers: Sequence[int], to: str = "-", also: str = ", ") -> str:
    """Ascending numbers in words: 0-3, 5."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return also.join(str(run[0]) if len(run) == 1 else f"{run[0]}{to}{run[-1]}" for run in runs)
