"""What models look like: names and shapes, tied weights, strange outputs, unused units."""

from __future__ import annotations

import dataclasses
from collections import namedtuple
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from collectives import Communicator
from fsdp import FSDPModule, fully_shard
from fsdp.param_group import Storage
from fsdp.unit import unit_of
from tests.fsdp.models import (
    WIDTH,
    WORDS,
    OddBlock,
    OddNet,
    adamw,
    difference,
    every_strategy,
    filled,
    full_state,
    loss_of,
    parameter,
    reference,
    sgd,
    train,
    words,
    wrapped,
)  # fmt: skip
from tests.ranks import Run, world_sizes


def identity(comm: Communicator, stage: int) -> None:
    model = filled(OddNet(2), comm.rank)
    before = dict(model.named_parameters())
    optim_before = adamw(model.parameters())
    fully_shard(model, comm, stage=stage, units=[OddBlock])
    after = dict(model.named_parameters())
    assert list(before) == list(after)
    assert all(before[name] is after[name] for name in before)
    expected = dict(filled(OddNet(2)).named_parameters())
    for name, p in after.items():
        assert p.full_shape == expected[name].shape  # type: ignore[attr-defined]
        assert p.dtype == torch.float64
        if p.full_shape:  # type: ignore[attr-defined]
            assert p.shape == (p.numel(),) + (1,) * (expected[name].ndim - 1)
    loss = loss_of(model, words(comm.rank, 0))
    assert all(before[name] is p for name, p in model.named_parameters())
    loss.backward()
    assert all(before[name] is p and p.grad is not None and p.grad.shape == p.shape
               for name, p in model.named_parameters())  # fmt: skip
    optim_before.step()
    assert isinstance(model, OddNet)
    assert isinstance(model, FSDPModule)
    assert isinstance(model.blocks[0], OddBlock)


@pytest.mark.parametrize("stage", [1, 2, 3])
@world_sizes(1, 2, 3, 8)
def test_uneven_shapes_and_names_unchanged(run: Run, world_size: int, stage: int) -> None:
    run(identity, stage, n=world_size)


def optimizer_before(comm: Communicator, strategy: str | int) -> float:
    model = filled(OddNet(2), comm.rank)
    optim = sgd(model.parameters())
    model = wrapped(model, comm, strategy, [OddBlock])
    for step in range(3):
        optim.zero_grad()
        loss_of(model, words(comm.rank, step)).backward()
        optim.step()
    return difference(full_state(model), reference(filled(OddNet(2)), comm.world_size, 3, sgd)[0])


@every_strategy
@world_sizes(3)
def test_an_optimizer_built_before_wrapping(run: Run, world_size: int, strategy: str | int) -> None:
    assert max(run(optimizer_before, strategy, n=world_size)) < 1e-10


def bottom_up(comm: Communicator, stage: int) -> float:
    model = filled(OddNet(3), comm.rank)
    for block in model.blocks:
        fully_shard(block, comm, stage=stage)
    fully_shard(model, comm, stage=stage)
    return difference(train(comm, model, 3, adamw)[0], reference(filled(OddNet(3)), comm.world_size, 3, adamw)[0])


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@world_sizes(2)
def test_manual_units_bottom_up(run: Run, world_size: int, stage: int) -> None:
    assert max(run(bottom_up, stage, n=world_size)) < 1e-10


class Tied(OddNet):
    def __init__(self) -> None:
        super().__init__(2)
        self.embedding = self.head


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = parameter(WORDS, WIDTH)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return F.embedding(batch, self.weight)


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = parameter(WORDS, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight)


class TiedAcross(nn.Module):
    """Like GPT-2, but with the embedding and the head as units of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = Embed()
        self.blocks = nn.ModuleList(OddBlock() for _ in range(2))
        self.head = Head()
        self.head.weight = self.embed.weight

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        x = self.embed(batch)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class TiedToRoot(TiedAcross):
    """The head is no unit: the root borrows the weight of the embedding's unit."""

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        x = self.embed(batch)
        for block in self.blocks:
            x = block(x)
        return F.linear(x, self.head.weight)


def tied(comm: Communicator, strategy: str | int, cls: Any, units: Any) -> tuple[float, bool]:
    model = wrapped(filled(cls(), comm.rank), comm, strategy, units)
    state, _ = train(comm, model, 3, adamw)
    inner = model.module if strategy == "ddp" else model
    names = [n for n, _ in inner.named_parameters(remove_duplicate=False)]
    still = len(names) == 1 + len(dict(inner.named_parameters()))
    return difference(state, reference(filled(cls()), comm.world_size, 3, adamw)[0]), still


