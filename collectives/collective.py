"""One collective call: what is to be done with which elements, and the steps that this takes."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TypeAlias

import torch

from collectives.arguments import Flat
from collectives.backend import SCHEDULE_TAGS, Backend, Pending
from collectives.schedules import SCHEDULES
from collectives.schedules.arithmetic import Arithmetic, accumulation_dtype
from collectives.schedules.executor import (
    MOVE_BYTES,
    SEGMENT_BYTES,
    Chunks,
    Memory,
    Plan,
    Post,
    Posted,
    Scratch,
    execute,
)
from collectives.schedules.round import Schedule
from collectives.types import ReduceOp

Algorithm: TypeAlias = "str | Schedule | None"
NATIVE = "native"


@dataclass(frozen=True)
class Collective:
    """What is to be done with which elements. Where a rank has no input or output, that is None.

    ``own`` is (where, what): this rank's contribution, put in its place before anything travels. ``even`` says that all
    ranks' parts have one size, which libraries want.
    """

    operation: str
    dtype: torch.dtype
    input: Chunks | None
    output: Chunks | None
    op: ReduceOp | None = None
    root: int | None = None
    own: tuple[torch.Tensor, torch.Tensor] | None = None
    even: bool = True

    @cached_property
    def numel(self) -> int:
        """Elements of the larger side, the same on all ranks."""
        return max(chunks.cuts[-1] for chunks in (self.input, self.output) if chunks is not None)

    @property
    def plain(self) -> bool:
        """Whether a library's result is the result: nothing to divide, and no number that is not what it seems."""
        return self.op is not ReduceOp.AVG and not self.dtype.is_complex and self.numel > 0

    def __str__(self) -> str:
        details = [f"{self.numel} x {str(self.dtype).removeprefix('torch.')}"]
        details += [self.op.name] if self.op is not None else []
        details += [f"root {self.root}"] if self.root is not None else []
        return f"{self.operation} ({', '.join(details)})"

    def steps(
        self, backend: Backend, choice: str | Schedule, post: Post, scratch: Scratch, flats: Sequence[Flat]
    ) -> Iterator[Posted]:
        """Everything from placing this rank's own part to the caller's elements being written."""
        arithmetic = Arithmetic(self.op or ReduceOp.SUM, self.dtype, backend.size)
        if choice == NATIVE:
            yield Posted(self._native(backend), 1)
            if self.op is ReduceOp.AVG and not backend.averages:
                assert self.output is not None
                arithmetic.finish(self.output.tensor)
        else:
            if self.own is not None and self.own[0].data_ptr() != self.own[1].data_ptr():
                self.own[0].copy_(self.own[1])
            if backend.size > 1:
                schedule = choice if callable(choice) else SCHEDULES[self.operation, choice].schedule
                planned = plan(schedule, backend.rank, backend.size, self.root)
                acc_dtype = accumulation_dtype(self.dtype) if self.op is not None else self.dtype
                memory = Memory(backend.size, self.input, self.output, self.dtype, acc_dtype, backend.device, scratch)
                segment_bytes = SEGMENT_BYTES if self.op is not None else MOVE_BYTES
                yield from execute(planned, memory, arithmetic, post, segment_bytes)
            elif self.own is None and self.input is not None and self.output is not None:
                self.output.tensor.copy_(self.input.tensor)
        for flat in flats:
            flat.finish()

    def _native(self, backend: Backend) -> Pending:
        if self.operation == "barrier":
            return backend._barrier()
        assert self.input is not None
        assert self.output is not None
        output, input = self.output.tensor, self.input.tensor
        if self.root is not None:
            return backend._broadcast(output, self.root)
        if self.op is None:
            if not self.even:
                return backend._all_gather_v(output, input, self.output.cuts)
            return backend._all_gather(output, input)
        op = ReduceOp.SUM if self.op is ReduceOp.AVG and not backend.averages else self.op
        if self.operation == "all_reduce":
            return backend._all_reduce(output, op)
        if not self.even:
            return backend._reduce_scatter_v(output, input, self.input.cuts, op)
        return backend._reduce_scatter(output, input, op)

    def tag(self, choice: str | Schedule, earlier: str = "") -> int:
        """What its messages carry: the same on all ranks, and (almost always) another than any other call's.

        ``earlier``: what was called before it, where that is to be the same on all ranks too.
        """
        numel, sizes = self.numel, None
        if self.operation == "all_to_all":  # there ranks differ
            numel = 0
        elif not self.even:
            sizes = tuple(next(side.cuts for side in (self.input, self.output) if side is not None))
        name = choice if isinstance(choice, str) else ""
        return _tag(self.operation, self.dtype, self.op, self.root, name, numel, sizes, earlier)

    def least_bytes(self, size: int, rank: int) -> int:
        """What a rank must send at least: the volume of the best algorithm, in bytes. Sums over ranks are exact."""
        nbytes = self.numel * self.dtype.itemsize
        if self.operation == "broadcast":
            return nbytes if rank == self.root and size > 1 else 0
        side = self.input or self.output
        assert side is not None
        own = (side.cuts[rank + 1] - side.cuts[rank]) * self.dtype.itemsize
        if self.operation == "all_reduce":  # everybody's parts to them, then the sum of its own to everybody
            return nbytes - own + (size - 1) * own
        if self.operation == "reduce_scatter":
            return nbytes - own
        return (size - 1) * own


@lru_cache(maxsize=4096)
def plan(schedule: Schedule, rank: int, size: int, root: int | None) -> Plan:
    """A schedule's rounds for a rank. Schedules are pure, so plans are kept."""
    alike = any(known.alike for known in SCHEDULES.values() if known.schedule is schedule)
    return Plan.of(schedule(rank, size) if root is None else schedule(rank, size, root), alike)


@lru_cache(maxsize=4096)
def _tag(*signature: object) -> int:
    return 1 + zlib.crc32(repr(signature).encode()) % (SCHEDULE_TAGS - 1)
