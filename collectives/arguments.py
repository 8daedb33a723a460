"""What the public calls accept: checks that raise before anything is sent, and tensors made flat for the transport."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from collectives.schedules.executor import Chunks, even_cuts


class Flat(NamedTuple):
    """A caller's tensor as the transport wants it: contiguous, 1-D, on the transport's device.

    That is a view where the tensor already is so, otherwise a packed copy, which ``finish`` copies back into the
    caller's own elements if the operation writes them.
    """

    tensor: torch.Tensor
    target: torch.Tensor | None

    @classmethod
    def of(cls, tensor: torch.Tensor, name: str, device: torch.device, staging: torch.device, written: bool) -> Flat:
        """Check that ``tensor`` lies on ``device`` and flatten it on ``staging``, the transport's device."""
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
        if tensor.device.type != device.type or (device.index is not None and tensor.device.index != device.index):
            raise ValueError(
                f"{name} is on {tensor.device}, but this communicator serves {device}; "
                f"move the tensor there, or make a communicator with device={str(tensor.device)!r}"
            )
        if tensor.layout is not torch.strided:
            raise TypeError(f"{name} must be a dense tensor, got layout {tensor.layout}")
        plain = tensor.detach()
        if plain.is_contiguous() and plain.device == staging and not plain.is_conj() and not plain.is_neg():
            # A lone element may be called contiguous with any stride; a view as bytes would not have it.
            return cls(plain.as_strided((plain.numel(),), (1,)), None)
        if written and _repeats(plain):
            raise ValueError(
                f"{name} has elements that overlap: it is expanded, or strided so that several share one place, and a "
                "result needs a place for each; clone() it first"
            )
        packed = plain.resolve_conj().resolve_neg().to(staging).contiguous().view(-1)
        return cls(packed, plain if written else None)

    def even(self, size: int) -> Chunks:
        """All elements in ``size`` chunks."""
        return Chunks(self.tensor, even_cuts(self.tensor.numel(), size))

    def finish(self) -> None:
        """Put a packed result back where the caller expects it."""
        if self.target is not None:
            self.target.copy_(self.tensor.view(self.target.shape))


def check_rank(name: str, rank: int, world_size: int) -> None:
    if not isinstance(rank, int) or isinstance(rank, bool):
        raise TypeError(f"{name} must be an int, got {rank!r}")
    if not 0 <= rank < world_size:
        raise ValueError(f"{name} is {rank}, but this communicator has ranks 0 to {world_size - 1}")


def check_numel(name: str, tensor: torch.Tensor, numel: int, why: str) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
    if tensor.numel() != numel:
        raise ValueError(f"{name} has {tensor.numel()} elements, expected {numel}: {why}")


def check_same_dtype(output: torch.Tensor, input: torch.Tensor) -> None:
    if output.dtype != input.dtype:
        raise TypeError(f"output is {output.dtype} and input is {input.dtype}; they must be alike")


def check_sizes(name: str, sizes: Sequence[int], world_size: int) -> None:
    if len(sizes) != world_size:
        raise ValueError(f"{name} has {len(sizes)} entries, expected one a rank, {world_size}")
    if any(n < 0 for n in sizes):
        raise ValueError(f"{name} must not be negative, got {list(sizes)}")


def cuts_of(sizes: Sequence[int]) -> list[int]:
    """The offsets at which parts of these sizes start, and where the last one ends."""
    return list(accumulate(sizes, initial=0))


def check_overlap(part: torch.Tensor, whole: torch.Tensor, offset: int | None) -> None:
    """``part`` may be exactly ``whole``'s elements from ``offset`` on; any other overlap raises ``ValueError``."""
    if part.numel() == 0 or part.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr():
        return
    if part.is_contiguous() and whole.is_contiguous():
        own = offset is not None and part.data_ptr() == whole.data_ptr() + offset * whole.element_size()
        before, behind = part.data_ptr() + part.nbytes, whole.data_ptr() + whole.nbytes
        allowed = own or before <= whole.data_ptr() or behind <= part.data_ptr()
    else:
        allowed = not _extents_meet(part, whole) or _own_or_apart(part, whole, offset)
    if not allowed:
        raise ValueError("output and input overlap; only a rank's own part of the larger tensor may be the smaller one")


def _extents_meet(a: torch.Tensor, b: torch.Tensor) -> bool:
    def extent(t: torch.Tensor) -> tuple[int, int]:
        reach = sum((n - 1) * stride for n, stride in zip(t.shape, t.stride(), strict=True))
        return t.data_ptr(), t.data_ptr() + (reach + 1) * t.element_size()

    (first, end), (other_first, other_end) = extent(a), extent(b)
    return first < other_end and other_first < end


def _own_or_apart(part: torch.Tensor, whole: torch.Tensor, offset: int | None) -> bool:
    """Element by element: strided tensors may lie between each other, or be the same part of something larger."""
    mine, theirs = _places(part), _places(whole)
    if offset is not None and torch.equal(mine, theirs[offset : offset + len(mine)]):
        return True
    return not bool(torch.isin(mine, theirs).any())


def _repeats(tensor: torch.Tensor) -> bool:
    """Whether several elements share one place."""
    reach = 0
    for stride, n in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if n > 1:
            if stride <= reach:  # longer strides do not step over all that shorter ones reach: look at each element
                return len(torch.unique(_places(tensor))) < tensor.numel()
            reach += (n - 1) * stride
    return False


def _places(tensor: torch.Tensor) -> torch.Tensor:
    """Where each element lies, in elements."""
    found = torch.tensor([tensor.data_ptr() // tensor.element_size()])
    for n, stride in zip(tensor.shape, tensor.stride(), strict=True):
        found = (found.unsqueeze(-1) + torch.arange(n) * stride).reshape(-1)
    return found
