"""Bytes sent per step equal the table: DDP 2S, ZeRO-1 2S, ZeRO-2 (k + 1)S, FSDP 3kS, for k micro-steps."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import nn

from collectives import Communicator
from fsdp import clip_grad_norm_
from fsdp.fsdp_module import no_sync
from fsdp.unit import unit_of
from tests.fsdp.models import OddBlock, OddNet, filled, loss_of, words, wrapped
from tests.ranks import Run, world_sizes

WIDTH = 480  # a multiple of 16 times every world size here, so that nothing is padded
ITEM = 4


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, WIDTH))
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(x * self.weight.sum(0) + self.bias)


class PlainNet(nn.Module):
    """Three units of 5 * WIDTH parameters in a root of 2 * WIDTH."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(WIDTH))
        self.units = nn.ModuleList(Plain() for _ in range(3))
        self.last = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.first
        for unit in self.units:
            x = unit(x)
        return (x * self.last).sum()


UNITS, ROOT = 3 * 5 * WIDTH * ITEM, 2 * WIDTH * ITEM
TOTAL = UNITS + ROOT
PARAMETERS = 8


def operations(comm: Communicator) -> dict[str, int]:
    return {name: part.sent_bytes for name, part in comm.stats().operations.items()}


def micro_steps(comm: Communicator, strategy: str | int, units: Any, k: int) -> dict[str, int]:
    """What this rank sends in the second of two steps."""
    model = wrapped(filled(PlainNet(), comm.rank, torch.float32), comm, strategy, units)
    optim = torch.optim.AdamW(model.parameters())
    before: dict[str, int] = {}
    for step in range(2):
        before = operations(comm)
        optim.zero_grad()
        for micro in range(k):
            last = micro == k - 1
            with contextlib.nullcontext() if last else no_sync(unit_of(model).runtime):
                x = torch.linspace(-1, 1, WIDTH) * (comm.rank + 1) + step + micro
                model(x).backward()
        optim.step()
    return {name: sent - before.get(name, 0) for name, sent in operations(comm).items()}


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("units", [None, [Plain]], ids=["whole", "units"])
@pytest.mark.parametrize("strategy", ["ddp", pytest.param(0, marks=pytest.mark.full), 1, 2, 3])
@pytest.mark.parametrize("world_size", [1, 2, pytest.param(3, marks=pytest.mark.full), 5])
def test_bytes_sent(run: Run, world_size: int, strategy: str | int, units: Any, k: int) -> None:
    sent = run(micro_steps, strategy, units, k, n=world_size)
    total = {name: sum(rank.get(name, 0) for rank in sent) for name in {name for rank in sent for name in rank}}
    others = world_size - 1  # an all_gather of S bytes makes the ranks together send (N - 1) S, and so on
    freed = UNITS if units else 0
    flags = {"ddp": 1, 0: 1, 1: 1, 2: k, 3: k}[strategy] * 2 * others * PARAMETERS
    gathers = {"ddp": 0, 0: 0, 1: TOTAL, 2: TOTAL, 3: k * (TOTAL + freed)}[strategy]
    reductions = {"ddp": 0, 0: 0, 1: TOTAL, 2: k * TOTAL, 3: k * TOTAL}[strategy]
    all_reduces = 2 * TOTAL if strategy in ("ddp", 0) else 0
    assert total.get("all_gather", 0) == others * gathers
    assert total.get("reduce_scatter", 0) == others * reductions
    assert total.get("all_reduce", 0) == others * all_reduces + flags
    assert sum(total.values()) == others * (gathers + reductions + all_reduces) + flags


def calls_of(comm: Communicator, stage: int) -> dict[str, int]:
    model = wrapped(filled(OddNet(), comm.rank, torch.float32), comm, stage, [OddBlock])
    before = {name: part.calls for name, part in comm.stats().operations.items()}
    loss_of(model, words(comm.rank, 0)).backward()
    clip_grad_norm_(model, 1.0)
    return {name: part.calls - before.get(name, 0) for name, part in comm.stats().operations.items()}


@pytest.mark.parametrize(("stage", "gathers"), [(1, 4), (2, 4), (3, 7)])
@world_sizes(2)
def test_one_collective_a_unit(run: Run, world_size: int, stage: int, gathers: int) -> None:
    """Never one a parameter: three blocks and the root, flags, and the clipping norm."""
    calls = run(calls_of, stage, n=world_size)[0]
    assert calls["all_gather"] == gathers
    assert calls["reduce_scatter"] == 4
    assert calls["all_reduce"] == 1 + (world_size > 1)  # one rank has nobody to tell its flags
