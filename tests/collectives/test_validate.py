"""With validate=True, ranks that call different things are told so before anything is sent, all of them alike."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import collectives
from collectives import Communicator, ReduceOp, conformance
from collectives.backends.threads import ThreadsBackend, World
from collectives.conformance.rank import Connect
from collectives.errors import CollectiveMismatchError, CommClosedError
from collectives.types import RankInfo
from tests.ranks import run_ranks


def factory(world_size: int) -> Connect:
    world = World(world_size)

    def connect(rank: int) -> Communicator:
        info = RankInfo(rank=rank, world_size=world_size, local_rank=rank, local_world_size=world_size)
        return Communicator(ThreadsBackend(world, rank), info, name="threads", timeout=10.0, validate=True)

    return connect


def test_the_contract_holds_with_validation() -> None:
    report = conformance.run(factory, 2, groups=["all_gather", "all_to_all", "objects", "work", "groups"])
    assert report.ok, str(report)


Calls = Callable[[Communicator], Any]
MISMATCHES: dict[str, tuple[Calls, list[str]]] = {
    "operation": (
        lambda c: c.barrier() if c.rank == 1 else c.all_reduce(torch.ones(4)),
        ["ranks 0, 2 called all_reduce (4 x float32, SUM)", "rank 1 called barrier"],
    ),
    "numel": (
        lambda c: c.all_reduce(torch.ones(4 + c.rank // 2)),
        ["ranks 0, 1 called all_reduce (4 x float32", "rank 2 called all_reduce (5 x float32"],
    ),
    "no elements": (
        lambda c: c.all_reduce(torch.ones(0 if c.rank == 0 else 4)),
        ["rank 0 called all_reduce (0 x float32", "ranks 1, 2 called all_reduce (4 x float32"],
    ),
    "dtype": (
        lambda c: c.all_gather(torch.zeros(6, dtype=DTYPES[c.rank]), torch.zeros(2, dtype=DTYPES[c.rank])),
        ["ranks 0, 2 called all_gather (6 x float32)", "rank 1 called all_gather (6 x int32)"],
    ),
    "reduce op": (
        lambda c: c.reduce(torch.ones(4), 0, ReduceOp.MAX if c.rank == 2 else ReduceOp.MIN),
        ["ranks 0, 1 called reduce (4 x float32, MIN, root 0)", "rank 2 called reduce (4 x float32, MAX, root 0)"],
    ),
    "root": (
        lambda c: c.broadcast(torch.ones(4), c.rank // 2),
        ["ranks 0, 1 called broadcast (4 x float32, root 0)", "rank 2 called broadcast (4 x float32, root 1)"],
    ),
    "algorithm": (
        lambda c: c.all_reduce(torch.ones(4), algorithm="ring" if c.rank == 0 else "direct"),
        ["rank 0 called", "by ring", "ranks 1, 2 called", "by direct"],
    ),
    "sizes": (
        lambda c: c.all_gather_v(torch.zeros(6), torch.ones(2), [2, 2, 2] if c.rank < 2 else [1, 3, 2]),
        ["rank 2 called all_gather (6 x float32)", "sizes [1, 3, 2]"],
    ),
    "splits": (
        lambda c: c.all_to_all(torch.zeros(3), torch.zeros(4), [1, 1, 1], [1, 1, 2]),
        ["rank 0 sends 2 elements to rank 2, which expects 1"],
    ),
}
DTYPES = [torch.float32, torch.int32, torch.float32]


def errors_of(comm: Communicator, name: str) -> str:
    call, _ = MISMATCHES[name]
    start = time.monotonic()
    try:
        call(comm)
    except CollectiveMismatchError as error:
        text = str(error)
    else:
        raise AssertionError("the mismatch went through")
    assert time.monotonic() - start < 5.0
    with pytest.raises(CommClosedError, match="earlier"):
        comm.barrier()
    return text


@pytest.mark.parametrize("name", MISMATCHES)
def test_a_mismatch_is_named_on_every_rank(name: str) -> None:
    connect = factory(3)
    for rank, text in enumerate(collectives.run(in_new_communicator, connect, name, n=3)):
        for words in MISMATCHES[name][1]:
            assert words in text, f"rank {rank}: {text}"


def in_new_communicator(comm: Communicator, connect: Connect, name: str) -> str:
    made = connect(comm.rank)
    assert isinstance(made, Communicator)
    return errors_of(made, name)


def in_another_communicator(comm: Communicator, backend: str) -> str:
    with collectives.init(backend, timeout=20.0, validate=True) as validated:
        total = torch.ones(5)
        validated.all_reduce(total)
        assert total.tolist() == [float(comm.world_size)] * 5
        group = validated.split(0)
        assert group is not None
        text = errors_of(group, "root") if comm.world_size == 3 else ""
        validated.barrier()  # the parent of a group that failed
        return text


@pytest.mark.parametrize(("backend", "world_size"), [("gloo", 3), pytest.param("mpi", 3, marks=pytest.mark.full)])
def test_init_takes_it_and_groups_inherit_it(backend: str, world_size: int) -> None:
    for text in run_ranks(in_another_communicator, backend, backend=backend, world_size=world_size):
        assert "rank 2 called broadcast (4 x float32, root 1)" in text


def sent(comm: Communicator) -> int:
    before = comm.stats().sent_bytes
    comm.all_reduce(torch.ones(4), algorithm="direct")
    return comm.stats().sent_bytes - before


def test_without_it_nothing_more_is_sent() -> None:
    assert run_ranks(sent, world_size=2) == [16, 16]
