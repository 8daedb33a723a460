"""Estimates equal what is held; the peak is what stage 3 promises; units tell what they moved."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from collectives import Communicator
from fsdp import Estimate, estimate, fully_shard, unit_statistics
from fsdp.flat_layout import FlatLayout
from fsdp.unit import unit_of
from tests.fsdp.models import filled, loss_of, words, wrapped
from tests.fsdp.test_memory import WideBlock, WideNet
from tests.ranks import PRIVATE, Run, world_sizes

ITEM = 4


class Gpt(WideNet):
    """Twelve blocks, tied embedding and head, and a mask."""

    def __init__(self) -> None:
        super().__init__(12, 64)
        self.register_buffer("mask", torch.ones(40, 40))


def nbytes(tensors: Any) -> int:
    """Bytes of the storages of ``tensors``, each counted once."""
    found = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t is not None}
    return sum(found.values())


def held(model: nn.Module, optim: torch.optim.Optimizer, inner: nn.Module) -> dict[str, int]:
    """What this rank holds now, by kind."""
    runtime = unit_of(model).runtime
    moments = [v for state in optim.state.values() for v in state.values() if v.numel() > 1 or v.dim()]
    sharded = [g for g in runtime.groups if g.strategy.shards]
    lent = [*runtime.reducer._free, *(r.buffer for _, r in runtime.reducer._running)]
    landed = [r.output for _, r in (*runtime.reducer._landed, *runtime.reducer._running)]
    users = [managed.parameter for g in runtime.groups for managed in g.managed]  # modules may hold leaves just now
    grads = [p.grad.as_subclass(torch.Tensor) for p in users if p.grad is not None]
    whole = [leaf.grad for g in sharded for leaf in g.leaves]
    waiting = [g.post_forward.tensor for g in sharded if g.post_forward is not None]
    return {
        "parameters": nbytes([p.data for p in users]),
        "gathered": sum(g.full.untyped_storage().nbytes() for g in sharded) + nbytes(waiting),
        "gradients": nbytes([*grads, *landed, *whole, *lent]),
        "optimizer": nbytes(moments),
        "buffers": nbytes(inner.buffers()),
    }


def measured(comm: Communicator, stage: int, units: Any, **options: Any) -> tuple[dict[str, int], int]:
    """What is held between steps, and the most that is held in a step, looked at whenever a reduction starts."""
    inner = filled(Gpt(), comm.rank, torch.float32)
    model = fully_shard(inner, comm, stage=stage, units=units, **options)
    optim = torch.optim.AdamW(model.parameters())
    peak = 0

    def look(extra: int = 0) -> None:
        nonlocal peak
        peak = max(peak, sum(held(model, optim, inner).values()) + extra)

    runtime = unit_of(model).runtime
    for group in runtime.groups:
        start = group.gradients.start_reduction

        def starting(take_buffer: Any, first: bool, start: Any = start, group: Any = group) -> Any:
            before = nbytes(leaf.grad for leaf in group.leaves)
            reduction = start(take_buffer, first)
            runtime.reducer._running.append((group, reduction))
            look(before)
            runtime.reducer._running.pop()
            return reduction

        group.gradients.start_reduction = starting  # type: ignore[method-assign]
    for step in range(3):
        optim.zero_grad()
        loss_of(model, words(comm.rank, step)).backward()
        optim.step()
        if step == 0:
            peak = 0  # the optimizer had no state yet
    return held(model, optim, inner), peak


@PRIVATE
@pytest.mark.parametrize("units", [None, [WideBlock]], ids=["whole", "units"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@world_sizes(1, 4)
def test_memory_estimate_within_5_percent(run: Run, world_size: int, stage: int, units: Any) -> None:
    expected = estimate(Gpt(), stage, world_size, units=units)
    with torch.device("meta"):
        assert estimate(Gpt(), stage, world_size, units=units) == expected
    within_5_percent(expected, run(measured, stage, units, n=world_size))


def within_5_percent(expected: Estimate, found: list[tuple[dict[str, int], int]]) -> None:
    for rest, peak in found:
        assert expected.parameters == pytest.approx(rest["parameters"], rel=0.05)
        assert expected.gradients == pytest.approx(rest["gradients"], rel=0.05)
        assert expected.optimizer == pytest.approx(rest["optimizer"], rel=0.05)
        assert expected.buffers == rest["buffers"]
        assert expected.at_rest == pytest.approx(sum(rest.values()), rel=0.05)
        assert expected.peak == pytest.approx(peak, rel=0.05)


def measured_with(comm: Communicator, options: dict[str, Any]) -> tuple[dict[str, int], int]:
    return measured(comm, 3, [WideBlock], **options)


@PRIVATE
@pytest.mark.parametrize(
    "options",
    [
        {"reshard_after_forward": 2},
        {"reshard_after_forward": False},
        {"reshard_after_forward": True, "persistence_threshold": 11 * 64},
        {"reshard_after_forward": 2, "persistence_threshold": 64 * 40},
    ],
    ids=["pairs", "not freed", "small root", "all small"],
)
def test_memory_estimate_of_what_stays_gathered(run: Run, options: dict[str, Any]) -> None:
    within_5_percent(estimate(Gpt(), 3, 4, units=[WideBlock], **options), run(measured_with, options, n=4))


@PRIVATE
def test_peak_at_stage_3(run: Run) -> None:
    """At rest + root + 2 largest units + 1 unit's gradients + 1 reduce buffer."""
    sizes = {name: p.numel() * ITEM for name, p in Gpt().named_parameters()}
    root = sizes["embedding"]
    unit = max(sizes[f"blocks.{i}.up"] + sizes[f"blocks.{i}.down"] for i in range(12))
    padding = 26 * 16 * 4 * ITEM
    total = sum(sizes.values())
    for rest, peak in run(measured, 3, [WideBlock], n=4):
        assert total * 4 / 4 <= sum(rest.values()) - rest["buffers"] <= total * 4 / 4 + 4 * padding
        assert peak <= sum(rest.values()) + root + 2 * unit + unit + max(unit, root) + padding


def counted(comm: Communicator, stage: int) -> Any:
    model = wrapped(filled(Gpt(), comm.rank, torch.float32), comm, stage, [WideBlock])
    for step in range(2):
        loss_of(model, words(comm.rank, step)).backward()
    return unit_statistics(model)


@pytest.mark.parametrize("stage", [0, 1, 3])
@world_sizes(2)
def test_comm_statistics_of_each_unit(run: Run, world_size: int, stage: int) -> None:
    parts = world_size if stage else 1
    unit, root = (FlatLayout.even(n, parts).numel * ITEM for n in ([64 * 40] * 2, [11 * 64]))
    for found in run(counted, stage, n=world_size):
        assert list(found) == ["", *(f"blocks.{i}" for i in range(12))]
        for name, part in found.items():
            gathers = {0: 0, 1: 2, 3: 4 if name else 2}[stage]
            size = unit if name else root
            assert (part.gathers, part.reductions) == (gathers, 2)
            assert part.gathered_nbytes == gathers * size
            assert part.reduced_nbytes == 2 * size
            assert part.gather_wait >= 0
            assert part.reduction_wait > 0
