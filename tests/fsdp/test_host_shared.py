"""One copy of the gathered parameters a host: the same bits as private copies, whatever ranks do when."""

from __future__ import annotations

import contextlib
import gc
import random
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from collectives import Communicator
from collectives.backends.shared_buffer import HostBuffer
from collectives.backends.signals import Signals
from fsdp import MixedPrecisionPolicy, fully_shard
from fsdp.runtime import Runtime
from tests.fsdp.models import OddBlock, OddNet, State, filled, full_state, loss_of, same_bits, words
from tests.ranks import run_ranks

MODES = [True, "copy", "debug", False]


@contextlib.contextmanager
def delays(rank: int) -> Iterator[Callable[[], None]]:
    """Random pauses before every publish, read and retire; also to be called before anything else."""
    rng = random.Random(rank)

    def pause() -> None:
        if rng.random() < 0.05:
            time.sleep(rng.choice([1e-4, 1e-3]))

    def delayed(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            pause()
            return original(*args, **kwargs)

        return call

    targets = [(Signals, "publish"), (Signals, "announce"), (Signals, "headers"), (HostBuffer, "retire")]
    targets += [(HostBuffer, "fill"), (HostBuffer, "all_retired"), (HostBuffer, "wait_retired")]
    with contextlib.ExitStack() as stack:
        for owner, name in targets:
            stack.enter_context(mock.patch.object(owner, name, delayed(getattr(owner, name))))
        yield pause


def edit(step: int, parameters: list[nn.Parameter], average: list[torch.Tensor]) -> None:
    """What programs do to parameters between calls, in every way that leaves no trace in a version counter, too."""
    with torch.no_grad():
        for p, mean in zip(parameters, average, strict=True):
            mean.lerp_(p, 0.1)
            if step % 11 == 3:
                p.mul_(0.999)
            if step % 13 == 5:
                p.data.add_(1e-3)
            if step % 17 == 7 and p.numel():
                p.detach().numpy()[...] *= 1.001


def train(comm: Communicator, mode: Any, steps: int, stage: int, policy: MixedPrecisionPolicy | None) -> list[Any]:
    """Training with evaluation on averaged parameters and edits in between. The state, and what was seen on the way."""
    model = filled(OddNet(), comm.rank, torch.float32)
    fully_shard(model, comm, stage=stage, units=[OddBlock], mp_policy=policy, host_shared=mode)
    parameters = list(model.parameters())
    optim = torch.optim.AdamW(parameters, lr=1e-3, fused=True)
    average = [p.detach().clone() for p in parameters]
    seen = []
    with delays(comm.rank) as pause:
        for step in range(steps):
            pause()
            optim.zero_grad()
            loss = loss_of(model, words(comm.rank, step))
            loss.backward()
            pause()
            optim.step()
            pause()
            edit(step, parameters, average)
            seen.append(float(loss.detach()))
            if step % 7 == 6:
                seen += evaluate(model, parameters, average, words(comm.rank, step, 2), pause)
    return [full_state(model), seen]


def evaluate(
    model: nn.Module,
    parameters: list[nn.Parameter],
    average: list[torch.Tensor],
    batch: torch.Tensor,
    pause: Callable[[], None],
) -> list[float]:
    """The losses of the parameters and of their averages, swapped in and out."""
    losses = []
    with torch.no_grad():
        for _ in range(2):
            losses.append(float(loss_of(model, batch)))
            pause()
            for p, mean in zip(parameters, average, strict=True):
                kept = p.clone()
                p.copy_(mean)
                mean.copy_(kept)
            pause()
    return losses


def every_mode(comm: Communicator, steps: int, stage: int, dtype: torch.dtype | None) -> list[list[Any]]:
    policy = MixedPrecisionPolicy(param_dtype=dtype)
    return [train(comm, mode, steps, stage, policy) for mode in MODES]


@pytest.mark.parametrize(
    ("world_size", "stage", "dtype", "steps"),
    [
        (2, 3, None, 20),
        pytest.param(2, 3, None, 200, marks=pytest.mark.full),
        *(
            pytest.param(*case, 200, marks=pytest.mark.exhaustive)
            for case in [
                (2, 2, None),
                (3, 3, None),
                (4, 3, None),
                (3, 3, torch.bfloat16),
                (2, 1, torch.bfloat16),
                (2, 3, torch.float16),
            ]
        ),
    ],
)
def test_same_bits_as_private_copies(world_size: int, stage: int, dtype: torch.dtype | None, steps: int) -> None:
    for results in run_ranks(every_mode, steps, stage, dtype, world_size=world_size, backend="shm+gloo", timeout=150):
        private = results[MODES.index(False)]
        for mode, (state, seen) in zip(MODES, results, strict=True):
            assert seen == private[1], mode
            assert same_bits(state, private[0]), mode


def test_where_nothing_is_shared_the_modes_are_alike() -> None:
    expected = run_ranks(every_mode, 8, 3, None, backend="threads")[0]
    for state, seen in expected[1:]:
        assert seen == expected[0][1]
        assert same_bits(state, expected[0][0])


class Slow(nn.Module):
    """Computes late on one rank."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4096))
        self.late = rank == 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.2 if self.late else 0)
        return x * self.weight.sum()


def edit_at_once(comm: Communicator, settles: bool, backward: bool) -> float:
    """What this rank computes while the other, being done, edits its part."""
    model = fully_shard(Slow(comm.rank), comm)
    with mock.patch.object(Runtime, "_settle", Runtime._settle if settles else lambda runtime: None):
        x = torch.ones(1, requires_grad=backward)
        with torch.set_grad_enabled(backward):
            y = model(x)
            if backward:
                y.backward()
            for p in model.parameters():
                p.data.fill_(7.0)
    comm.barrier()
    return float(y)


@pytest.mark.parametrize("backward", [False, True])
def test_a_rank_may_edit_at_once_what_others_still_read(backward: bool) -> None:
    """Because its call returns only when they do not; without that wait this very test sees wrong values."""
    assert run_ranks(edit_at_once, True, backward, backend="shm+gloo") == [4096.0, 4096.0]
    if not backward:
        assert run_ranks(edit_at_once, False, backward, backend="shm+gloo")[1] > 4096.0


def memory(comm: Communicator, mode: Any) -> tuple[bool, int]:
    """Whether shards are parts of what is gathered, and how far apart the ranks' shards lie in one mapping."""
    model = fully_shard(filled(OddNet(), comm.rank, torch.float32), comm, units=[OddBlock], host_shared=mode)
    loss_of(model, words(comm.rank, 0)).backward()
    groups = [group for unit in model._fsdp_unit.runtime.units for group in unit.own_groups]  # type: ignore[union-attr]
    return all(group._unsharded.keeps_shard for group in groups), sum(g.shard.numel() for g in groups)


def test_shards_are_parts_of_the_one_copy() -> None:
    assert all(kept for kept, _ in run_ranks(memory, True, backend="shm+gloo"))
    assert not any(kept for kept, _ in run_ranks(memory, "copy", backend="shm+gloo"))
    assert not any(kept for kept, _ in run_ranks(memory, True, backend="gloo"))


def released(comm: Communicator) -> list[int]:
    """Bytes reserved in this rank's shared memory, after models have come and gone."""
    heap = comm._transport._neighbours.heap  # type: ignore[attr-defined]
    found = []
    for _ in range(4):
        model = fully_shard(filled(OddNet(), comm.rank, torch.float32), comm, units=[OddBlock])
        loss_of(model, words(comm.rank, 0)).backward()
        del model
        gc.collect()
        comm.barrier()
        heap.reserve(1)
        found.append(len(heap._sizes))
        comm.barrier()
    return found


def test_a_model_that_is_gone_leaves_no_shared_memory() -> None:
    for found in run_ranks(released, backend="shm+gloo"):
        assert found[3] - found[1] == 2  # the two pages reserved here


def state_of(comm: Communicator, mode: Any) -> State:
    model = fully_shard(filled(OddNet(), comm.rank, torch.float32), comm, units=[OddBlock], host_shared=mode)
    return full_state(model)


def test_whole_state() -> None:
    expected = dict(filled(OddNet(), 0, torch.float32).state_dict())
    for mode in MODES:
        for state in run_ranks(state_of, mode, world_size=3, backend="shm+gloo"):
            assert same_bits(state, expected), mode
