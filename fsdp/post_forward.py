"""Parameters between forward and backward, spread over fewer ranks than at rest: more memory, nearer partners."""

from __future__ import annotations

import torch

from collectives import Communicator


class PostForwardShard:
    """This rank's part of a gathered buffer, from the end of forward to the gather of backward.

    Args:
        size: ranks that hold one copy together: neighbours in the order of ranks. It divides the world size.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.comm: Communicator | None = None  # those ranks; set before the first forward
        self.tensor: torch.Tensor | None = None

    def keep(self, full: torch.Tensor) -> None:
        """Copy this rank's part of ``full``, 1-D, a multiple of ``size`` elements, which is about to be freed."""
        assert self.comm is not None
        numel = full.numel() // self.size
        self.tensor = full.data[self.comm.rank * numel : (self.comm.rank + 1) * numel].clone()

    def drop(self) -> None:
        """Free the part."""
        self.tensor = None


def post_forward_shard(size: int | None) -> PostForwardShard | None:
    """For ``size`` ranks; None: parameters lie between forward and backward as they do at rest."""
    return None if size is None else PostForwardShard(size)
