"""Several models at once, optimizers that step inside of backward, and second derivatives."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import nn

from collectives import Communicator
from collectives.errors import UnsupportedError
from fsdp import DistributedDataParallel
from tests.fsdp.models import OddBlock, OddNet, difference, filled, full_state, loss_of, reference, words, wrapped
from tests.ranks import Run, world_sizes

every_strategy = pytest.mark.parametrize("strategy", ["ddp", pytest.param(0, marks=pytest.mark.full), 1, 2, 3])


def steps_in_backward(comm: Communicator, strategy: str | int) -> float:
    """Each parameter has an optimizer of its own, which steps when its gradient is there and frees it."""
    model = wrapped(filled(OddNet(2), comm.rank), comm, strategy, [OddBlock])
    optims = {p: torch.optim.SGD([p], lr=0.1, momentum=0.9, weight_decay=0.01) for p in model.parameters()}

    def step(p: torch.Tensor) -> None:
        optims[p].step()
        optims[p].zero_grad()

    for p in optims:
        p.register_post_accumulate_grad_hook(step)
    for i in range(3):
        loss_of(model, words(comm.rank, i)).backward()
        assert all(p.grad is None for p in optims)
    expected, _ = reference(filled(OddNet(2)), comm.world_size, 3, lambda ps: torch.optim.SGD(
        ps, lr=0.1, momentum=0.9, weight_decay=0.01))  # fmt: skip
    return difference(full_state(model), expected)


@every_strategy
@world_sizes(3)
def test_step_in_backward_and_step_overlap(run: Run, world_size: int, strategy: str | int) -> None:
    assert max(run(steps_in_backward, strategy, n=world_size)) < 1e-10


def removed_hook(comm: Communicator, strategy: str | int) -> list[int]:
    """A hook that is registered late and removed again through its handle; under ``no_sync`` it waits."""
    model = wrapped(filled(Layer(), comm.rank), comm, strategy)
    p = next(model.parameters())
    calls: list[int] = []
    handle = p.register_post_accumulate_grad_hook(lambda _: calls.append(1))
    seen = []
    for quiet in (False, True, False):
        with model.no_sync() if quiet else contextlib.nullcontext():
            model(noise(comm.rank, 0)).sum().backward()
        seen.append(len(calls))
    handle.remove()
    model(noise(comm.rank, 0)).sum().backward()
    return [*seen, len(calls)]


@every_strategy
@world_sizes(2)
def test_hooks_run_once_a_reduction_and_can_be_removed(run: Run, world_size: int, strategy: str | int) -> None:
    kept = strategy in ("ddp", 0, 1)
    assert run(removed_hook, strategy, n=world_size) == [[1, 1, 2, 2] if kept else [1, 2, 3, 3]] * world_size


def wrapped_again(comm: Communicator) -> tuple[float, int]:
    """Whether a wrapper that is gone has been collected must not change what ranks send."""
    inner = filled(Layer(), comm.rank)
    first = DistributedDataParallel(inner, comm)
    second = DistributedDataParallel(inner, comm)
    before = comm.stats().operations["all_reduce"].calls
    x = noise(comm.rank, 0)
    second(x).sum().backward()
    with pytest.raises(UnsupportedError, match=r"inner\.weight.* was wrapped once more"):
        first(x)
    calls = comm.stats().operations["all_reduce"].calls - before
    plain = filled(Layer())
    for rank in range(comm.world_size):
        (plain(noise(rank, 0)).sum() / comm.world_size).backward()
    grads = zip(inner.parameters(), plain.parameters(), strict=True)
    return max(float((p.grad - q.grad).abs().max()) for p, q in grads), calls


@world_sizes(2)
def test_a_module_wrapped_again_belongs_to_the_later_wrapper(run: Run, world_size: int) -> None:
    expected = 1 + (world_size > 1)  # a bucket, and the flags, which one rank has nobody to tell
    assert all(worst < 1e-12 and calls == expected for worst, calls in run(wrapped_again, n=world_size))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 5)
        self.outer = nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(torch.tanh(self.inner(x)))


def noise(rank: int, step: int) -> torch.Tensor:
    return torch.sin(torch.arange(15.0, dtype=torch.float64).view(3, 5) * (step + 1) + rank)


def gan(comm: Communicator | None, strategy: str | int, ranks: int) -> Any:
    """A generator and a critic take turns; their units are on communicators of their own."""
    seed = 0 if comm is None else comm.rank
    plain = [filled(Layer(), seed), filled(Layer(), seed + 50 if comm is None else 50 + seed)]
    if comm is None:
        models: list[Any] = plain
    else:
        comms = [comm.split(0), comm.split(0)]
        models = [wrapped(m, c, strategy, [nn.Linear]) for m, c in zip(plain, comms, strict=True)]
    generator, critic = models
    optims = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
    for step in range(3):
        for turn in (0, 1):
            for optim in optims:
                optim.zero_grad()
            for rank in [comm.rank] if comm is not None else range(ranks):
                fake = generator(noise(rank, step))
                score = critic(fake).pow(2).mean() if turn == 0 else critic(fake.detach()).mean() - critic(
                    noise(rank, 9)).mean()  # fmt: skip
                (score / (1 if comm is not None else ranks)).backward()
            optims[turn].step()
    if comm is None:
        return [m.state_dict() for m in models]
    return [full_state(m) for m in models]


@every_strategy
@world_sizes(2)
def test_several_models_on_different_communicators(run: Run, world_size: int, strategy: str | int) -> None:
    expected = gan(None, strategy, world_size)
    for found in run(gan, strategy, world_size, n=world_size):
        for state, want in zip(found, expected, strict=True):
            assert difference(state, want) < 1e-10


class Penalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(1))
        self.b = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w * x**2 + self.b * x / x


def penalty(comm: Communicator) -> tuple[float, float]:
    model = DistributedDataParallel(Penalised(), comm)
    x = torch.tensor([[1.0], [3.0]][comm.rank], requires_grad=True)
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    slope.sum().backward()
    b = model.module.b.grad
    return float(model.module.w.grad), 0.0 if b is None else float(b)


def test_d13_double_backward_under_ddp(run: Run) -> None:
    assert run(penalty) == [(4.0, 0.0)] * 2


def refused(comm: Communicator, stage: int) -> None:
    model = wrapped(filled(Layer(), comm.rank), comm, stage, [nn.Linear])
    x = noise(comm.rank, 0).requires_grad_()
    with pytest.raises(UnsupportedError, match="create_graph"):
        torch.autograd.grad(model(x).sum(), x, create_graph=True)
    model(x).sum().backward()


@pytest.mark.parametrize("stage", [1, 2, 3])
@world_sizes(2)
def test_second_order_grads_raise_at_stages_1_to_3(run: Run, world_size: int, stage: int) -> None:
    run(refused, stage, n=world_size)
