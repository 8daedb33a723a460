"""torch's own data parallelism, to compare with: the one place of this package that uses ``torch.distributed``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


@contextlib.contextmanager
def process_group(rank: int, world_size: int, path: str) -> Iterator[None]:
    """torch's default process group, on gloo. The ranks meet at ``path``, a file that is not there yet."""
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def fsdp2(model: nn.Module, units: Sequence[nn.Module]) -> nn.Module:
    """FSDP2 over all ranks of the default group; ``units`` first, then the model."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for unit in (*units, model):
        fully_shard(unit, mesh=mesh)
    return model
