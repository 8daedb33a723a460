"""Which gradients come out: accumulation, unused parameters, modules used twice, checkpointing. By hand."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from collectives import Communicator
from fsdp.fsdp_module import no_sync
from fsdp.unit import unit_of
from tests.fsdp.models import OddBlock, OddNet, difference, filled, full_state, loss_of, words, wrapped
from tests.ranks import Run, world_sizes

# Stage 0 does what DDP does, in place.
pytestmark = pytest.mark.parametrize(
    "strategy", ["ddp", *(pytest.param(stage, marks=pytest.mark.full) for stage in (0, 1)), 2, 3]
)
Grads = dict[str, torch.Tensor | None]


def gradients(comm: Communicator, model: nn.Module) -> Grads:
    """Whole gradients by name; None where a parameter has none."""
    found: Grads = {}
    for unit in unit_of(model).runtime.units:
        for group in unit.own_groups:
            for i, managed in enumerate(group.managed):
                grad = managed.parameter.grad
                if grad is None:
                    found[managed.name] = None
                    continue
                whole = torch.zeros(group.shapes[i].numel(), dtype=grad.dtype)
                if group.strategy.shards:
                    piece = group.layout.pieces(comm.rank)[i]
                    whole[piece.start : piece.start + piece.numel] = grad.as_subclass(torch.Tensor).reshape(-1)
                    comm.all_reduce(whole)
                else:
                    whole = grad.reshape(-1).clone()
                found[managed.name] = whole.view(group.shapes[i])
    return {name: found[name] for name in sorted(found)}


class Scale(nn.Module):
    """y = w x for one number w."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([3.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w * x


class Two(nn.Module):
    """Uses a, or b, or both, or neither."""

    def __init__(self) -> None:
        super().__init__()
        self.a = Scale()
        self.b = Scale()
        self.free = nn.Parameter(torch.tensor([1.0]))

    def forward(self, x: torch.Tensor, use: str) -> torch.Tensor:
        y = x * self.free if "f" in use else x
        for name in use:
            if name in "ab":
                y = getattr(self, name)(y)
        return y


def values(grads: Grads) -> dict[str, float | None]:
    return {name: None if g is None else float(g) for name, g in grads.items()}


def unsynced_use(comm: Communicator, strategy: str | int) -> Grads:
    model = wrapped(Two(), comm, strategy)
    with no_sync(unit_of(model).runtime):
        model(torch.tensor([[1.0, 3.0][comm.rank]]), "a").sum().backward()
    model(torch.tensor([[5.0, 7.0][comm.rank]]), "b").sum().backward()
    return gradients(comm, model)


def test_d1_a_layer_used_only_without_sync_is_reduced(run: Run, strategy: str | int) -> None:
    for grads in run(unsynced_use, strategy):
        assert values(grads) == {"a.w": 2.0, "b.w": 6.0, "free": None}


def momentum_steps(comm: Communicator | None, strategy: str | int, uses: list[str]) -> list[dict[str, Any]]:
    model: nn.Module = Two()
    if comm is not None:
        model = wrapped(model, comm, strategy)
    optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    seen = []
    for use in uses:
        optim.zero_grad()
        y = model(torch.tensor([4.0], requires_grad=True), use)
        y.sum().backward()
        grads = gradients(comm, model) if comm is not None else {n: p.grad for n, p in model.named_parameters()}
        seen.append({**{n: None if g is None else float(g) for n, g in grads.items()}})
        optim.step()
    state = full_state(model) if comm is not None else model.state_dict()
    seen.append({name: float(value) for name, value in state.items()})
    return seen


@world_sizes(2)
def test_d3_unused_params_that_nobody_used_do_not_move(run: Run, world_size: int, strategy: str | int) -> None:
    expected = momentum_steps(None, strategy, ["ab", "a", "ab"])
    assert expected[1]["b.w"] is None
    for seen in run(momentum_steps, strategy, ["ab", "a", "ab"], n=world_size):
        for got, want in zip(seen, expected, strict=True):
            assert got.keys() == want.keys()
            for name, value in want.items():
                assert got[name] is None if value is None else got[name] == pytest.approx(value), name


