"""What a backend does by itself, what schedules do over its messages, and what is not defined at all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple

import torch

from collectives.backend import Backend
from collectives.schedules.arithmetic import check_reducible
from collectives.types import ReduceOp

Support = Literal["native", "emulated", "no"]
REDUCTIONS = ("all_reduce", "reduce_scatter", "reduce")
MOVEMENTS = ("all_gather", "broadcast", "gather", "scatter", "all_to_all", "send")
DTYPES = (
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)


class Key(NamedTuple):
    """An operation over a dtype; ``op`` is None where nothing is reduced. Uneven variants always run by schedules."""

    operation: str
    dtype: torch.dtype
    op: ReduceOp | None = None

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.operation} of {dtype}" + (f" with {self.op.name}" if self.op is not None else "")


def keys() -> Iterator[Key]:
    """Everything that can be asked."""
    for operation in REDUCTIONS:
        for dtype in DTYPES:
            yield from (Key(operation, dtype, op) for op in ReduceOp)
    for operation in MOVEMENTS:
        yield from (Key(operation, dtype) for dtype in DTYPES)


def capabilities(backend: Backend, *, schedules_only: bool) -> Mapping[Key, Support]:
    """How each operation is carried out over ``backend``; ``schedules_only`` where its own collectives are not used.

    ``native``: the library's own collective keeps the contract, and carries the call unless a schedule is faster.
    ``emulated``: by a schedule over messages, with the same result. ``no``: the reduction is not defined, on any
    backend, and raises ``TypeError``.
    """
    return {key: _support(backend, key, schedules_only) for key in keys()}


def _support(backend: Backend, key: Key, schedules_only: bool) -> Support:
    if key.op is not None:
        try:
            check_reducible(key.dtype, key.op)
        except TypeError:
            return "no"
    if key.operation == "send":
        return "native"
    asked = ReduceOp.SUM if key.op is ReduceOp.AVG else key.op
    native = not schedules_only and backend.supports(key.operation, key.dtype, asked)
    return "native" if native else "emulated"
