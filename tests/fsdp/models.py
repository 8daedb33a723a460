"""Small models of odd shapes, data that depends on rank and index, and training in one process to compare with.

Nothing here draws from torch's global generator: ranks may be threads of one process, which share it.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from collectives import Communicator
from fsdp import DistributedDataParallel, clip_grad_norm_, full_state_dict, fully_shard

WIDTH, WORDS = 15, 11
STRATEGIES = ["ddp", 0, 1, 2, 3]
# Without accumulation stage 0 does what DDP does, in place, and stage 2 what stage 1 does.
every_strategy = pytest.mark.parametrize(
    "strategy", ["ddp", pytest.param(0, marks=pytest.mark.full), 1, pytest.param(2, marks=pytest.mark.full), 3]
)
State = dict[str, torch.Tensor]
Optimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape))


class OddBlock(nn.Module):
    """A residual block over the shapes (16, 15), (7, 15), (3,), (1, 7) and ()."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = parameter(16, WIDTH)
        self.narrow = parameter(7, WIDTH)
        self.bias = parameter(3)
        self.row = parameter(1, 7)
        self.scale = parameter()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(F.linear(x, self.wide))
        gate = (F.linear(x, self.narrow) * self.row).sum(-1, keepdim=True)
        shift = F.pad(self.bias, (0, WIDTH - 3))
        return x + self.scale * hidden[..., 1:] * torch.sigmoid(gate) + shift


class OddNet(nn.Module):
    """Words in, scores out."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.embedding = parameter(WORDS, WIDTH)
        self.blocks = nn.ModuleList(OddBlock() for _ in range(blocks))
        self.head = parameter(WORDS, WIDTH)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = F.embedding(words, self.embedding)
        for block in self.blocks:
            x = block(x)
        return F.linear(x, self.head)


def filled(module: nn.Module, seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Module:
    """``module`` with floating-point parameters that depend on ``seed``; 0-dim ones are near 1."""
    generator = torch.Generator().manual_seed(1000 + seed)
    module.to(dtype)
    with torch.no_grad():
        for p in module.parameters():
            if p.is_floating_point():
                p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) * 0.3 + (p.ndim == 0))
    return module


def words(rank: int, step: int, rows: int = 4) -> torch.Tensor:
    return torch.randint(0, WORDS, (rows, 6), generator=torch.Generator().manual_seed(97 * step + rank))


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Predict each word's neighbour."""
    return F.cross_entropy(model(batch).flatten(0, 1), batch.roll(1, 1).flatten())


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)


def reference(
    model: nn.Module, world_size: int, steps: int, optimizer: Optimizer, max_norm: float | None = None
) -> tuple[State, list[float]]:
    """One process that runs every rank's batch. Final state, and the mean loss of every step."""
    optim = optimizer(model.parameters())
    losses = []
    for step in range(steps):
        optim.zero_grad()
        total = 0.0
        for rank in range(world_size):
            loss = loss_of(model, words(rank, step))
            loss.backward()
            total += float(loss.detach())
        for p in model.parameters():
            if p.grad is not None:
                p.grad.div_(world_size)
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optim.step()
        losses.append(total / world_size)
    return {name: value.detach().clone() for name, value in model.state_dict().items()}, losses


def wrapped(
    model: nn.Module, comm: Communicator, strategy: str | int, units: list[type[nn.Module]] | None = None
) -> nn.Module:
    if strategy == "ddp":
        return DistributedDataParallel(model, comm, bucket_cap_mb=0.002)
    return fully_shard(model, comm, stage=int(strategy), units=units)


def train(
    comm: Communicator,
    model: nn.Module,
    steps: int,
    optimizer: Optimizer,
    max_norm: float | None = None,
) -> tuple[State, list[float]]:
    """This rank's training of a wrapped model: the whole state, on every rank, and this rank's losses."""
    optim = optimizer(model.parameters())
    losses = []
    for step in range(steps):
        optim.zero_grad()
        loss = loss_of(model, words(comm.rank, step))
        loss.backward()
        if max_norm is not None:
            clip_grad_norm_(model, max_norm)
        optim.step()
        losses.append(float(loss.detach()))
    return full_state(model), losses


def full_state(model: nn.Module) -> State:
    """The whole state on every rank, under the names that one process uses."""
    state = full_state_dict(model, rank0_only=False)
    return {name.removeprefix("module."): value for name, value in state.items()}


def difference(state: State, expected: State) -> float:
    """The largest difference of any element; infinite where names, shapes or dtypes differ."""
    if list(state) != list(expected):
        return float("inf")
    worst = 0.0
    for name, value in expected.items():
        if state[name].shape != value.shape or state[name].dtype != value.dtype:
            return float("inf")
        if value.numel():
            worst = max(worst, float((state[name].double() - value.double()).abs().max()))
    return worst


def same_bits(state: State, other: State) -> bool:
    return list(state) == list(other) and all(torch.equal(state[name], other[name]) for name in state)


def write_dcp(state: dict[str, Any], folder: Path) -> None:
    """A torch distributed checkpoint, written by this process alone."""
    checkpoint = importlib.import_module("torch.distributed.checkpoint")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        checkpoint.save(state, checkpoint_id=folder, no_dist=True)
