"""State that starts, or stays, as rank 0's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from collectives import Communicator, ReduceOp


def broadcast_tensors(comm: Communicator, tensors: Iterable[torch.Tensor], src: int = 0) -> None:
    """Rank ``src``'s values into all ranks' ``tensors``, in place: one broadcast a dtype.

    Collective; the same shapes and dtypes on all ranks. The tensors stay the caller's.
    """
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    with torch.no_grad():
        for dtype, group in by_dtype.items():
            # Side by side: one broadcast for all of a dtype costs less than one a tensor, and buffers are small.
            flat = torch.cat([t.reshape(-1) for t in group]).to(comm.device, dtype)
            comm.broadcast(flat, src)
            if comm.rank != src:
                for tensor, part in zip(group, torch.split(flat, [t.numel() for t in group]), strict=True):
                    tensor.copy_(part.view(tensor.shape))


def check_same(comm: Communicator, named: Sequence[tuple[str, str, torch.Tensor]]) -> None:
    """Raise ``ValueError``, alike on all ranks, unless every rank has tensors like rank 0's.

    Args:
        comm: the ranks; collective.
        named: kind, name and tensor of everything to compare, in an order that is the same on all ranks. Of a shard
            its full shape counts.
    """
    mine = [_describe(*entry) for entry in named]
    expected = comm.broadcast_object(mine, 0)
    pairs = zip(mine, expected, strict=False)
    first = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(mine), len(expected)))
    # The lowest position on any rank, and the lowest rank that has it, so that all ranks raise the same.
    nothing = 2**62
    code = torch.tensor([nothing if mine == expected else first * comm.world_size + comm.rank], device=comm.device)
    comm.all_reduce(code, ReduceOp.MIN)
    if int(code.item()) == nothing:
        return
    position, rank = divmod(int(code.item()), comm.world_size)
    found = comm.broadcast_object(_at(mine, position), rank)
    raise ValueError(
        f"ranks were given different modules: rank 0 has {_at(expected, position)}, rank {rank} has {found}. Build the "
        "same module on every rank before wrapping it"
    )


def _describe(kind: str, name: str, tensor: torch.Tensor) -> str:
    shape = tuple(getattr(tensor, "full_shape", tensor.shape))
    details = [f"shape {shape}", str(tensor.dtype)]
    details += ["trainable"] if tensor.requires_grad else []
    details += ["on meta"] if tensor.is_meta else []
    return f"{kind} {name!r} ({', '.join(details)})"


def _at(entries: Sequence[str], position: int) -> str:
    return entries[position] if position < len(entries) else "nothing more"
