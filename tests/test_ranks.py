"""The harness itself: a rank that fails, hangs or dies fails the test, hangs none, and leaves no process behind."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from unittest import mock

import psutil
import pytest

from collectives import Communicator
from tests import ranks
from tests.ranks import POOLS, Call, Pool, run_ranks


def who(comm: Communicator) -> tuple[int, int, int]:
    return comm.rank, comm.world_size, os.getpid()


def world_of(comm: Communicator) -> int:
    return comm.world_size


def fails_on_rank_1(comm: Communicator) -> None:
    if comm.rank == 1:
        raise LookupError("planted")
    comm.barrier()


def hangs_on_rank_1(comm: Communicator) -> None:
    if comm.rank == 1:
        time.sleep(600)


def dies_on_rank_1(comm: Communicator) -> None:
    if comm.rank == 1:
        os._exit(86)
    comm.barrier()


PLANTED: list[tuple[Callable[[Communicator], None], type[Exception], str]] = [
    (fails_on_rank_1, LookupError, "planted"),
    (hangs_on_rank_1, TimeoutError, r"ranks \[1\] of 2 gave no answer"),
    (dies_on_rank_1, RuntimeError, "rank 1 died"),
]


@pytest.mark.parametrize(
    ("launcher", "backend", "fn", "error", "match"),
    [
        pytest.param(*start, *planted, marks=pytest.mark.full)
        for start in (("plain", "gloo"), ("mpirun", "mpi"))
        for planted in PLANTED
    ],
)
def test_a_planted_failure_ends_the_pool(
    fn: Callable[[Communicator], None], error: type[Exception], match: str, launcher: str, backend: str
) -> None:
    pool = Pool(launcher, 2)
    processes = [psutil.Process(pid) for pid in [*pool.pids, *(process.pid for process in pool.processes)]]
    assert [answer[:2] for answer in pool.run(Call(who, (), {}, backend), 60.0)] == [(0, 2), (1, 2)]
    with pytest.raises(error, match=match) as caught:
        pool.run(Call(fn, (), {}, backend), 3.0)
    assert pool.closed
    assert psutil.wait_procs(processes, timeout=10)[1] == []
    notes = "\n".join(getattr(caught.value, "__notes__", []))
    if fn is fails_on_rank_1:
        assert "rank 1 of 2" in notes
        assert "fails_on_rank_1" in notes
    if fn is hangs_on_rank_1:
        assert "in hangs_on_rank_1" in notes  # the stack of the rank that hangs


@pytest.mark.full
def test_a_pool_is_kept_and_replaced_after_a_failure() -> None:
    first = run_ranks(who, backend="gloo")
    assert run_ranks(who, backend="ring+gloo") == first
    with pytest.raises(LookupError, match="planted"):
        run_ranks(fails_on_rank_1, backend="gloo")
    second = run_ranks(who, backend="gloo")
    assert [answer[:2] for answer in second] == [(0, 2), (1, 2)]
    assert {pid for *_, pid in first}.isdisjoint(pid for *_, pid in second)


@pytest.mark.full
def test_a_call_that_is_interrupted_takes_its_pool() -> None:
    """As by a time-out of the test: otherwise the next call would be given the answers of this one."""
    with mock.patch.object(ranks, "wait", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        run_ranks(world_of, backend="gloo")
    assert [answer[:2] for answer in run_ranks(who, backend="gloo")] == [(0, 2), (1, 2)]


def test_a_closed_pool_has_left_by_itself() -> None:
    run_ranks(who, backend="gloo", world_size=2)
    pool = POOLS.get("plain", 2)
    assert pool.close() == ""
    assert [process.poll() for process in pool.processes] == [0, 0]
    assert not pool.folder.exists()


def test_threads_raise_the_first_failing_ranks_error() -> None:
    with pytest.raises(LookupError, match="planted"):
        run_ranks(fails_on_rank_1)
    assert [answer[:2] for answer in run_ranks(who, world_size=3)] == [(0, 3), (1, 3), (2, 3)]
