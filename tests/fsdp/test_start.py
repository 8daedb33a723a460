"""What a model starts as: rank 0's parameters and buffers, of every dtype and the same shape on all ranks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from collectives import Communicator
from collectives.errors import UnsupportedError
from fsdp import DistributedDataParallel
from tests.fsdp.models import (
    OddNet,
    difference,
    every_strategy,
    filled,
    full_state,
    parameter,
    wrapped,
)  # fmt: skip
from tests.ranks import PROCESSES, Run, world_sizes


class Mixed(nn.Module):
    """0-dim, integer, and narrow parameters; buffers of three dtypes."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0 + rank))
        self.index = nn.Parameter(torch.tensor([1, 2, 3]) + rank, requires_grad=False)
        self.code = nn.Parameter(torch.tensor([7 + rank], dtype=torch.uint8), requires_grad=False)
        self.narrow = nn.Parameter(torch.full((5,), 1.0 + rank, dtype=torch.bfloat16))
        self.register_buffer("mean", torch.full((3,), float(rank)))
        self.register_buffer("count", torch.tensor(rank, dtype=torch.uint8))
        self.register_buffer("mask", torch.tensor([rank == 0, rank == 1]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.scale * self.index * self.code).sum() + self.narrow.float().sum() * self.mean.sum()


def mixed(comm: Communicator, strategy: str | int) -> None:
    model = wrapped(Mixed(comm.rank), comm, strategy)
    assert difference(full_state(model), dict(Mixed(0).state_dict())) == 0
    optim = torch.optim.SGD(model.parameters(), lr=0.5)
    model(torch.ones(3)).backward()
    optim.step()
    state = full_state(model)
    assert float(state["scale"]) == 2.0 - 0.5 * 6 * 7
    assert state["scale"].shape == ()
    assert state["index"].tolist() == [1, 2, 3]
    assert state["code"].dtype == torch.uint8


@every_strategy
@world_sizes(1, 2, 4)
def test_d19_f1_f11_all_dtypes_start_as_on_rank_0(run: Run, strategy: str | int, world_size: int) -> None:
    run(mixed, strategy, n=world_size)


class TwoDtypes(nn.Module):
    """A part of a unit whose parameters are in two groups."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.ones(5))
        self.narrow = nn.Parameter(torch.ones(5, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.wide + self.narrow.float()


def two_dtypes(comm: Communicator, strategy: str | int) -> None:
    inner = nn.Sequential(TwoDtypes(), TwoDtypes())
    model = wrapped(inner, comm, strategy)
    optim = torch.optim.SGD(model.parameters(), lr=1.0)
    model(torch.full((5,), comm.rank + 1.0)).sum().backward()
    if strategy not in ("ddp", 0):
        with pytest.raises(UnsupportedError, match="at rest"):
            inner[0](torch.ones(5))
    optim.step()
    state = {name: value.tolist() for name, value in full_state(model).items()}
    mean = (comm.world_size + 1) / 2
    assert state == {
        "0.wide": [1 - mean] * 5, "0.narrow": [0.0] * 5, "1.wide": [1 - (mean + 1)] * 5, "1.narrow": [0.0] * 5
    }  # fmt: skip


@every_strategy
@world_sizes(1, 3)
def test_mixed_orig_dtypes_in_a_bucket(run: Run, strategy: str | int, world_size: int) -> None:
    run(two_dtypes, strategy, n=world_size)


def different_shapes(comm: Communicator, strategy: str | int, what: str) -> str:
    model = filled(OddNet(1), dtype=torch.float32)
    if comm.rank == 1:
        if what == "shape":
            model.blocks[0].row = parameter(1, 8)
        elif what == "dtype":
            model.blocks[0].row.data = model.blocks[0].row.data.bfloat16()
        else:
            del model.head
    try:
        wrapped(model, comm, strategy)
    except ValueError as error:
        comm.barrier()  # the communicator stays usable
        return str(error)
    return ""


@every_strategy
@pytest.mark.parametrize(("what", "name"), [("shape", "row"), ("dtype", "row"), ("missing", "head")])
def test_init_sync_and_shape_check_raise_on_all_ranks(run: Run, strategy: str | int, what: str, name: str) -> None:
    messages = run(different_shapes, strategy, what, n=3)
    assert len(set(messages)) == 1
    assert name in messages[0]
    assert "rank 1" in messages[0]


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(1))
        self.register_buffer("buf", torch.zeros(1))
        self.step = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = self.buf.clone()
        self.buf = self.buf + self.step
        return self.w * x


def reassigned_buffer(comm: Communicator, strategy: str | int) -> float:
    inner = Counter()
    inner.step = comm.rank + 1.0
    model = wrapped(inner, comm, strategy)
    model(torch.ones(1))
    model(torch.ones(1))
    return float(inner.seen)


@every_strategy
@world_sizes(2)
def test_d7_buffers_that_are_reassigned_are_still_rank_0s(run: Run, world_size: int, strategy: str | int) -> None:
    assert run(reassigned_buffer, strategy, n=world_size) == [1.0] * world_size


def random_stream(comm: Communicator, strategy: str | int) -> bool:
    torch.manual_seed(comm.rank)
    nn.Linear(3, 3)
    expected = torch.rand(4)
    torch.manual_seed(comm.rank)
    wrapped(nn.Linear(3, 3), comm, strategy)
    return torch.equal(torch.rand(4), expected)


@every_strategy
@PROCESSES
@world_sizes(2)
def test_d17_wrapping_draws_no_random_numbers(run: Run, world_size: int, strategy: str | int) -> None:
    assert run(random_stream, strategy, n=world_size) == [True] * world_size


def own_buffers(comm: Communicator) -> float:
    inner = Counter()
    inner.step = comm.rank + 1.0
    model = DistributedDataParallel(inner, comm, broadcast_buffers=False, device_ids=[0])
    model(torch.ones(1))
    model(torch.ones(1))
    return float(inner.seen)


def test_buffers_stay_each_ranks_own_without_broadcast_buffers(run: Run) -> None:
    assert run(own_buffers) == [1.0, 2.0]
