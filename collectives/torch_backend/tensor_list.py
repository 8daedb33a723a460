"""Lists of tensors, which torch passes where a communicator takes one tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch


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
