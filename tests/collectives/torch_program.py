"""Programs of ranks that launchers start: ``torch_program.py WHAT BACKEND``, a result a line, from rank 0."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import collectives.torch_backend
from fsdp.bench.models import GPT, SHAPES, Block
from tests.collectives.torch_checks import CHECKS

STEPS = 4


def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def ddp(model: GPT) -> nn.Module:
    return DistributedDataParallel(model, gradient_as_bucket_view=True)


def ddp_hook(model: GPT) -> nn.Module:
    """With a hook of Python's, which works on futures."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    wrapped = DistributedDataParallel(model, static_graph=True)
    wrapped.register_comm_hook(None, allreduce_hook)
    return wrapped


def fsdp1(model: GPT) -> nn.Module:
    return FullyShardedDataParallel(
        model, auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=True, device_id=torch.device("cpu")
    )


def fsdp2(model: GPT) -> nn.Module:
    for block in model.blocks:
        fully_shard(block, mesh=mesh())
    return fully_shard(model, mesh=mesh())


def hybrid(model: GPT) -> nn.Module:
    """FSDP2 of two dimensions: shards in rows, copies in columns."""
    size = dist.get_world_size()
    grid = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))
    for block in model.blocks:
        fully_shard(block, mesh=grid)
    return fully_shard(model, mesh=grid)


def optimizer_of(model: nn.Module, kind: str) -> torch.optim.Optimizer:
    if kind == "zero":
        return ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


WRAPPERS: dict[str, Callable[[GPT], nn.Module]] = {
    "ddp": ddp,
    "ddp_hook": ddp_hook,
    "zero": ddp,
    "fsdp1": fsdp1,
    "fsdp2": fsdp2,
    "hybrid": hybrid,
}


def train(kind: str) -> Iterator[float]:
    """The losses of a tiny GPT, averaged over ranks."""
    shape = SHAPES["tiny"]
    torch.manual_seed(0)
    model = WRAPPERS[kind](GPT(shape))
    optimizer = optimizer_of(model, kind)
    torch.manual_seed(1 + dist.get_rank())
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model(torch.randint(0, shape.words, (2, shape.length)))
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        yield mean.item() / dist.get_world_size()


def operations() -> Iterator[str]:
    for check in CHECKS:
        check()
        yield check.__name__


def dtensors() -> Iterator[str]:
    """Redistribution keeps the values, and matrices multiply as whole ones do, from any placement to any other."""
    line = mesh()
    torch.manual_seed(0)
    left, right = torch.randn(8, 12), torch.randn(12, 8)
    placements: list[Any] = [Replicate(), Shard(0), Shard(1)]
    for source in placements:
        for target in placements:
            tensor = distribute_tensor(left, line, [source]).redistribute(line, [target])
            assert torch.equal(tensor.full_tensor(), left), (source, target)
        for other in placements:
            product = distribute_tensor(left, line, [source]) @ distribute_tensor(right, line, [other])
            torch.testing.assert_close(product.full_tensor(), left @ right)
    part = DTensor.from_local(left / dist.get_world_size(), line, [Partial()])
    for target in placements:
        torch.testing.assert_close(part.redistribute(line, [target]).full_tensor(), left)
    yield "one dimension"
    size = dist.get_world_size()
    if size % 2 == 0:
        grid = init_device_mesh("cpu", (2, size // 2))
        for first in placements:
            for second in placements:
                tensor = distribute_tensor(left, grid, [first, second])
                assert torch.equal(tensor.full_tensor(), left), (first, second)
                moved = tensor.redistribute(grid, [second, first])
                assert torch.equal(moved.full_tensor(), left), (first, second)
        yield "two dimensions"


def checkpoints() -> Iterator[str]:
    """What is saved from shards comes back into shards, also asynchronously."""
    folder: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder, 0)

    def made(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = fsdp2(GPT(SHAPES["tiny"]))
        optimizer = optimizer_of(model, "fsdp2")
        model(torch.zeros(1, 4, dtype=torch.int64)).backward()
        optimizer.step()
        return model, optimizer

    def parts(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        weights, state = get_state_dict(model, optimizer)
        return {"model": weights, "optimizer": state}

    for number, save in enumerate((dcp.save, lambda *a, **k: dcp.async_save(*a, **k).result())):
        first, second = made(1), made(2)
        place = str(Path(folder[0]) / str(number))
        save(parts(*first), checkpoint_id=place)
        dist.barrier()
        wanted = parts(*second)
        dcp.load(wanted, checkpoint_id=place)
        set_state_dict(*second, model_state_dict=wanted["model"], optim_state_dict=wanted["optimizer"])
        for a, b in zip(first[0].parameters(), second[0].parameters(), strict=True):
            assert torch.equal(a.full_tensor(), b.full_tensor())  # type: ignore[attr-defined]
        yield f"save {number}"


PROGRAMS: dict[str, Callable[[], Iterator[object]]] = {
    "operations": operations,
    "dtensors": dtensors,
    "checkpoints": checkpoints,
    "train": lambda: (
        f"{kind} {loss!r}"
        for kind in WRAPPERS
        if kind != "hybrid" or dist.get_world_size() == 4
        for loss in train(kind)
    ),
}


def main(what: str, *backends: str) -> None:
    for backend in backends:
        dist.init_process_group(backend)
        for line in PROGRAMS[what]():
            if dist.get_rank() == 0:
                sys.stdout.write(f"{backend}: {line}\n")
        dist.destroy_process_group()


if __name__ == "__main__":
    assert collectives.torch_backend.NAMES
    main(*sys.argv[1:])
