"""Checkpoints: what one set of ranks saves, any other loads, and training goes on as if nothing had happened."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fsdp
from collectives import Communicator
from tests.fsdp.models import OddBlock, OddNet, adamw, difference, filled, full_state, loss_of, sgd, words, wrapped
from tests.ranks import run_ranks

BATCHES = 12  # of a step, over all ranks: a number that 1 to 4 ranks divide
FORMS = ["ddp", 0, 1, 2, 3]
Strategy = str | int


def build(comm: Communicator, strategy: Strategy, optimizer: Any = adamw, seed: int = 0) -> tuple[Any, Any]:
    units = [OddBlock] if strategy == 3 else None
    model = wrapped(filled(OddNet(2), seed), comm, strategy, units)
    return model, optimizer(model.parameters())


def step_of(comm: Communicator, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """One step on a global batch that does not depend on the number of ranks."""
    optimizer.zero_grad()
    mine = range(comm.rank * BATCHES // comm.world_size, (comm.rank + 1) * BATCHES // comm.world_size)
    batch = torch.cat([words(part, step, rows=1) for part in mine])
    loss_of(model, batch).backward()
    optimizer.step()


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, comm: Communicator) -> dict[str, torch.Tensor]:
    """Weights and moments, whole."""
    state = full_state(model)
    for index, values in fsdp.full_optimizer_state_dict(model, optimizer, rank0_only=False)["state"].items():
        state.update({f"{index}.{key}": value for key, value in values.items() if isinstance(value, torch.Tensor)})
    return state


def train_and_save(comm: Communicator, strategy: Strategy, path: str, steps: int, more: int, opt: Any = adamw) -> Any:
    model, optimizer = build(comm, strategy, opt)
    for step in range(steps):
        step_of(comm, model, optimizer, step)
    fsdp.save(path, model, optimizer, step=steps)
    for step in range(steps, steps + more):
        step_of(comm, model, optimizer, step)
    return state_of(model, optimizer, comm)


def load_and_train(comm: Communicator, strategy: Strategy, path: str, steps: int, more: int, opt: Any = adamw) -> Any:
    model, optimizer = build(comm, strategy, opt, seed=5)
    extra = fsdp.load(path, model, optimizer)
    assert (extra.step, extra.missing, extra.unexpected, dict(extra)) == (steps, [], [], {})
    for step in range(steps, steps + more):
        step_of(comm, model, optimizer, step)
    return state_of(model, optimizer, comm)


PLAIN = [((3, 3), (1, 0)), ((2, "ddp"), (3, 3)), ((1, 3), (2, 2)), ((3, 1), (2, 3))]
SAVED = [(4, 3), (2, "ddp"), (1, 2), (3, 1)]
LOADED = [(1, 0), (3, 3), (2, 2), (4, 1)]
EVERY = list(itertools.product([1, 2, 3, 4], FORMS))


def tier(saved: tuple[int, Strategy], loaded: tuple[int, Strategy]) -> Any:
    if (saved, loaded) in PLAIN:
        return ()
    return pytest.mark.full if saved in SAVED and loaded in LOADED else pytest.mark.exhaustive


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [pytest.param(a, b, marks=tier(a, b), id=f"{a}-to-{b}") for a, b in itertools.product(EVERY, EVERY)],
)
def test_any_world_size_and_stage_to_any_other(saved: Any, loaded: Any, tmp_path: Path) -> None:
    expected = run_ranks(train_and_save, saved[1], str(tmp_path), 2, 2, world_size=saved[0])[0]
    for state in run_ranks(load_and_train, loaded[1], str(tmp_path), 2, 2, world_size=loaded[0]):
        assert difference(state, expected) < 1e-10


@pytest.mark.parametrize(
    ("world_size", "strategy", "optimizer"),
    [
        (2, 3, adamw),
        (3, 1, sgd),
        *(pytest.param(*each, marks=pytest.mark.full) for each in [(1, 0, sgd), (3, 3, adamw)]),
    ],
)
def test_at_the_same_layout_bit_by_bit(world_size: int, strategy: Strategy, optimizer: Any, tmp_path: Path) -> None:
    expected = run_ranks(train_and_save, strategy, str(tmp_path), 2, 2, optimizer, world_size=world_size)[0]
    for state in run_ranks(load_and_train, strategy, str(tmp_path), 2, 2, optimizer, world_size=world_size):
        assert difference(state, expected) == 0
