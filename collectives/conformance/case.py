"""What a check is asked to try, and the tensors that it tries it with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch

from collectives.communicator import Communicator
from collectives.conformance.reference import data
from collectives.types import ReduceOp

SIXTEEN_BIT = (torch.float16, torch.bfloat16)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
COMPLEX = (torch.complex64, torch.complex128)
REDUCED = (torch.bool, *INTEGERS, *FLOATS, *COMPLEX)  # dtypes that some reduction is defined for
MOVED = (*REDUCED, torch.float8_e4m3fn, torch.float8_e5m2)  # dtypes that every operation moves


@dataclass(frozen=True)
class Case:
    """One trial of a check.

    ``shape`` is that of a rank's part. ``layout`` is a name in ``LAYOUTS`` or "mixed": another one on each rank.
    ``seed`` varies the data, the root and the sizes. Checks use of this what applies to them.
    """

    dtype: torch.dtype = torch.float32
    op: ReduceOp = ReduceOp.SUM
    shape: tuple[int, ...] = (7, 15)
    layout: str = "plain"
    algorithm: str | None = None
    async_op: bool = False
    seed: int = 0

    def __str__(self) -> str:
        """What differs from the plain case."""
        values = [(field, getattr(self, field.name)) for field in fields(self)]
        texts = [getattr(value, "name", str(value)) for field, value in values if value != field.default]
        return ", ".join("async" if text == "True" else text.removeprefix("torch.") for text in texts) or "plain"

    @property
    def seeds(self) -> tuple[int, int]:
        """Every operation runs twice with other data, so that left-over scratch would show."""
        return self.seed, self.seed + 1


class Check(NamedTuple):
    """A part of the contract: ``function(comm, case)`` raises where it does not hold. ``group`` is for reports."""

    group: str
    function: Callable[[Communicator, Case], None]
    cases: tuple[Case, ...] = (Case(),)


class Strides(NamedTuple):
    """How a tensor lies in a larger buffer: offset of the first element, strides, elements in all."""

    offset: int
    strides: tuple[int, ...]
    numel: int


def _strides(shape: Sequence[int], gap: int = 1, pad: int = 0, fortran: bool = False, offset: int = 0) -> Strides:
    order = list(range(len(shape))) if fortran else list(range(len(shape)))[::-1]
    strides, step = [0] * len(shape), gap
    for i, dim in enumerate(order):
        strides[dim] = step
        step *= max(1, shape[dim]) + (pad if i == 0 else 0)
    return Strides(offset, tuple(strides), offset + step + 3)


LAYOUTS: dict[str, Callable[[Sequence[int]], Strides]] = {
    "plain": lambda shape: _strides(shape),
    "offset": lambda shape: _strides(shape, offset=3),
    "gaps": lambda shape: _strides(shape, gap=2, offset=1),
    "transposed": lambda shape: _strides(shape, fortran=True),
    "padded rows": lambda shape: _strides(shape, pad=3, offset=5),
}


class Placed:
    """A tensor inside a larger buffer, whose other elements must stay as they are."""

    def __init__(self, values: torch.Tensor, layout: str, device: torch.device) -> None:
        shape = tuple(values.shape)
        place = LAYOUTS[layout](shape)
        self._around = torch.ones(place.numel).to(values.dtype)
        self._view = (shape, place.strides, place.offset)
        self._base = self._with(values).to(device)
        self.tensor = self._base.as_strided(*self._view)

    def _with(self, values: torch.Tensor) -> torch.Tensor:
        base = self._around.clone()
        base.as_strided(*self._view).copy_(values)
        return base

    def expect(self, values: torch.Tensor, what: str) -> None:
        """The tensor has exactly these values, wherever else it may lie, and nothing beside them was touched."""
        same(self.tensor, values.reshape(self.tensor.shape), what)
        same(self._base, self._with(values.reshape(self.tensor.shape)), f"{what}, or what lies beside it")


def layout_of(case: Case, rank: int, seed: int) -> str:
    names = list(LAYOUTS)
    return names[(rank + seed) % len(names)] if case.layout == "mixed" else case.layout


def place(comm: Communicator, case: Case, values: torch.Tensor, seed: int = 0) -> Placed:
    """This rank's argument with these values, in the case's layout."""
    return Placed(values, layout_of(case, comm.rank, seed), comm.device)


def blank(comm: Communicator, case: Case, shape: Sequence[int], seed: int = 0) -> Placed:
    """A result's place, with ones in it."""
    return place(comm, case, torch.ones(tuple(shape)).to(case.dtype), seed)


def everyone(comm: Communicator, case: Case, seed: int, shape: Sequence[int] | None = None) -> list[torch.Tensor]:
    """Every rank's data, on the CPU."""
    return [data(rank, case.shape if shape is None else shape, case.dtype, seed) for rank in range(comm.world_size)]


def same(actual: torch.Tensor, expected: torch.Tensor, what: object = "") -> None:
    """Shape, dtype and every element are equal, NaN to NaN."""
    actual, expected = actual.detach().cpu(), expected.detach().cpu()
    if actual.shape != expected.shape:
        raise AssertionError(f"{what}: expected shape {tuple(expected.shape)}, got {tuple(actual.shape)}")
    if actual.dtype != expected.dtype:
        raise AssertionError(f"{what}: expected {expected.dtype}, got {actual.dtype}")
    a, b = bits(actual), bits(expected)
    if not torch.equal(a, b):
        differ = (a != b).any(1)
        if actual.dtype in (*FLOATS, *COMPLEX):  # zero and NaN have several representations
            flat_a, flat_b = actual.reshape(-1), expected.reshape(-1)
            differ &= ~((flat_a == flat_b) | ((flat_a != flat_a) & (flat_b != flat_b)))
        if bool(differ.any()):
            i = int(differ.nonzero()[0])
            raise AssertionError(
                f"{what}: {int(differ.sum())} of {len(a)} elements are wrong, the first at {i}: "
                f"expected {_text(expected, i)}, got {_text(actual, i)}"
            )


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """One row of bytes an element."""
    if tensor.dtype is torch.bool:  # a copy would make every byte 0 or 1
        tensor = tensor.view(torch.uint8)
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.detach().reshape(-1))
    return flat.view(torch.uint8).view(flat.numel(), flat.element_size())


def _text(tensor: torch.Tensor, i: int) -> str:
    shown = [str(value.item()) for value in tensor.reshape(-1)[i : i + 4]]
    return " ".join(shown) + (" ..." if tensor.numel() > i + 4 else "")


def raises(
    kind: type[Exception] | tuple[type[Exception], ...], words: Sequence[str], call: Callable[[], object]
) -> None:
    """The call raises an error of this kind whose message has all of these words."""
    try:
        call()
    except kind as error:
        missing = [word for word in words if word.lower() not in str(error).lower()]
        if missing:
            raise AssertionError(f"expected the error to name {missing}, got {error!r}") from error
        return
    names = ", ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))
    raise AssertionError(f"expected {names} naming {list(words)}, but the call went through")


def still_works(comm: Communicator, what: str = "a later call") -> None:
    """The ranks are in step: a sum with known answer."""
    w = comm.world_size
    value = torch.tensor([comm.rank + 1.0, 1.0], device=comm.device)
    comm.all_reduce(value)
    same(value, torch.tensor([w * (w + 1) / 2, float(w)]), what)


def require(holds: bool, what: str) -> None:
    """An assertion that survives ``python -O``."""
    if not holds:
        raise AssertionError(what)
