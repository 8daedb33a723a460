"""Lists of tensors, which torch passes where a communicator takes one tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

Tensors = list[torch.Tensor]


def listed(tensors: Any) -> Tensors:
    """A list, for a list or one tensor."""
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def listed_twice(lists: Any) -> list[Tensors]:
    """A list of lists, for one or a list."""
    return [list(lists)] if isinstance(lists[0], torch.Tensor) else [list(tensors) for tensors in lists]


def elements(tensor: torch.Tensor, rows: Sequence[int] | None) -> list[int] | None:
    """Splits in rows of the first dimension as splits in elements."""
    if not rows:
        return None
    width = tensor.numel() // tensor.shape[0] if tensor.dim() and tensor.shape[0] else 1
    return [count * width for count in rows]


class Joined(NamedTuple):
    """All elements of a list as one 1-D tensor: a view where they lie side by side, else a packed copy.

    ``unpack`` copies the elements of a packed copy back into the list, and is None for a view.
    """

    tensor: torch.Tensor
    sizes: list[int]
    unpack: Callable[[], None] | None


def join(tensors: Sequence[torch.Tensor], *, written: bool) -> Joined:
    """One tensor for ``tensors``, of one dtype. ``written``: they are results, so that their values do not matter."""
    sizes = [tensor.numel() for tensor in tensors]
    first = tensors[0].detach()
    if _adjacent(tensors):
        return Joined(first.as_strided((sum(sizes),), (1,)), sizes, None)
    if any(tensor.dtype != first.dtype for tensor in tensors):
        raise TypeError(f"expected tensors of one dtype, found {', '.join(str(tensor.dtype) for tensor in tensors)}")
    if not written:
        return Joined(torch.cat([tensor.detach().reshape(-1) for tensor in tensors]), sizes, None)
    packed = torch.empty(sum(sizes), dtype=first.dtype, device=first.device)

    def unpack() -> None:
        with torch.no_grad():
            for tensor, part in zip(tensors, torch.split(packed, sizes), strict=True):
                tensor.detach().copy_(part.view(tensor.shape))

    return Joined(packed, sizes, unpack)


def _adjacent(tensors: Sequence[torch.Tensor]) -> bool:
    first = tensors[0]
    place, storage = first.storage_offset(), first.untyped_storage().data_ptr()
    for tensor in tensors:
        if tensor.dtype != first.dtype or not tensor.is_contiguous() or tensor.storage_offset() != place:
            return False
        if tensor.untyped_storage().data_ptr() != storage:
            return False
        place += tensor.numel()
    return True
