"""Checks of how a communicator ends badly. They use groups that are split off, so that it survives them."""

from __future__ import annotations

import threading
import time
from functools import partial

import torch

from collectives.communicator import Communicator
from collectives.conformance.case import Case, Check, raises, require, still_works
from collectives.errors import CommClosedError, CommError, CommTimeoutError
from collectives.types import ReduceOp, Work

_LIMIT = 0.6  # the time-out that is tried
_SHORT = 0.3  # where it does not matter how it ends
_SLACK = 3.0  # how much later than that a call may raise on a busy machine


def check_timeout(comm: Communicator, case: Case) -> None:
    """One rank never comes: the others raise at their call's time-out, not before and not much later."""
    w, r = comm.world_size, comm.rank
    if w == 1:
        return
    absent = (case.seed + 1) % w
    for asynchronous in (False, True):
        group = comm.split(0)
        assert group is not None
        still_works(group)
        if r != absent:
            start = time.monotonic()
            try:
                value = torch.ones(3000, device=comm.device)
                if asynchronous:
                    second: list[Work] = []
                    work = group.all_reduce(value, async_op=True, timeout=60.0)
                    second.append(group.all_reduce(torch.ones(5, device=comm.device), async_op=True))
                    work.wait(_LIMIT)
                else:
                    group.all_reduce(value, timeout=_LIMIT)
            except CommError as error:
                _judge(error, time.monotonic() - start, "all_reduce")
            else:
                raise AssertionError(f"all_reduce ended without rank {absent}")
            if asynchronous:
                require(work.is_completed() and second[0].is_completed(), "pending Works did not end with the failure")
                require(isinstance(second[0].exception(), CommError), "a pending Work has no exception")
                raises(CommError, [], work.wait)
                raises(CommError, [], second[0].wait)
            raises(CommClosedError, ["earlier"], group.barrier)
        still_works(comm, "the parent of a group that failed")
        if r == absent:
            raises(CommError, [], partial(group.barrier, timeout=_LIMIT))
        still_works(comm, "the parent of a group that failed")


def _judge(error: CommError, seconds: float, operation: str) -> None:
    """The first to time out may be another rank, which then says so to this one."""
    require(operation in str(error), f"the error does not name {operation}: {error}")
    require(seconds < _LIMIT + _SLACK, f"raised after {seconds:.1f} s, with a time-out of {_LIMIT} s")
    if isinstance(error, CommTimeoutError):
        require(isinstance(error, TimeoutError), "CommTimeoutError is no TimeoutError")
    require(seconds > _LIMIT / 2, f"raised after {seconds:.2f} s, before the time-out of {_LIMIT} s: {error}")


def check_message_timeout(comm: Communicator, case: Case) -> None:
    """A receive that nobody sends to."""
    w, r = comm.world_size, comm.rank
    if w == 1:
        return
    group = comm.split(0)
    assert group is not None
    start = time.monotonic()
    try:
        group.recv(torch.zeros(3, device=comm.device), (r + 1) % w, tag=4, timeout=_LIMIT)
    except CommError as error:
        _judge(error, time.monotonic() - start, "recv")
    else:
        raise AssertionError("a receive ended without a send")
    raises(CommClosedError, ["earlier"], group.barrier)
    still_works(comm, "the parent of a group that failed")


