"""The same seeds and data through torch's DDP, torch's FSDP2 and ours, in one set of processes."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from collectives import Communicator
from fsdp import DistributedDataParallel, clip_grad_norm_, fully_shard
from tests.fsdp.models import full_state
from tests.ranks import PROCESSES, run_ranks

STEPS, WIDTH, MAX_NORM = 10, 12, 0.5
State = dict[str, torch.Tensor]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 3 * WIDTH)
        self.down = nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build() -> Net:
    model = Net()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.3)
    return model


def train(model: nn.Module, rank: int, clip: Any) -> list[float]:
    optim = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(100 * step + rank)
        x = torch.randn(8, WIDTH, generator=generator)
        optim.zero_grad()
        loss = (model(x) - x.sum(-1, keepdim=True).sin()).pow(2).mean()
        loss.backward()
        clip(model)
        optim.step()
        losses.append(float(loss.detach()))
    return losses


@contextmanager
def process_group(comm: Communicator) -> Iterator[None]:
    """torch's default group over the same ranks."""
    path = comm.broadcast_object(tempfile.mktemp() if comm.rank == 0 else None, 0)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=comm.rank, world_size=comm.world_size)
    try:
        yield
        dist.barrier()
    finally:
        dist.destroy_process_group()
        if comm.rank == 0 and os.path.exists(path):
            os.unlink(path)


def all_of_them(comm: Communicator) -> dict[str, tuple[list[float], State]]:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.fsdp import fully_shard as fsdp2
    from torch.nn.parallel import DistributedDataParallel as TorchDDP

    def torch_clip(model: nn.Module) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)

    def our_clip(model: nn.Module) -> None:
        clip_grad_norm_(model, MAX_NORM)

    found = {}
    with process_group(comm):
        ddp = TorchDDP(build())
        losses = train(ddp, comm.rank, torch_clip)
        found["torch DDP"] = losses, dict(ddp.module.state_dict())
        model: Any = build()
        for block in model.blocks:
            fsdp2(block)
        fsdp2(model)
        losses = train(model, comm.rank, torch_clip)
        found["torch FSDP2"] = losses, get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    for strategy in ("ddp", 0, 1, 2, 3):
        model = build()
        if strategy == "ddp":
            model = DistributedDataParallel(model, comm)
        else:
            fully_shard(model, comm, stage=strategy, units=[Block])
        losses = train(model, comm.rank, our_clip)
        found[f"ours, {strategy}"] = losses, full_state(model)
    return found


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.full)])
@PROCESSES
def test_torch_and_ours_take_the_same_steps(backend: str, world_size: int) -> None:
    for found in run_ranks(all_of_them, world_size=world_size, backend=backend, timeout=120.0):
        expected, weights = found["torch DDP"]
        for name, (losses, state) in found.items():
            assert losses == pytest.approx(expected, rel=1e-6), name
            if state:  # torch's full state is on rank 0 only where it is offloaded
                assert list(state) == list(weights), name
                for key, value in weights.items():
                    assert (state[key] - value).norm() <= 1e-6 * max(float(value.norm()), 1.0), (name, key)
