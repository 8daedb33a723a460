"""Whole parameters between steps; methods other than forward; what stays out of reach says so."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from collectives import Communicator
from collectives.errors import UnsupportedError
from fsdp import fully_shard, register_fsdp_forward_method, summon_full_params
from fsdp.param_group import Storage
from fsdp.unit import unit_of
from tests.fsdp.models import (
    WIDTH,
    OddBlock,
    OddNet,
    adamw,
    difference,
    filled,
    full_state,
    loss_of,
    reference,
    train,
    words,
    wrapped,
)  # fmt: skip
from tests.ranks import Run, grid, run_ranks, world_sizes

stages = pytest.mark.parametrize("stage", [0, 1, pytest.param(2, marks=pytest.mark.full), 3])


def summoned(comm: Communicator, stage: int) -> None:
    model = fully_shard(filled(OddNet(2), comm.rank), comm, stage=stage, units=[OddBlock])
    expected = dict(filled(OddNet(2)).state_dict())
    held = dict(model.named_parameters())
    loss_of(model, words(comm.rank, 0)).backward()
    grads = {name: p.grad for name, p in held.items()}
    with summon_full_params(model):
        assert dict(model.named_parameters()) == held
        assert all(torch.equal(p, expected[name]) for name, p in held.items())
        assert list(model.state_dict()) == list(expected)
        with torch.no_grad():
            held["blocks.0.wide"].fill_(0.0)
            model.blocks[1].row.data = torch.full((1, 7), 5.0, dtype=torch.float64)
            model.head.mul_(2.0)
    assert all(p.grad is grads[name] for name, p in held.items())
    with torch.no_grad():
        expected["blocks.0.wide"].fill_(0.0)
        expected["blocks.1.row"].fill_(5.0)
        expected["head"].mul_(2.0)
    assert difference(full_state(model), expected) == 0
    with summon_full_params(model, writeback=False), torch.no_grad():
        for p in model.parameters():
            p.add_(0.0 if stage == 0 else 1.0)
    assert difference(full_state(model), expected) == 0
    if stage:
        assert all(g.storage is Storage.FREED for g in unit_of(model).runtime.groups)
        with pytest.raises(UnsupportedError):
            model.state_dict()


@grid(threads=(), full=lambda backend, n: backend != "threads")
@stages
def test_full_params_view_summon_full_params(backend: str, world_size: int, stage: int) -> None:
    run_ranks(summoned, stage, world_size=world_size, backend=backend)


def trained_after(comm: Communicator, stage: int) -> float:
    """Gradients seen whole, changed, and stepped on; then training goes on."""
    model = fully_shard(filled(OddNet(2), comm.rank), comm, stage=stage, units=[OddBlock])
    plain = filled(OddNet(2))
    optims = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
    for step in range(2):
        for rank in range(comm.world_size):
            (loss_of(plain, words(rank, step)) / comm.world_size).backward()
        loss_of(model, words(comm.rank, step)).backward()
        with summon_full_params(model, with_grads=True):
            worst = max(
                float((p.grad - q.grad).abs().max())
                for p, q in zip(model.parameters(), plain.parameters(), strict=True)
            )
            assert worst < 1e-12
            for p in model.parameters():
                p.grad.mul_(3.0)
        for p in plain.parameters():
            p.grad.mul_(3.0)
        for optim in optims:
            optim.step()
            optim.zero_grad()
    return difference(full_state(model), dict(plain.state_dict()))


@stages
@world_sizes(3)
def test_summon_with_grads(run: Run, world_size: int, stage: int) -> None:
    assert max(run(trained_after, stage, n=world_size)) < 1e-12


def edit_on_rank_0(comm: Communicator, model: nn.Module, fails: bool) -> None:
    shard = model.head.shape
    with summon_full_params(model, rank0_only=True), torch.no_grad():
        if comm.rank != 0:
            assert model.head.shape == shard
            return
        assert model.head.shape == model.head.full_shape
        model.head.fill_(7.0)
        if fails:
            raise KeyError("rank 0 fails")


def rank_0_edits(comm: Communicator, stage: int, fails: bool) -> float:
    model = fully_shard(filled(OddNet(1), comm.rank), comm, stage=stage)
    errors = [KeyError, RuntimeError, RuntimeError]
    with pytest.raises(errors[comm.rank], match="rank 0 fails") if fails else contextlib.nullcontext():
        edit_on_rank_0(comm, model, fails)
    return float((full_state(model)["head"] - 7.0).abs().max())


@pytest.mark.parametrize("fails", [False, True])
def test_summon_rank0_only(run: Run, fails: bool) -> None:
    assert all((worst > 0) is fails for worst in run(rank_0_edits, 3, fails, n=3))


class Three(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.arange(1.0, 4.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w * x


def edit_and_fail(model: nn.Module) -> None:
    with summon_full_params(model):
        model.w.data.fill_(9.0)
        raise KeyError("inside")


def f19(comm: Communicator, stage: int) -> None:
    model = fully_shard(Three(), comm, stage=stage)
    with pytest.raises(KeyError):
        edit_and_fail(model)
    assert model.w.numel() == (3 if comm.rank == 0 else 0)
    assert full_state(model)["w"].tolist() == [1.0, 2.0, 3.0]
    with pytest.raises(ValueError, match="'w' was replaced"), summon_full_params(model):
        model.w.data = torch.zeros(4)
    assert full_state(model)["w"].tolist() == [1.0, 2.0, 3.0]
    with summon_full_params(model):
        model.w.data = torch.full((3,), 4.0)
    assert full_state(model)["w"].tolist() == [4.0] * 3
    with summon_full_params(model), torch.no_grad():
        model.w.fill_(0.0)
    assert full_state(model)["w"].tolist() == [0.0] * 3
    model(torch.ones(3)).sum().backward()


@pytest.mark.parametrize("stage", [1, 3])
@world_sizes(2)
def test_f19_edits_inside_summon_full_params(run: Run, world_size: int, stage: int) -> None:
    run(f19, stage, n=world_size)


def own_lengths(comm: Communicator, stage: int) -> None:
    """Each rank runs its own number of forwards inside."""
    model = fully_shard(filled(OddNet(2), comm.rank), comm, stage=stage, units=[OddBlock])
    plain = filled(OddNet(2))
    with summon_full_params(model, writeback=False), torch.no_grad():
        for step in range(1 + 2 * comm.rank):
            assert torch.equal(model(words(comm.rank, step)), plain(words(comm.rank, step)))
    if stage:
        with pytest.raises(UnsupportedError, match="no_grad"), summon_full_params(model):
            model(words(0, 0))
    expected, _ = reference(filled(OddNet(2)), comm.world_size, 2, adamw)
    assert difference(train(comm, model, 2, adamw)[0], expected) < 1e-10


@stages
@world_sizes(2)
def test_f23_forwards_on_whole_parameters_need_no_partners(run: Run, world_size: int, stage: int) -> None:
    run(own_lengths, stage, n=world_size)


# Methods other than forward


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Linear(WIDTH, WIDTH)
        self.weight = nn.Parameter(torch.zeros(WIDTH))

    def features(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.block(x)) * self.weight

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.block(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.features(x) + x


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder()
        self.head = nn.Linear(WIDTH, 1)
        self.how = "features"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(getattr(self.encoder, self.how)(x) + self.encoder(x))


def rows(rank: int) -> torch.Tensor:
    return torch.sin(torch.arange(30, dtype=torch.float64).view(2, WIDTH) + rank).requires_grad_()


def registered(comm: Communicator, stage: int) -> None:
    model = fully_shard(filled(Model(), comm.rank), comm, stage=stage, units=[Encoder])
    if stage:
        for how in ("features", "encode"):
            model.how = how
            with pytest.raises(UnsupportedError, match="register_fsdp_forward_method"):
                model(rows(0))
            with pytest.raises(UnsupportedError, match="register_fsdp_forward_method"):
                getattr(model.encoder, how)(rows(0))
    register_fsdp_forward_method(model.encoder, "features")
    register_fsdp_forward_method(model.encoder, "encode")
    plain = filled(Model())
    assert torch.allclose(model.encoder(rows(0)), plain.encoder(rows(0)))  # before the root ever ran
    for how in ("features", "encode"):
        model.how = plain.how = how
        for m in (model, plain):
            m.zero_grad()
        for rank in range(comm.world_size):
            (plain(rows(rank)).sum() / comm.world_size).backward()
        model(rows(comm.rank)).sum().backward()
        with summon_full_params(model, with_grads=True):
            for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
                assert (p.grad is None) == (q.grad is None), name
                assert p.grad is None or torch.allclose(p.grad, q.grad, rtol=0, atol=1e-12), name


@stages
@world_sizes(2)
def test_f17_non_forward_methods(run: Run, world_size: int, stage: int) -> None:
    run(registered, stage, n=world_size)


class Keeps(OddBlock):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.__dict__["kept"] = self.wide
        return super().forward(x)


def kept(comm: Communicator) -> None:
    model = fully_shard(filled(nn.Sequential(Keeps(), Keeps()), comm.rank), comm, units=[Keeps])
    y = model(rows(comm.rank))
    for block in model:
        assert block.kept.shape == (16, WIDTH)
        assert bool(block.kept.isnan().all())
    y.sum().backward()
    assert all(bool(p.grad.as_subclass(torch.Tensor).isfinite().all()) for p in model.parameters())


@world_sizes(2)
def test_a_parameter_kept_beyond_its_unit_reads_nan(run: Run, world_size: int) -> None:
    run(kept, n=world_size)


# Setters


def gather_calls(comm: Communicator) -> int:
    found = comm.stats().operations.get("all_gather")
    return found.calls if found else 0


def setters(comm: Communicator) -> None:
    def gathers(model: nn.Module, quiet: bool = False) -> int:
        before = gather_calls(comm)
        model.set_requires_gradient_sync(not quiet)  # type: ignore[operator]
        loss_of(model, words(comm.rank, 0)).backward()
        return gather_calls(comm) - before

    model = fully_shard(filled(OddNet(3), comm.rank), comm, units=[OddBlock])
    assert gathers(model) == gathers(model) == 7
    model.set_reshard_after_forward(False)
    assert gathers(model) == 4
    model.set_reshard_after_forward(True, recurse=False)
    assert gathers(model) == 5
    model.set_reshard_after_forward(True)
    model.set_reshard_after_backward(False)
    assert gathers(model, quiet=True) == 8
    model.set_reshard_after_forward(False)
    assert gathers(model, quiet=True) == 0
    assert gathers(model) == 0
    assert gathers(model) == 4  # an optimizer step may have come between
    model.set_reshard_after_backward(True)
    for block in model.blocks:
        handle = block.unshard(async_op=True)
        handle.wait()
    model.unshard()
    before = gather_calls(comm)
    model(words(comm.rank, 0))
    assert gather_calls(comm) == before
    model.reset_iter_state()


@world_sizes(2)
def test_reshard_after_forward_and_backward_setters_and_unshard(run: Run, world_size: int) -> None:
    run(setters, n=world_size)


class Lookup(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(11, WIDTH))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return F.embedding(batch, self.weight)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lookup = Lookup()
        self.block = OddBlock()
        self.head = nn.Parameter(torch.zeros(11, WIDTH))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return F.linear(self.block(self.lookup(batch)), self.head)


def not_in_backward(comm: Communicator) -> tuple[int, float]:
    model = fully_shard(filled(Net(), comm.rank), comm, units=[Lookup, OddBlock])
    model.lookup.set_unshard_in_backward(False)
    before = gather_calls(comm)
    loss_of(model, words(comm.rank, 0)).backward()
    calls = gather_calls(comm) - before
    model.zero_grad()
    return calls, difference(train(comm, model, 3, adamw)[0], reference(filled(Net()), comm.world_size, 3, adamw)[0])


@world_sizes(2)
def test_skip_all_gather_in_backward_set_unshard_in_backward(run: Run, world_size: int) -> None:
    for calls, worst in run(not_in_backward, n=world_size):
        assert calls == 4
        assert worst < 1e-10


def divided(comm: Communicator, stage: int) -> list[float]:
    model = fully_shard(Three(), comm, stage=stage)
    model.set_gradient_divide_factor(1.0)
    model(torch.full((3,), comm.rank + 1.0)).sum().backward()
    with summon_full_params(model, with_grads=True):
        return model.w.grad.tolist()


@stages
@world_sizes(3)
def test_divisor_set_gradient_divide_factor(run: Run, world_size: int, stage: int) -> None:
    total = world_size * (world_size + 1) / 2
    assert run(divided, stage, n=world_size) == [[total] * 3] * world_size


class Interrupt(BaseException):
    """Not an Exception: torch's hooks that are always called are not called after it."""


class Fails(OddNet):
    where = ""

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        x = F.embedding(batch, self.embedding)
        for i, block in enumerate(self.blocks):
            x = block(x)
            if i == 0 and self.where == "forward":
                raise Interrupt
            if i == 0 and self.where == "backward":
                x.register_hook(self.fail)
        return F.linear(x, self.head)

    def fail(self, _: torch.Tensor) -> None:
        raise KeyError


def recovered(comm: Communicator, strategy: str | int, where: str) -> float:
    inner = filled(Fails(3), comm.rank)
    model = wrapped(inner, comm, strategy, [OddBlock])
    inner.where = where
    with pytest.raises((Interrupt, KeyError)):
        loss_of(model, words(comm.rank, 5)).backward()
    model.reset_iter_state()
    assert all(g.storage is Storage.FREED and not g.users for g in unit_of(model).runtime.groups)
    inner.where = ""
    return difference(train(comm, model, 2, adamw)[0], reference(filled(OddNet(3)), comm.world_size, 2, adamw)[0])


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("stage", [1, 3])
@world_sizes(2)
def test_error_recovery_reset_iter_state(run: Run, world_size: int, stage: int, where: str) -> None:
    assert max(run(recovered, stage, where, n=world_size)) < 1e-10