def check_message_mismatch(comm: Communicator, case: Case) -> None:
    """A receive of another size or dtype than what is sent: an error, and no element beside the receive's changes."""
    w, r = comm.world_size, comm.rank
    if w == 1 or not comm._transport.tags:
        return
    for sent, expected in ((200_000, 50), (64, torch.float64)):
        group = comm.split(0)
        assert group is not None
        around = torch.zeros(400_000, device=comm.device)
        numel, dtype = (expected, torch.float32) if isinstance(expected, int) else (sent // 2, expected)
        inside = around[1000 : 1000 + numel * dtype.itemsize // 4].view(dtype)
        try:
            if r == 0:
                group.send(torch.ones(sent, device=comm.device), 1, timeout=_SHORT)
            elif r == 1:
                group.recv(inside, 0, timeout=_SHORT)
                raise AssertionError(f"a receive of {numel} x {dtype} ended with {sent} x float32")
            group.barrier(timeout=min(40 * _SHORT, comm.timeout / 3))  # the parent's next call waits for who is late
        except CommError:
            pass
        else:
            raise AssertionError("a rank went on after a send and a receive that differ")
        beside = int(around[:1000].count_nonzero() + around[1000 + numel * dtype.itemsize // 4 :].count_nonzero())
        require(beside == 0, f"{beside} elements beside those of the receive were written")
        still_works(comm, "the parent of a group that failed")


def check_collective_mismatch(comm: Communicator, case: Case) -> None:
    """Ranks call a collective with different sizes, or different collectives: all learn of it, none is harmed."""
    w, r = comm.world_size, comm.rank
    if w == 1 or not comm._transport.tags:
        return
    few, many = 5_000, 70_000
    for calls, (others, last) in (
        (_different_sizes, (few, many)),
        (_different_sizes, (many, few)),
        (_different_operations, (many, few)),
        (_different_ops, (10, 10)) if w == 2 else (_short_broadcast, (20, 10)),
    ):
        group = comm.split(0)
        assert group is not None
        around = torch.zeros(w * many + 2000, device=comm.device)
        numel = last if r == w - 1 else others
        try:
            calls(group, around[1000 : 1000 + w * numel], numel)
            group.barrier(timeout=min(40 * _SHORT, comm.timeout / 3))  # the parent's next call waits for who is late
        except CommError:
            pass
        else:
            raise AssertionError(f"{calls.__name__}: ranks that called different things went on")
        beside = int(around[:1000].count_nonzero() + around[1000 + w * numel :].count_nonzero())
        require(beside == 0, f"{calls.__name__}: {beside} elements beside the tensor were written")
        still_works(comm, "the parent of a group that failed")


def _different_sizes(group: Communicator, tensor: torch.Tensor, numel: int) -> None:
    group.all_reduce(tensor.fill_(1.0), timeout=_SHORT)


def _different_operations(group: Communicator, tensor: torch.Tensor, numel: int) -> None:
    tensor.fill_(1.0)
    if group.rank:
        group.all_gather(tensor, tensor[group.rank * numel :][:numel], timeout=_SHORT)
    else:
        group.reduce_scatter(tensor[:numel], tensor, timeout=_SHORT)


def _short_broadcast(group: Communicator, tensor: torch.Tensor, numel: int) -> None:
    group.broadcast(tensor[:numel].fill_(1.0), group.world_size - 1, timeout=_SHORT)


def _different_ops(group: Communicator, tensor: torch.Tensor, numel: int) -> None:
    group.all_reduce(tensor[:numel].fill_(1.0), ReduceOp.PRODUCT if group.rank else ReduceOp.SUM, timeout=_SHORT)


def check_abort(comm: Communicator, case: Case) -> None:
    """``abort`` from another thread wakes whoever waits here."""
    w, r = comm.world_size, comm.rank
    if w == 1:
        return
    group = comm.split(0)
    assert group is not None
    timer = threading.Timer(0.1, lambda: group.abort("enough of it"))
    start = time.monotonic()
    timer.start()
    raises(CommError, [], lambda: group.recv(torch.zeros(3, device=comm.device), (r + 1) % w, timeout=60.0))
    require(time.monotonic() - start < 0.1 + _SLACK, "abort did not wake a waiting call")
    timer.join()
    raises(CommClosedError, ["earlier"], group.barrier)
    still_works(comm, "the parent of a group that was aborted")


CHECKS = (
    Check("failures", check_timeout, (Case(seed=0),)),
    Check("failures", check_message_timeout),
    Check("failures", check_message_mismatch),
    Check("failures", check_collective_mismatch),
    Check("failures", check_abort),
)
