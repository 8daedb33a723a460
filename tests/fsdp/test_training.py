"""Training equals one process, and strategies equal each other."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from collectives import Communicator
from fsdp import MixedPrecisionPolicy, fully_shard
from tests.fsdp.models import (
    STRATEGIES,
    OddBlock,
    OddNet,
    State,
    adamw,
    difference,
    filled,
    reference,
    same_bits,
    sgd,
    train,
    wrapped,
)
from tests.ranks import Run, grid, run_ranks, world_sizes

STEPS = 3
Results = dict[str, tuple[State, list[float]]]


def every_strategy(comm: Communicator, dtype: torch.dtype, optimizer: Any, max_norm: float | None = None) -> Results:
    """Each strategy, with and without units, from models that differ between ranks."""
    results = {}
    for strategy in STRATEGIES:
        for units in (None, [OddBlock]) if strategy != "ddp" else (None,):
            model = wrapped(filled(OddNet(), comm.rank, dtype), comm, strategy, units)
            results[f"{strategy}, {'units' if units else 'whole'}"] = train(comm, model, STEPS, optimizer, max_norm)
    return results


@grid(full=lambda backend, world_size: world_size > 3 or (backend != "threads" and world_size != 2))
def test_float64_equals_one_process(backend: str, world_size: int) -> None:
    expected, losses = reference(filled(OddNet()), world_size, STEPS, adamw)
    results = run_ranks(every_strategy, torch.float64, adamw, world_size=world_size, backend=backend)
    for name in results[0]:
        for rank in range(world_size):
            assert difference(results[rank][name][0], expected) < 1e-10, (name, rank)
            assert same_bits(results[rank][name][0], results[0][name][0]), (name, rank)
        for step in range(STEPS):
            mean = sum(results[rank][name][1][step] for rank in range(world_size)) / world_size
            assert mean == pytest.approx(losses[step], rel=1e-10), (name, step)


@grid(backends=["threads"], full=lambda backend, world_size: world_size not in (1, 3))
def test_float32_sgd_equals_one_process(backend: str, world_size: int) -> None:
    expected, _ = reference(filled(OddNet(), dtype=torch.float32), world_size, STEPS, sgd)
    results = run_ranks(every_strategy, torch.float32, sgd, world_size=world_size, backend=backend)
    for name, (state, _) in results[0].items():
        for key, value in expected.items():
            assert (state[key] - value).norm() <= 1e-6 * max(float(value.norm()), 1.0), (name, key)


@grid(backends=["threads"], full=lambda backend, world_size: world_size not in (1, 3))
def test_float32_adamw_losses_equal_one_process(backend: str, world_size: int) -> None:
    _, losses = reference(filled(OddNet(), dtype=torch.float32), world_size, STEPS, adamw)
    results = run_ranks(every_strategy, torch.float32, adamw, world_size=world_size, backend=backend)
    for name in results[0]:
        for step in range(STEPS):
            mean = sum(results[rank][name][1][step] for rank in range(world_size)) / world_size
            assert mean == pytest.approx(losses[step], rel=1e-5), (name, step)


@grid(["threads", "shm+gloo", "shm+mpi"], full=lambda backend, n: backend != "threads" or n not in (1, 3))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_stages_give_the_same_bits(run: Run, world_size: int, dtype: torch.dtype) -> None:
    """Where sums are in rank order: by the direct schedule, and in shared memory."""
    results = run(every_strategy, dtype, adamw, n=world_size)
    first, *others = results[0].values()
    expected, _ = reference(filled(OddNet(), dtype=dtype), world_size, STEPS, adamw)
    for state, losses in others:
        assert same_bits(state, first[0])
        assert losses == first[1]
    # N ranks are one process that runs N batches and divides; autograd adds the batches in rank order too.
    assert same_bits(first[0], expected)


@grid(threads=(), full=lambda backend, world_size: backend != "threads" or world_size in (1, 4))
def test_clip_global_norm_equals_one_process(backend: str, world_size: int) -> None:
    expected, _ = reference(filled(OddNet()), world_size, STEPS, sgd, max_norm=0.05)
    results = run_ranks(every_strategy, torch.float64, sgd, 0.05, world_size=world_size, backend=backend)
    for name, (state, _) in results[0].items():
        assert difference(state, expected) < 1e-10, name


def lowered(comm: Communicator, stage: int, policy: MixedPrecisionPolicy) -> tuple[State, list[float], set[str]]:
    model = fully_shard(
        filled(OddNet(), comm.rank, torch.float32), comm, stage=stage, units=[OddBlock], mp_policy=policy
    )
    seen = set()
    model.blocks[0].register_forward_pre_hook(lambda m, a: seen.update({str(a[0].dtype), str(m.wide.dtype)}))  # type: ignore[union-attr,operator]
    return *train(comm, model, STEPS, adamw), seen


@pytest.mark.parametrize("stage", [1, 2, 3])
@world_sizes(2)
def test_param_dtype_computes_low_and_keeps_float32(run: Run, world_size: int, stage: int) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    _, losses = reference(filled(OddNet(), dtype=torch.float32), world_size, STEPS, adamw)
    results = run(lowered, stage, policy, n=world_size)
    for state, _, seen in results:
        assert seen == {"torch.bfloat16"}
        assert all(value.dtype == torch.float32 for value in state.values())
        assert same_bits(state, results[0][0])
    for step in range(STEPS):
        assert sum(r[1][step] for r in results) / world_size == pytest.approx(losses[step], rel=2e-2)
