"""torch's own data parallelism, on gloo and on our communicators, to compare with.

The one file of this package that uses ``torch.distributed``. A group of None is the default one.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel


@contextlib.contextmanager
def process_group(rank: int, world_size: int, path: str) -> Iterator[None]:
    """torch's default process group, on gloo. The ranks meet at ``path``, a file that is not there yet."""
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def group_on(backend: str) -> dist.ProcessGroup:
    """A group of all ranks on a backend of ``collectives.torch_backend``. Collective."""
    import_module("collectives.torch_backend")  # torch knows its backends from then on
    group: dist.ProcessGroup = dist.new_group(backend=backend)
    return group


def ddp(model: nn.Module, units: Sequence[nn.Module], group: dist.ProcessGroup | None = None) -> nn.Module:
    """DDP, with gradients as views of its buckets."""
    return DistributedDataParallel(model, gradient_as_bucket_view=True, process_group=group)


def fsdp1(model: nn.Module, units: Sequence[nn.Module], group: dist.ProcessGroup | None = None) -> nn.Module:
    """FSDP1, with the users' own parameters and modules of the units' classes wrapped."""
    policy = ModuleWrapPolicy({type(unit) for unit in units})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns of being old
        return FullyShardedDataParallel(
            model, group, auto_wrap_policy=policy, use_orig_params=True, device_id=torch.device("cpu")
        )


def fsdp2(model: nn.Module, units: Sequence[nn.Module], group: dist.ProcessGroup | None = None) -> nn.Module:
    """FSDP2; ``units`` first, then the model."""
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,)) if group is None else DeviceMesh.from_group(group, "cpu")
    for unit in (*units, model):
        fully_shard(unit, mesh=mesh)
    return model


def save_distributed(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> None:
    """A distributed checkpoint of both."""
    weights, state = get_state_dict(model, optimizer)
    state_dict_saver.save({"model": weights, "optimizer": state}, checkpoint_id=path)


def load_distributed(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> None:
    """Both from a distributed checkpoint."""
    weights, state = get_state_dict(model, optimizer)
    state_dict_loader.load({"model": weights, "optimizer": state}, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