@every_strategy
@pytest.mark.parametrize(
    ("cls", "units"),
    [(Tied, None), (Tied, [OddBlock]), (TiedAcross, [Embed, OddBlock, Head]), (TiedToRoot, [Embed, OddBlock])],
)
@world_sizes(2)
def test_tied_params(run: Run, world_size: int, strategy: str | int, cls: Any, units: Any) -> None:
    for worst, still_tied in run(tied, strategy, cls, units, n=world_size):
        assert worst < 1e-10
        assert still_tied


Pair = namedtuple("Pair", ["left", "right"])


@dataclasses.dataclass
class Record:
    value: torch.Tensor
    note: str = ""


class Plain:
    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


CONTAINERS: dict[str, Any] = {
    "tuple": lambda t: (None, t),
    "dict": lambda t: {"x": t, "n": 3},
    "list": lambda t: [t],
    "namedtuple": lambda t: Pair(t, None),
    "dataclass": lambda t: Record(t),
    "nested": lambda t: {"a": [(None, Record(t))]},
    "object": lambda t: Plain(t),
}


def dig(value: Any) -> torch.Tensor:
    """The tensor inside."""
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, dict):
        return next(dig(v) for v in value.values() if not isinstance(v, int))
    if isinstance(value, (tuple, list)):
        return next(dig(v) for v in value if v is not None)
    return value.value


class Packs(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.block = OddBlock()
        self.kind = kind

    def forward(self, *, packed: Any, flag: bool) -> Any:
        assert flag
        return CONTAINERS[self.kind](self.block(dig(packed)))


class Chain(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first = Packs(kind)
        self.second = Packs(kind)
        self.head = parameter(WORDS, WIDTH)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        x: Any = F.embedding(batch, self.head)
        for unit in (self.first, self.second):
            x = unit(packed=x, flag=True)
        y = dig(x)
        y += 1  # a change in place of what a unit returned
        return F.linear(y, self.head)


def contained(comm: Communicator, kind: str, stage: int) -> float:
    model = fully_shard(filled(Chain(kind), comm.rank), comm, stage=stage, units=[Packs])
    state, _ = train(comm, model, 2, adamw)
    return difference(state, reference(filled(Chain(kind)), comm.world_size, 2, adamw)[0])


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("kind", CONTAINERS)
@world_sizes(2)
def test_f13_outputs_of_any_container(run: Run, world_size: int, kind: str, stage: int) -> None:
    assert max(run(contained, kind, stage, n=world_size)) < 1e-10


class Alternating(nn.Module):
    """Encoder a in even steps, encoder b in odd ones; the other's output may be computed and left out."""

    def __init__(self, computes_both: bool) -> None:
        super().__init__()
        self.encoders = nn.ModuleList([OddBlock(), OddBlock()])
        self.empty = nn.Identity()
        self.head = parameter(WORDS, WIDTH)
        self.computes_both = computes_both
        self.turn = 0

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        x = self.empty(F.embedding(batch, self.head))
        if self.computes_both:
            self.encoders[1 - self.turn % 2](x)
        x = self.encoders[self.turn % 2](x)
        return F.linear(x, self.head)


def alternate(comm: Communicator | None, strategy: str | int, ranks: int, both: bool, to_none: bool) -> Any:
    model: Any = filled(Alternating(both), 0 if comm is None else comm.rank)
    inner = model
    if comm is not None:
        model = wrapped(model, comm, strategy, [OddBlock, nn.Identity])
    optim = sgd(model.parameters())
    missing = []
    for step in range(4):
        optim.zero_grad(set_to_none=to_none)
        for rank in [comm.rank] if comm is not None else range(ranks):
            inner.turn = step
            loss = loss_of(model, words(rank, step))
            (loss if comm is not None else loss / ranks).backward()
        missing.append([p.grad is None for p in inner.parameters()])
        optim.step()
        if comm is not None and strategy not in ("ddp", 0):
            assert all(g.storage is Storage.FREED for g in unit_of(model).runtime.groups)
    return (full_state(model) if comm is not None else model.state_dict()), missing


@every_strategy
@pytest.mark.parametrize("both", [False, True], ids=["skipped", "left out"])
@pytest.mark.parametrize("to_none", [True, False])
@world_sizes(2)
def test_f15_units_that_alternate(run: Run, world_size: int, strategy: str | int, both: bool, to_none: bool) -> None:
    expected, expected_missing = alternate(None, strategy, world_size, both, to_none)
    for state, missing in run(alternate, strategy, world_size, both, to_none, n=world_size):
        assert difference(state, expected) < 1e-10
        assert missing == expected_missing
