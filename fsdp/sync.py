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
            flat = torch.cat([t.reshape(-1) for t in group]).to(comm.device, dtype)
            comm.broadcast(flat, src)
            if comm.rank != src:
                for tensor, part in zip(group, torch.split(flat, [t.numel() for t in group]), strict=True):
                    tensor.copy_(part.view(tensor.shape))


def check_same(comm: Communicator, named: Sequence[tuple[str, torch.Tensor]], kind: str) -> None:
    """Raise ``ValueError``, alike on all ranks, unless every rank has tensors like rank 0's.

    Args:
        comm: the ranks; collective.
        named: names and tensors, in an order that is the same on all ranks.
        kind: what the message calls them.
    """
    mine = [(name, tuple(tensor.shape), str(tensor.dtype), tensor.requires_grad) for name, tensor in named]
    expected = comm.broadcast_object(mine, 0)
    first = next(
        (i for i, (a, b) in enumerate(zip(mine, expected, strict=False)) if a != b), min(len(mine), len(expected))
    )
    equal = mine == expected
    # The lowest position on any rank, and the lowest rank that has it, so that all ranks raise the same.
    code = torch.tensor([2**62 if equal else first * comm.world_size + comm.rank], device=comm.device)
    comm.all_reduce(code, ReduceOp.MIN)
    position, rank = divmod(int(code.item()), comm.world_size)
    if int(code.item()) == 2**62:
        return
    found = comm.broadcast_object(mine[position] if position < len(mine) else None, rank)
    wanted = expected[position] if position < len(expected) else None
    raise ValueError(
        f"ranks were given different modules: rank 0 has {_describe(kind, wanted)}, rank {rank} has "
        f"{_describe(kind, found)}. Build the same module on every rank before wrapping it"
    )


def _describe(kind: str, entry: tuple[str, tuple[int, ...], str, bool] | None) -> str:
    if entry is None:
        return f"no further {kind}"
    name, shape, dtype, requires_grad = entry
    return f"{kind} {name!r} of shape {shape}, {dtype}" + (", trainable" if requires_grad else "")
