"""Clipping by the norm over all ranks, and the scaler's one decision."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from collectives import Communicator
from fsdp import clip_grad_norm_, fully_shard
from tests.fsdp.models import adamw, difference, full_state, wrapped
from tests.ranks import Run, grid, run_ranks, world_sizes


class Parts(nn.Module):
    """A parameter with gradient [3, 4], and one that is left alone, with gradient 12."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Parameter(torch.zeros(2))
        self.whole = nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.part * torch.tensor([3.0, 4.0]) * x).sum() + (self.whole * 12.0 * x).sum()


def clipped(comm: Communicator, stage: int, norm_type: float) -> tuple[float, list[float]]:
    inner = Parts()
    model = fully_shard(inner, comm, stage=stage, ignored_params=[inner.whole])
    model(torch.ones(1)).backward()
    norm = clip_grad_norm_(model, 1.0, norm_type)
    grads = [x for p in (inner.part, inner.whole) for x in p.grad.as_subclass(torch.Tensor).reshape(-1).tolist()]
    return float(norm), comm.all_gather_object(grads)


@grid(world_sizes=(2,), threads=(), full=lambda backend, n: backend != "threads")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(("norm_type", "norm"), [(2.0, 13.0), (math.inf, 12.0), (1.0, 19.0)])
def test_f7_norms_span_ranks(backend: str, world_size: int, stage: int, norm_type: float, norm: float) -> None:
    for found, grads in run_ranks(clipped, stage, norm_type, world_size=world_size, backend=backend):
        assert found == norm
        for values in grads:
            assert values[-1] == pytest.approx(12.0 / norm, rel=1e-5)
        assert grads[0][:2] == pytest.approx([3.0 / norm, 4.0 / norm], rel=1e-5)


def scaled(comm: Communicator, strategy: str | int, overflow: bool) -> tuple[Any, float, float]:
    """Adam, clipping and a scaler on a parameter of two elements: some ranks hold none."""
    model = wrapped(nn.Linear(2, 1, bias=False), comm, strategy)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(0.5)
    optim = adamw(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in range(2):
        optim.zero_grad()
        x = torch.tensor([1.0 + comm.rank, 2.0])
        if overflow and step == 1:
            x = torch.tensor([math.inf, 1.0]) if comm.rank == 0 else torch.tensor([1.0, 1.0])
        scaler.scale(model(x).sum()).backward()
        scaler.unscale_(optim)
        clip_grad_norm_(model, 0.5)
        scaler.step(optim)
        scaler.update()
    steps = max(float(s["step"]) for s in optim.state.values())
    return full_state(model), scaler.get_scale(), steps


@pytest.mark.parametrize("overflow", [False, True])
@pytest.mark.parametrize("strategy", ["ddp", 1, 2, 3])
@world_sizes(4)
def test_f9_ranks_without_elements_agree(run: Run, world_size: int, strategy: str | int, overflow: bool) -> None:
    model = nn.Linear(2, 1, bias=False)
    nn.init.constant_(model.weight, 0.5)
    optim = adamw(model.parameters())
    for _ in range(1 if overflow else 2):
        optim.zero_grad()
        for rank in range(world_size):
            (model(torch.tensor([1.0 + rank, 2.0])).sum() / world_size).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optim.step()
    for state, scale, steps in run(scaled, strategy, overflow, n=world_size):
        assert difference(state, dict(model.state_dict())) < 1e-6
        assert scale == (4.0 if overflow else 8.0)
        assert steps == (1 if overflow else 2)


def poisoned(comm: Communicator, stage: int) -> float:
    model = fully_shard(nn.Linear(40, 1, bias=False), comm, stage=stage)
    model(torch.full((40,), math.nan if comm.rank == 0 else 1.0)).sum().backward()
    return float(clip_grad_norm_(model, 1.0))


@pytest.mark.parametrize("stage", [0, 1, 3])
@world_sizes(3)
def test_not_a_number_is_agreed(run: Run, world_size: int, stage: int) -> None:
    assert all(math.isnan(norm) for norm in run(poisoned, stage, n=world_size))
