"""What collectives must answer, computed from every rank's input at once, without communication.

Values are small integers, so that sums, and products of a few of them, are exact in every dtype that reduces: then the
order of additions does not matter, and checks may ask for equality.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce as fold

import torch

from collectives.types import ReduceOp

ARITHMETIC: Mapping[ReduceOp, Callable[..., torch.Tensor]] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.AVG: torch.add,
    ReduceOp.PRODUCT: torch.mul,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.BAND: torch.bitwise_and,
    ReduceOp.BOR: torch.bitwise_or,
    ReduceOp.BXOR: torch.bitwise_xor,
}


def data(rank: int, shape: Sequence[int], dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """A contiguous tensor that depends on rank and index. Neighbouring ranks and elements differ."""
    numel = torch.Size(shape).numel()
    values = (torch.arange(numel) * 3 + rank * 5 + seed * 7) % 11 - 4
    if dtype == torch.bool:
        return (values > 0).reshape(shape)
    if dtype.is_complex:
        return torch.complex(values.double(), values.flip(0).double()).to(dtype).reshape(shape)
    return (values if not dtype.is_floating_point else values.float()).to(dtype).reshape(shape)


def all_reduce(inputs: Sequence[torch.Tensor], op: ReduceOp = ReduceOp.SUM) -> torch.Tensor:
    """Every rank's result. 16-bit floats are added and averaged in float32 and rounded once."""
    dtype = inputs[0].dtype
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    total: torch.Tensor = fold(ARITHMETIC[op], [tensor.to(wide) for tensor in inputs])
    return (total / len(inputs) if op is ReduceOp.AVG else total).to(dtype)


def all_gather(inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """Every rank's result: all inputs one after another, flat."""
    return torch.cat([tensor.reshape(-1) for tensor in inputs])


def reduce_scatter(
    inputs: Sequence[torch.Tensor], op: ReduceOp = ReduceOp.SUM, sizes: Sequence[int] | None = None
) -> list[torch.Tensor]:
    """By rank: its piece of the reduction, flat. Without ``sizes`` the pieces are equal."""
    total = all_reduce(inputs, op).reshape(-1)
    return list(torch.split(total, list(sizes) if sizes is not None else [total.numel() // len(inputs)] * len(inputs)))


def all_to_all(inputs: Sequence[torch.Tensor], splits: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """By rank: what it gets, flat. Rank r sends ``splits[r][d]`` elements of its input to rank d."""
    parts = [torch.split(tensor.reshape(-1), list(row)) for tensor, row in zip(inputs, splits, strict=True)]
    return [torch.cat([row[rank] for row in parts]) for rank in range(len(inputs))]