def used_on_rank_0(comm: Communicator, strategy: str | int) -> Grads:
    model = wrapped(Two(), comm, strategy)
    x = torch.tensor([4.0], requires_grad=True)
    model(x, "fb" if comm.rank == 0 else "f").sum().backward()
    return gradients(comm, model)


def test_d3_unused_params_that_one_rank_used_are_averaged(run: Run, strategy: str | int) -> None:
    for grads in run(used_on_rank_0, strategy):
        assert values(grads) == {"a.w": None, "b.w": 2.0, "free": (3.0 * 4 + 4) / 2}


class Reused(nn.Module):
    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.layer = OddBlock()
        self.other = OddBlock()
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (self.layer, self.other, self.layer):
            x = layer(x) if self.reentrant is None else checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


def rows(rank: int) -> torch.Tensor:
    return torch.sin(torch.arange(45, dtype=torch.float64).view(3, 15) + rank).requires_grad_()


def reused(comm: Communicator, strategy: str | int, reentrant: bool | None, units: bool) -> Grads:
    model = wrapped(filled(Reused(reentrant), comm.rank), comm, strategy, [OddBlock] if units else None)
    for _ in range(2):
        model.zero_grad()
        model(rows(comm.rank)).pow(2).sum().backward()
    return gradients(comm, model)


@pytest.mark.parametrize("units", [False, True], ids=["whole", "units"])
@pytest.mark.parametrize("reentrant", [None, True, False], ids=["plain", "reentrant", "non-reentrant"])
@world_sizes(2)
def test_d9_activation_checkpoint_of_a_module_used_twice(
    run: Run, world_size: int, strategy: str | int, reentrant: bool | None, units: bool
) -> None:
    model = filled(Reused(None))
    for rank in range(world_size):
        (model(rows(rank)).pow(2).sum() / world_size).backward()
    expected = {n: p.grad for n, p in model.named_parameters()}
    for grads in run(reused, strategy, reentrant, units, n=world_size):
        for name, want in expected.items():
            assert (grads[name] - want).abs().max() < 1e-12, name


def forwards_first(comm: Communicator, strategy: str | int, order: str) -> Grads:
    model = wrapped(Scale(), comm, strategy)
    first, second = [(1.0, 2.0), (3.0, 4.0)][comm.rank]
    a, b = model(torch.tensor([first], requires_grad=True)), model(torch.tensor([second], requires_grad=True))
    if order == "sum":
        (a + b).sum().backward()
    else:
        for y in (a, b) if order == "ab" else (b, a):
            y.sum().backward()
    return gradients(comm, model)


@pytest.mark.parametrize("order", ["ab", "ba", "sum"])
def test_f5_repeated_forward_before_backward(run: Run, strategy: str | int, order: str) -> None:
    for grads in run(forwards_first, strategy, order):
        assert values(grads) == {"w": 5.0}


def retained(comm: Communicator, strategy: str | int) -> Grads:
    model = wrapped(Scale(), comm, strategy)
    y = model(torch.tensor([[1.0, 3.0][comm.rank]], requires_grad=True))
    y.sum().backward(retain_graph=True)
    (2 * y).sum().backward()
    return gradients(comm, model)


def test_f5_a_graph_used_twice(run: Run, strategy: str | int) -> None:
    for grads in run(retained, strategy):
        assert values(grads) == {"w": 6.0}


def accumulated(comm: Communicator, strategy: str | int, pattern: str, units: bool) -> Grads:
    """Four micro-steps: plain, without sync but for the last, by the switch, or mixed."""
    model = wrapped(filled(OddNet(2), comm.rank), comm, strategy, [OddBlock] if units else None)
    for step in range(8):
        if step == 4:
            model.zero_grad()
        quiet = {"plain": False, "no_sync": step % 4 < 3, "mixed": step % 4 in (0, 2)}[pattern]
        with no_sync(unit_of(model).runtime) if quiet else contextlib.nullcontext():
            loss_of(model, words(comm.rank, step)).backward()
    return gradients(comm, model)


@pytest.mark.parametrize("units", [False, True], ids=["whole", "units"])
@pytest.mark.parametrize("pattern", ["plain", "no_sync", "mixed"])
@world_sizes(3)
def test_accumulate_with_and_without_sync_gives_the_same_gradients(
    run: Run, world_size: int, strategy: str | int, pattern: str, units: bool
) -> None:
    model = filled(OddNet(2))
    for step in range(4, 8):
        for rank in range(world_size):
            (loss_of(model, words(rank, step)) / world_size).backward()
    expected = {n: p.grad for n, p in model.named_parameters()}
    for grads in run(accumulated, strategy, pattern, units, n=world_size):
        assert all((grads[n] - g).abs().max() < 1e-12 for n, g in expected.items())


