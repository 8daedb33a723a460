"""What is measured: each operation's tensors, the data in them, its answer, and the bytes that it must move."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import torch

from collectives.communicator import Communicator

Call = Callable[..., object]  # (communicator, output, input, **options)


class Part(NamedTuple):
    """What a result holds from ``start`` on: ``factor`` times the pattern from ``origin`` on plus ``offset``."""

    start: int
    numel: int
    origin: int
    factor: int
    offset: int


@dataclass(frozen=True)
class Operation:
    """One collective over ``n`` elements on its larger side.

    Attributes:
        call: the public call, with SUM, and rank 0 as root.
        output, input: whether that side has all n elements, or 1/p of them; None where there is no such tensor.
        answer: the parts of the result on a rank, of (n, rank, p, offsets by rank).
        bus: nccl-tests' factor from algorithm bandwidth to bus bandwidth, of p.
        moves: how many times n elements all ranks together read or write at least, of p: each input once, each
            result once.
    """

    call: Call
    output: bool
    input: bool | None
    answer: Callable[[int, int, int, list[int]], Iterator[Part]]
    bus: Callable[[int], float]
    moves: Callable[[int], float]

    def tensors(self, a: torch.Tensor, b: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(output, input) for one call, out of two tensors of n elements."""
        part = a.numel() // size
        output = a if self.output else a[:part]
        return output, output if self.input is None else b if self.input else b[:part]


def _sum_of_all(n: int, rank: int, p: int, offsets: list[int]) -> Iterator[Part]:
    yield Part(0, n, 0, p, sum(offsets))


def _own_sum(n: int, rank: int, p: int, offsets: list[int]) -> Iterator[Part]:
    yield Part(0, n // p, rank * (n // p), p, sum(offsets))


def _sum_at_root(n: int, rank: int, p: int, offsets: list[int]) -> Iterator[Part]:
    yield Part(0, n, 0, p if rank == 0 else 1, sum(offsets) if rank == 0 else offsets[rank])


def _of_root(n: int, rank: int, p: int, offsets: list[int]) -> Iterator[Part]:
    yield Part(0, n, 0, 1, offsets[0])


def _of_all(n: int, rank: int, p: int, offsets: list[int]) -> Iterator[Part]:
    for source in range(p):
        yield Part(source * (n // p), n // p, 0, 1, offsets[source])


def _for_this(n: int, rank: int, p: int, offsets: list[int]) -> Iterator[Part]:
    for source in range(p):
        yield Part(source * (n // p), n // p, rank * (n // p), 1, offsets[source])


def _all_reduce(comm: Communicator, output: torch.Tensor, input: torch.Tensor, **options: str) -> object:
    return comm.all_reduce(output, **options)  # type: ignore[arg-type]


def _reduce_scatter(comm: Communicator, output: torch.Tensor, input: torch.Tensor, **options: str) -> object:
    return comm.reduce_scatter(output, input, **options)  # type: ignore[arg-type]


def _all_gather(comm: Communicator, output: torch.Tensor, input: torch.Tensor, **options: str) -> object:
    return comm.all_gather(output, input, **options)  # type: ignore[arg-type]


def _broadcast(comm: Communicator, output: torch.Tensor, input: torch.Tensor, **options: str) -> object:
    return comm.broadcast(output, 0, **options)  # type: ignore[arg-type]


def _reduce(comm: Communicator, output: torch.Tensor, input: torch.Tensor, **options: str) -> object:
    return comm.reduce(output, 0, **options)  # type: ignore[arg-type]


def _all_to_all(comm: Communicator, output: torch.Tensor, input: torch.Tensor, **options: str) -> object:
    return comm.all_to_all(output, input, **options)  # type: ignore[arg-type]


# Bus factors: github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md.
OPERATIONS: Mapping[str, Operation] = MappingProxyType(
    {
        "all_reduce": Operation(_all_reduce, True, None, _sum_of_all, lambda p: 2 * (p - 1) / p, lambda p: 2 * p),
        "reduce_scatter": Operation(_reduce_scatter, False, True, _own_sum, lambda p: (p - 1) / p, lambda p: p + 1),
        "all_gather": Operation(_all_gather, True, False, _of_all, lambda p: (p - 1) / p, lambda p: p + 1),
        "broadcast": Operation(_broadcast, True, None, _of_root, lambda p: 1.0, lambda p: p),
        "reduce": Operation(_reduce, True, None, _sum_at_root, lambda p: 1.0, lambda p: p + 1),
        "all_to_all": Operation(_all_to_all, True, True, _for_this, lambda p: (p - 1) / p, lambda p: 2 * p),
    }
)


@dataclass(frozen=True)
class Data:
    """Numbers that depend on index, rank and iteration, small enough for their sums to be exact.

    A rank's tensor is the ``pattern`` plus an offset, so that filling and checking cost one pass each.
    """

    pattern: torch.Tensor
    scratch: torch.Tensor

    @classmethod
    def of(cls, numel: int, dtype: torch.dtype) -> Data:
        # Prime periods: neighbouring chunks then differ, whatever their length. 16-bit floats are exact up to 256.
        period = 61 if dtype.itemsize >= 4 else 13
        return cls((torch.arange(numel) % period).to(dtype), torch.empty(numel, dtype=dtype))

    @staticmethod
    def offsets(iteration: int, size: int) -> list[int]:
        return [(5 * rank + 7 * iteration) % 13 for rank in range(size)]

    def fill(self, tensor: torch.Tensor, offset: int) -> None:
        torch.add(self.pattern[: tensor.numel()], offset, out=tensor)

    def holds(self, result: torch.Tensor, part: Part) -> bool:
        """Whether this part of ``result`` is right."""
        expected = self.scratch[: part.numel]
        torch.mul(self.pattern[part.origin :][: part.numel], part.factor, out=expected)
        return torch.equal(result[part.start :][: part.numel], expected.add_(part.offset))
