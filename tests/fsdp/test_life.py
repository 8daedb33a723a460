"""A wrapped model's life: modes, failures, edited and replaced parameters, copies, its end."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from collectives import Communicator
from collectives.errors import UnsupportedError
from fsdp import fully_shard
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
    reference,
    sgd,
    train,
    words,
    wrapped,
)  # fmt: skip
from tests.ranks import Run, world_sizes


def modes(comm: Communicator, strategy: str | int) -> float:
    """Forwards without backward, in any order, change nothing, and see every optimizer step."""
    model = wrapped(filled(OddNet(2), comm.rank), comm, strategy, [OddBlock])
    plain = filled(OddNet(2))
    optim = sgd(model.parameters())
    worst = 0.0
    for step in range(4):
        with torch.inference_mode() if step % 2 else torch.no_grad():
            model.eval()
            plain.load_state_dict(full_state(model))
            worst = max(worst, float((model(words(0, 9)) - plain(words(0, 9))).abs().max()))
            model.train()
        model(words(comm.rank, 7))  # a graph that nobody uses
        optim.zero_grad()
        loss_of(model, words(comm.rank, step)).backward()
        optim.step()
    return max(worst, difference(full_state(model), reference(filled(OddNet(2)), comm.world_size, 4, sgd)[0]))


@every_strategy
@world_sizes(2)
def test_eval_inference_mode_and_train_in_any_order(run: Run, world_size: int, strategy: str | int) -> None:
    assert max(run(modes, strategy, n=world_size)) < 1e-10


class Fails(OddNet):
    where = ""

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        y = super().forward(batch)
        if self.where == "forward":
            raise KeyError("in forward")
        if self.where == "backward":
            y.register_hook(lambda g: self.fail(g))
        if self.where == "deep in backward":
            x = self.blocks[0](F.embedding(batch, self.embedding))
            x.register_hook(lambda g: self.fail(g))
            y = y + F.linear(self.blocks[1](x), self.head)
        return y

    def fail(self, _: torch.Tensor) -> None:
        raise KeyError("in backward")


def failing(comm: Communicator, strategy: str | int, where: str) -> float:
    inner = filled(Fails(2), comm.rank)
    model = wrapped(inner, comm, strategy, [OddBlock])
    optim = sgd(model.parameters())
    for step in range(2):
        inner.where = where
        with pytest.raises(KeyError):
            loss_of(model, words(comm.rank, 5)).backward()
        inner.where = ""
        optim.zero_grad()
        loss_of(model, words(comm.rank, step)).backward()
        optim.step()
    return difference(full_state(model), reference(filled(OddNet(2)), comm.world_size, 2, sgd)[0])


@every_strategy
@pytest.mark.parametrize("where", ["forward", "backward", "deep in backward"])
@world_sizes(2)
def test_training_goes_on_after_an_exception(run: Run, world_size: int, strategy: str | int, where: str) -> None:
    assert max(run(failing, strategy, where, n=world_size)) < 1e-10


def edited(comm: Communicator, stage: int, how: str) -> Any:
    model = fully_shard(filled(OddNet(1), comm.rank), comm, stage=stage)
    optim = sgd(model.parameters())
    p = model.embedding
    if how == "in place":
        with torch.no_grad():
            p.fill_(2.0)
    elif how == "data":
        p.data = torch.full_like(p, 2.0)
    elif how == "assign":
        model.embedding = nn.Parameter(torch.full_like(p, 2.0))
    elif how == "dtype":
        model.float()
    else:
        model.embedding = nn.Parameter(torch.full((WORDS + 1, WIDTH), 2.0))
    try:
        loss_of(model, words(comm.rank, 0)).backward()
    except ValueError as error:
        return str(error)
    assert model.embedding is p
    assert torch.equal(full_state(model)["embedding"], torch.full((WORDS, WIDTH), 2.0, dtype=torch.float64))
    optim.step()
    return not torch.equal(full_state(model)["embedding"], torch.full((WORDS, WIDTH), 2.0, dtype=torch.float64))


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("how", ["in place", "data", "assign"])
def test_edited_shards_count(run: Run, stage: int, how: str) -> None:
    assert run(edited, stage, how) == [True, True]


@pytest.mark.parametrize("how", ["dtype", "shape"])
def test_replaced_parameters_raise_by_name(run: Run, how: str) -> None:
    for message in run(edited, 3, how):
        assert "embedding" in message or "row" in message or "'" in message


def replaced(comm: Communicator, strategy: str | int) -> None:
    """A whole parameter in place of one that was wrapped: raises on every rank, and the model can be mended."""
    inner = filled(OddNet(1), comm.rank)
    model = wrapped(inner, comm, strategy, [OddBlock])
    before = inner.blocks[0].narrow
    inner.blocks[0].narrow = nn.Parameter(torch.ones(7, WIDTH, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"'blocks\.0\.narrow' was replaced after wrapping"):
        model(words(comm.rank, 0))
    inner.blocks[0].narrow = before
    if strategy in ("ddp", 0):
        expected, _ = reference(filled(OddNet(1)), comm.world_size, 2, adamw)
        assert difference(train(comm, model, 2, adamw)[0], expected) < 1e-10


@every_strategy
@world_sizes(2)
def test_d5_a_replaced_parameter_raises_by_name(run: Run, world_size: int, strategy: str | int) -> None:
    run(replaced, strategy, n=world_size)


def put_whole(comm: Communicator, stage: int, name: str, by_data: bool) -> str:
    """A whole parameter put in place of a shard: what the next forward said."""
    model = fully_shard(filled(OddNet(1), comm.rank), comm, stage=stage)
    p = model.get_parameter(name)
    whole = torch.full(p.full_shape, 2.0, dtype=torch.float64)
    if by_data:
        p.data = whole
    else:
        path, _, last = name.rpartition(".")
        setattr(model.get_submodule(path), last, nn.Parameter(whole))
    try:
        model(words(comm.rank, 0))
    except ValueError as error:
        return str(error)
    assert model.get_parameter(name) is p
    assert torch.equal(full_state(model)[name], whole)
    return "taken"


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("name", ["embedding", "blocks.0.bias", "blocks.0.scale"])
@world_sizes(1, 2, 3)
def test_d5_ranks_agree_on_a_parameter_that_was_replaced(run: Run, world_size: int, stage: int, name: str) -> None:
    """Also where one of them holds all of it, and cannot tell the whole from its shard."""
    assert run(put_whole, stage, name, True, n=world_size) == ["taken"] * world_size
    for found in run(put_whole, stage, name, False, n=world_size):
        if world_size == 1 and name != "embedding":
            assert found == "taken"
        else:
            assert f"{name!r} was replaced after wrapping" in found


def copied(comm: Communicator, strategy: str | int) -> None:
    model = wrapped(filled(OddNet(1)), comm, strategy)
    loss_of(model, words(comm.rank, 0)).backward()
    for copying in (copy.deepcopy, pickle.dumps):
        with pytest.raises(UnsupportedError, match=r"full_state_dict|\.module"):
            copying(model)
    if strategy == "ddp":
        twin = copy.deepcopy(model.module)
        assert difference(dict(twin.state_dict()), full_state(model)) == 0
        loss_of(twin, words(comm.rank, 1)).backward()


@every_strategy
@world_sizes(2)
def test_d15_copies_raise_and_say_what_to_copy(run: Run, world_size: int, strategy: str | int) -> None:
    run(copied, strategy, n=world_size)


def trained(comm: Communicator, strategy: str | int) -> list[weakref.ref[Any]]:
    model = wrapped(filled(OddNet(1)), comm, strategy, [OddBlock])
    optim = adamw(model.parameters())
    for step in range(2):
        loss_of(model, words(comm.rank, step)).backward()
        optim.step()
    full_state(model)
    return [weakref.ref(model), weakref.ref(unit_of(model).runtime), weakref.ref(next(model.parameters()))]


def deleted(comm: Communicator, strategy: str | int) -> list[bool]:
    watched = trained(comm, strategy)
    for turn in range(comm.world_size):  # a collection does nothing while another thread is at one
        comm.barrier()
        if turn == comm.rank:
            gc.collect()
    comm.barrier()
    return [ref() is None for ref in watched]


@every_strategy
@world_sizes(2)
def test_f29_a_deleted_model_is_gone(run: Run, world_size: int, strategy: str | int) -> None:
    assert run(deleted, strategy, n=world_size) == [[True] * 3] * world_size