def zeroed(comm: Communicator, strategy: str | int, where: str) -> Grads:
    model = wrapped(filled(OddNet(2), comm.rank), comm, strategy)
    optim = torch.optim.SGD(model.parameters(), lr=0.0)
    for step in range(3):
        if where == "before":
            optim.zero_grad()
        loss = loss_of(model, words(comm.rank, step))
        if where == "between, by the model":
            model.zero_grad()
        if where == "between, to zero":
            optim.zero_grad(set_to_none=False)
        loss.backward()
        optim.step()
        if where == "after" and step < 2:
            optim.zero_grad()
    return gradients(comm, model)


@pytest.mark.parametrize("where", ["before", "between, by the model", "between, to zero", "after"])
@world_sizes(2)
def test_zero_grad_anywhere(run: Run, world_size: int, strategy: str | int, where: str) -> None:
    model = filled(OddNet(2))
    for rank in range(world_size):
        (loss_of(model, words(rank, 2)) / world_size).backward()
    for grads in run(zeroed, strategy, where, n=world_size):
        assert all((grads[n] - p.grad).abs().max() < 1e-12 for n, p in model.named_parameters())


def frozen(comm: Communicator, strategy: str | int) -> tuple[dict[str, bool], float, list[tuple[str, bool]]]:
    """Half of every block is frozen; then one part is thawed and another frozen."""
    model = filled(OddNet(2), comm.rank)
    for name, p in model.named_parameters():
        p.requires_grad_("narrow" in name or "scale" in name)
    model = wrapped(model, comm, strategy, [OddBlock])
    before = full_state(model)
    named = dict(model.named_parameters())
    optim = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
    for step in range(4):
        if step == 2:
            for name, p in named.items():
                if "wide" in name:
                    p.requires_grad_(True)
                if "scale" in name:
                    p.requires_grad_(False)
                    p.grad = None
        optim.zero_grad()
        loss_of(model, words(comm.rank, step)).backward()
        optim.step()
    after = full_state(model)
    moved = {name: not torch.equal(before[name], after[name]) for name in before}
    return (
        moved,
        difference(after, frozen_reference(comm.world_size)),
        [(n, p.grad is not None) for n, p in named.items()],
    )


def frozen_reference(world_size: int) -> dict[str, torch.Tensor]:
    model = filled(OddNet(2))
    for name, p in model.named_parameters():
        p.requires_grad_("narrow" in name or "scale" in name)
    optim = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
    for step in range(4):
        if step == 2:
            for name, p in model.named_parameters():
                if "wide" in name:
                    p.requires_grad_(True)
                if "scale" in name:
                    p.requires_grad_(False)
        optim.zero_grad()
        for rank in range(world_size):
            (loss_of(model, words(rank, step)) / world_size).backward()
        optim.step()
    return model.state_dict()


@world_sizes(3)
def test_d5_frozen_parameters_stay_and_thawed_ones_train(run: Run, world_size: int, strategy: str | int) -> None:
    for moved, difference_to_one_process, has_grad in run(frozen, strategy, n=world_size):
        assert {name.split(".")[-1] for name, did in moved.items() if did} == {"narrow", "scale", "wide"}
        assert difference_to_one_process < 1e-10
        assert all(has == ("narrow" in name or "wide" in name) for name, has in has_grad)


def hooked(comm: Communicator, strategy: str | int) -> tuple[int, float]:
    model = wrapped(Scale(), comm, strategy)
    calls = []
    (p,) = model.parameters()
    p.register_hook(lambda g: calls.append(g.numel()) or 10 * g)  # type: ignore[func-returns-value]
    model(torch.tensor([[1.0, 3.0][comm.rank]], requires_grad=True)).sum().backward()
    return len(calls), float(gradients(comm, model)["w"])


def test_user_gradient_hooks_run_once(run: Run, strategy: str | int) -> None:
    assert run(hooked, strategy) == [(1, 20.0)] * 2
