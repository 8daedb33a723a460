"""Modules on the meta device get values when they are wrapped; weights that separate calls tie."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from collectives import Communicator
from collectives.errors import UnsupportedError
from fsdp import fully_shard, load_full_state_dict
from fsdp.unit import unit_of
from tests.fsdp.models import WIDTH, WORDS, adamw, difference, filled, full_state, reference, train
from tests.fsdp.test_units import OddBlock, TiedAcross
from tests.ranks import Run, grid, run_ranks, world_sizes


class Rotary(nn.Module):
    """A weight, and a table that no file restores."""

    def __init__(self, resets: list[str], name: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WIDTH, WIDTH))
        self.register_buffer("table", torch.empty(8), persistent=False)
        self.register_buffer("seen", torch.empty((), dtype=torch.int64))
        self.resets, self.name = resets, name

    def reset_parameters(self) -> None:
        self.resets.append(self.name)
        self.weight.copy_(torch.arange(WIDTH * WIDTH).view(WIDTH, WIDTH).sin() + len(self.name))
        self.table.copy_(torch.arange(8).cos())
        self.seen.zero_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(F.linear(x, self.weight)) * self.table.sum()


class Outer(nn.Module):
    def __init__(self, resets: list[str]) -> None:
        super().__init__()
        self.a = Rotary(resets, "a")
        self.inner = nn.Sequential(Rotary(resets, "inner.0"), Rotary(resets, "inner.1"))
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(self.a(self.embedding(batch))))


def built(comm: Communicator, stage: int, units: Any) -> None:
    resets: list[str] = []
    with torch.device("meta"):
        model = Outer(resets)
    names = list(dict(model.named_parameters()))
    expected = Outer([])
    for module in expected.modules():
        if isinstance(module, Rotary):
            with torch.no_grad():
                module.reset_parameters()
    fully_shard(model, comm, stage=stage, units=units)
    assert sorted(resets) == ["a", "inner.0", "inner.1"]
    assert list(dict(model.named_parameters())) == names
    assert model.head.weight is model.embedding.weight
    assert not any(t.is_meta for t in (*model.parameters(), *model.buffers()))
    for module in model.modules():
        if isinstance(module, Rotary):
            assert torch.equal(module.table, torch.arange(8).cos())
    state = full_state(model)
    with torch.no_grad():
        expected.embedding.weight.copy_(state["embedding.weight"])  # random
    assert difference(state, expected.state_dict()) == 0
    for value in (loaded := copy.deepcopy(expected)).parameters():
        value.data.add_(0.25)
    load_full_state_dict(model, loaded.state_dict())
    assert difference(full_state(model), loaded.state_dict()) == 0
    load_full_state_dict(model, expected.state_dict())
    assert difference(train(comm, model, 2, adamw)[0], reference(expected, comm.world_size, 2, adamw)[0]) < 1e-5


@grid(threads=(), full=lambda backend, n: backend != "threads" or n == 4)
@pytest.mark.parametrize("units", [None, [nn.Sequential, Rotary]], ids=["whole", "nested"])
@pytest.mark.parametrize("stage", [0, 1, pytest.param(2, marks=pytest.mark.full), 3])
def test_f27_meta_init_resets_each_module_once(backend: str, world_size: int, stage: int, units: Any) -> None:
    run_ranks(built, stage, units, world_size=world_size, backend=backend)


def without_reset(comm: Communicator) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 3), OddBlock())
    with pytest.raises(UnsupportedError, match=r"1 \(OddBlock\) is on the meta device"):
        fully_shard(model, comm)
    assert all(p.is_meta for p in model.parameters())
    fully_shard(model, comm, param_init_fn=lambda m: [p.fill_(0.5) for p in m.parameters(recurse=False)])
    assert all(bool((value == 0.5).all()) for value in full_state(model).values())


@world_sizes(2)
def test_f27_a_module_without_a_reset_method_raises_by_name(run: Run, world_size: int) -> None:
    run(without_reset, n=world_size)


class Watched(nn.Linear):
    """Notes how many elements of its kind are whole while it is filled."""

    def __init__(self, siblings: list[Watched], peak: list[int]) -> None:
        super().__init__(64, 64, bias=False)
        self.__dict__.update(siblings=siblings, peak=peak)
        siblings.append(self)

    def reset_parameters(self) -> None:
        if hasattr(self, "peak"):
            super().reset_parameters()
            self.peak.append(sum(s.weight.untyped_storage().nbytes() for s in self.siblings if not s.weight.is_meta))


def one_at_a_time(comm: Communicator) -> list[int]:
    peak: list[int] = []
    siblings: list[Watched] = []
    with torch.device("meta"):
        model = nn.Sequential(*(Watched(siblings, peak) for _ in range(5)))
    fully_shard(model, comm, units=[Watched])
    return peak


@world_sizes(4)
def test_f27_at_most_one_unit_is_whole(run: Run, world_size: int) -> None:
    whole = 64 * 64 * 4
    shard = 4 * 16 * -(-64 * 64 // (16 * world_size))
    for peak in run(one_at_a_time, n=world_size):
        assert peak == [whole + i * shard for i in range(5)]


def separate_calls(comm: Communicator, stage: int) -> float:
    model = filled(TiedAcross(), comm.rank)
    for part in (model.embed, *model.blocks, model.head):
        fully_shard(part, comm, stage=stage)
    with pytest.raises(UnsupportedError, match=r"Head\.weight is tied to a parameter"):
        model.head(torch.zeros(1, WIDTH, dtype=torch.float64))
    fully_shard(model, comm, stage=stage)
    managed = [m.name for group in unit_of(model).runtime.groups for m in group.managed]
    assert len(managed) == len(dict(model.named_parameters()))  # a tied one is reduced once
    state, _ = train(comm, model, 3, adamw)
    assert model.head.weight is model.embed.weight
    return difference(state, reference(filled(TiedAcross()), comm.world_size, 3, adamw)[0])


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@world_sizes(2)
def test_tied_params_between_separate_calls(run: Run, world_size: int, stage: int) -> None:
    assert max(run(separate_calls, stage, n=world_size)) < 1e-10
