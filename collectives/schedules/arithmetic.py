"""How contributions are combined: once, for every schedule and transport."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from collectives.types import ReduceOp

_SIXTEEN_BIT = (torch.float16, torch.bfloat16)
_MOVED_ONLY = tuple(getattr(torch, name) for name in dir(torch) if name.startswith("float8_"))
_COMBINE: dict[ReduceOp, Callable[..., torch.Tensor]] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.AVG: torch.add,
    ReduceOp.PRODUCT: torch.mul,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.BAND: torch.bitwise_and,
    ReduceOp.BOR: torch.bitwise_or,
    ReduceOp.BXOR: torch.bitwise_xor,
}
_BITWISE = (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32 for 16-bit floats, otherwise the dtype itself."""
    return torch.float32 if dtype in _SIXTEEN_BIT else dtype


def check_reducible(dtype: torch.dtype, op: ReduceOp) -> None:
    """Raise ``TypeError`` unless ``op`` is defined for ``dtype``: the same on every transport."""
    if not isinstance(op, ReduceOp):
        raise TypeError(f"op must be a collectives.ReduceOp, got {op!r}")
    inexact = dtype.is_floating_point or dtype.is_complex
    if dtype in _MOVED_ONLY:
        raise TypeError(f"{dtype} can be moved but not reduced; cast it to a wider dtype first")
    if op is ReduceOp.AVG and not inexact:
        raise TypeError(f"AVG needs a floating or complex dtype, got {dtype}; use SUM and divide as you need")
    if op in _BITWISE and inexact:
        raise TypeError(f"{op.name} needs an integer or bool dtype, got {dtype}")
    if op in (ReduceOp.MIN, ReduceOp.MAX) and dtype.is_complex:
        raise TypeError(f"{op.name} is not defined for {dtype}: complex numbers have no order")


@dataclass(frozen=True)
class Arithmetic:
    """One reduction: ``op`` over ``dtype``; for AVG a final sum is divided by ``divisor``."""

    op: ReduceOp
    dtype: torch.dtype
    divisor: int

    @property
    def acc_dtype(self) -> torch.dtype:
        return accumulation_dtype(self.dtype)

    @property
    def function(self) -> Callable[..., torch.Tensor]:
        """What combines two terms."""
        return _COMBINE[self.op]

    def finish(self, acc: torch.Tensor) -> None:
        """Divide a completed sum in place if this is AVG. ``acc`` is in the accumulation dtype."""
        if self.op is ReduceOp.AVG:
            acc.div_(self.divisor)

    def combine(self, into: torch.Tensor, terms: Sequence[torch.Tensor], final: bool) -> None:
        """``into`` = the terms combined left to right, rounded once; divided if ``final`` and AVG."""
        first, *others = terms
        final = final and self.op is ReduceOp.AVG
        if len(others) == 1 and not final and into.dtype == first.dtype == self.acc_dtype:
            self.function(first, others[0], out=into)  # the usual case, in which time in Python counts
            return
        if not others and not final:
            into.copy_(first)
            return
        # A term that lies where the result goes must be read before it is overwritten, so it may only come early.
        clobbers = any(term.data_ptr() == into.data_ptr() for term in others[1:])
        in_place = into.dtype == self.acc_dtype and not clobbers
        acc = into if in_place else torch.empty_like(into, dtype=self.acc_dtype)
        function = self.function
        if others:
            function(first.to(self.acc_dtype), others[0], out=acc)
        else:
            acc.copy_(first)
        for term in others[1:]:
            function(acc, term, out=acc)
        if final:
            self.finish(acc)
        if not in_place:
            into.copy_(acc)
