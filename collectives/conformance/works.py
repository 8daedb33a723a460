"""Checks of what a call returns, of how it waits, and of the modes it is called in."""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Callable

import torch

from collectives.communicator import Communicator
from collectives.conformance import reference
from collectives.conformance.case import Case, Check, everyone, raises, require, same, still_works
from collectives.conformance.grids import algorithms
from collectives.errors import CommClosedError
from collectives.types import Work

_PATIENCE = 20.0  # seconds for what takes milliseconds
Started = list[tuple[Work, torch.Tensor, torch.Tensor]]  # work, where its result will be, what it must be


def _start_several(comm: Communicator, case: Case, seed: int) -> Started:
    """Operations of several kinds in flight at once."""
    started: Started = []
    for i, numel in enumerate((5, 1000, 1, 64, 0, 333)):
        inputs = everyone(comm, case, i + seed, (numel,))
        mine, output = inputs[comm.rank].to(comm.device, copy=True), torch.zeros(comm.world_size, numel)
        options = {"async_op": True, "algorithm": case.algorithm}
        started.append((comm.all_reduce(mine, **options), mine, reference.all_reduce(inputs)))  # type: ignore[arg-type]
        output = output.to(comm.device)
        work = comm.all_gather(output, inputs[comm.rank].to(comm.device), **options)  # type: ignore[arg-type]
        started.append((work, output, torch.stack(inputs)))
        if case.algorithm is None:
            src = i % comm.world_size
            mine = inputs[comm.rank].to(comm.device, copy=True)
            started.append((comm.broadcast(mine, src, async_op=True), mine, inputs[src]))
    return started


def check_wait_in_reverse_and_twice(comm: Communicator, case: Case) -> None:
    for seed in case.seeds:
        for work, result, expected in reversed(_start_several(comm, case, seed)):
            work.wait()
            same(result, expected, "a result after wait, the last started first")
            work.wait()
            work.wait(0.001)
            require(work.is_completed(), "is_completed is false after wait")
            require(work.exception() is None, f"exception is {work.exception()!r} after a good end")


def check_never_wait(comm: Communicator, case: Case) -> None:
    """What nobody waits for, and whose tensors nobody keeps, is carried out all the same."""
    for seed in case.seeds:
        started = _start_several(comm, case, seed)
        kept = started.pop(6)
        del started
        still_works(comm, "a call after operations whose tensors were dropped")
        same(kept[1], kept[2], "a result that only later calls waited for")


def check_polling(comm: Communicator, case: Case) -> None:
    """``is_completed`` alone brings operations to their end, collectives and messages."""
    w, r = comm.world_size, comm.rank
    inputs = everyone(comm, case, case.seed, (1000,))
    total, got = inputs[r].to(comm.device, copy=True), torch.zeros(1000, device=comm.device)
    works = [comm.all_reduce(total, async_op=True)]
    if w > 1 and comm._transport.tags:
        works.append(comm.recv(got, (r - 1) % w, 3, async_op=True))
        works.append(comm.send(inputs[r].to(comm.device), (r + 1) % w, 3, async_op=True))
    else:
        got = inputs[(r - 1) % w]
    deadline = time.monotonic() + _PATIENCE
    for work in works:
        while not work.is_completed():
            require(time.monotonic() < deadline, "is_completed made no progress")
            time.sleep(0.0005)
        require(work.exception() is None, "exception after a good end")
        work.wait()
    same(total, reference.all_reduce(inputs), "a polled all_reduce")
    same(got, inputs[(r - 1) % w], "a polled message")


def check_not_done_early(comm: Communicator, case: Case) -> None:
    """Nobody is done before the rank that comes last, and then with its data."""
    w, r = comm.world_size, comm.rank
    for seed in case.seeds:
        late = seed % w
        value = torch.full((3000,), float(r + seed), device=comm.device)
        if r == late:
            time.sleep(0.03)
        work = comm.all_reduce(value, async_op=case.async_op, algorithm=case.algorithm)
        while case.async_op and not work.is_completed():
            time.sleep(0.0005)
        work.wait()
        same(value, torch.full((3000,), float(sum(range(w)) + w * seed)), f"a sum that rank {late} came late to")
        if r == late:
            time.sleep(0.03)
        value = torch.full((3000,), float(r + seed), device=comm.device)
        comm.broadcast(value, late)
        same(value, torch.full((3000,), float(late + seed)), f"a broadcast from rank {late}, which came late")


def check_barrier(comm: Communicator, case: Case) -> None:
    """Nobody leaves before all have come, where all ranks read one clock."""
    w, r = comm.world_size, comm.rank
    for turn in range(4):
        time.sleep(0.01 * ((r + turn) % w))
        entered = time.monotonic()
        comm.barrier(async_op=turn % 2 == 1).wait()
        left = time.monotonic()
        times = comm.all_gather_object((entered, left))
        if comm.local_world_size == w:
            require(
                max(came for came, _ in times) <= min(went for _, went in times),
                f"a rank left the barrier before another came: {times}",
            )


def check_threads_of_a_rank(comm: Communicator, case: Case) -> None:
    """Calls may come from any thread, one at a time, and their Works be waited for on another."""
    w = comm.world_size
    value, works = torch.ones(100, device=comm.device), []
    for turn in range(2):
        thread = threading.Thread(target=lambda: works.append(comm.all_reduce(value, async_op=True)))
        thread.start()
        thread.join(_PATIENCE)
        require(len(works) == turn + 1, "a call from another thread did not return")
        works[turn].wait()
        same(value, torch.full((100,), float(w ** (turn + 1))), "a call from another thread")


def check_issuers_take_turns(comm: Communicator, case: Case) -> None:
    """Two threads of a rank that call the same operation at the same time do not get into each other's way."""
    w = comm.world_size
    wrong: list[str] = []

    def issue() -> None:
        try:
            for _ in range(40):
                value = torch.ones(64, device=comm.device)
                comm.all_reduce(value)
                same(value, torch.full((64,), float(w)), "one of two calls at the same time")
        except Exception as error:
            wrong.append(f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=issue) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_PATIENCE)
    require(not any(thread.is_alive() for thread in threads), "calls from two threads did not return")
    require(not wrong, "; ".join(wrong))
    still_works(comm)


def check_inference_mode(comm: Communicator, case: Case) -> None:
    """Calls work inside, on tensors made inside or outside, and leave those made outside ordinary."""
    w = comm.world_size
    plain = torch.ones(4, device=comm.device)
    with torch.inference_mode():
        comm.all_reduce(plain)
        inside = torch.ones(3, 2, device=comm.device).t()
        comm.all_reduce(inside)
        gathered = torch.zeros(w * 4, device=comm.device)
        comm.all_gather(gathered, plain, async_op=True).wait()
    same(plain, torch.full((4,), float(w)), "all_reduce in inference mode")
    same(inside, torch.full((2, 3), float(w)), "all_reduce of a strided tensor made in inference mode")
    same(gathered, torch.full((w * 4,), float(w)), "all_gather in inference mode")
    comm.all_reduce(inside.clone())
    plain.requires_grad_()  # refused for a tensor that inference mode has made
    still_works(comm)


def check_parameters(comm: Communicator, case: Case) -> None:
    """Tensors that require gradients are moved as they are, and no graph is made."""
    w = comm.world_size
    weight = torch.nn.Parameter(torch.full((2, 3), comm.rank + 1.0, device=comm.device))
    comm.broadcast(weight, w - 1)
    same(weight, torch.full((2, 3), float(w)), "broadcast of a parameter")
    column = torch.nn.Parameter(torch.ones(4, 2, device=comm.device))
    comm.all_reduce(column[:, 0])
    same(column, torch.tensor([[float(w), 1.0]] * 4), "all_reduce of a column of a parameter")
    require(weight.is_leaf and weight.requires_grad and weight.grad_fn is None, "the parameter joined a graph")
    torch.autograd.backward([(weight * 2).sum()])
    require(weight.grad is not None, "no gradient after a collective")
    comm.all_reduce(weight.grad)  # type: ignore[arg-type]
    same(weight.grad, torch.full((2, 3), 2.0 * w), "all_reduce of a gradient")  # type: ignore[arg-type]


def check_fork(comm: Communicator, case: Case) -> None:
    """In a forked child every call raises, and the parent goes on."""
    for turn in range(comm.world_size):
        comm.barrier()  # ranks that are threads of one process must not be anywhere else when one of them forks
        if comm.rank == turn:
            _fork_and_call(comm)
    still_works(comm, "a call after a fork")


def _fork_and_call(comm: Communicator) -> None:
    one = torch.ones(3, device=comm.device)
    calls: list[Callable[[], object]] = [
        lambda: comm.all_reduce(one),
        lambda: comm.send(one, (comm.rank + 1) % comm.world_size),
        lambda: comm.broadcast(one, 0, async_op=True),
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # a process with threads is forked: that is the point
        child = os.fork()
    if child == 0:
        code = 1
        try:
            for call in calls:
                raises(CommClosedError, ["fork"], call)
            comm.close()
            code = 0
        finally:
            os._exit(code)
    deadline = time.monotonic() + _PATIENCE
    ended, status = os.waitpid(child, os.WNOHANG)
    while not ended and time.monotonic() < deadline:
        time.sleep(0.001)
        ended, status = os.waitpid(child, os.WNOHANG)
    if not ended:
        os.kill(child, 9)
        os.waitpid(child, 0)
        raise AssertionError(f"a call in a forked child hung for {_PATIENCE:g} s")
    require(os.waitstatus_to_exitcode(status) == 0, "a call in a forked child did not raise CommClosedError")


_BOTH = algorithms("all_reduce", "all_gather")

CHECKS = (
    Check("work", check_wait_in_reverse_and_twice, tuple(Case(algorithm=a, seed=3) for a in (None, *_BOTH))),
    Check("work", check_never_wait, tuple(Case(algorithm=a) for a in (None, *_BOTH))),
    Check("work", check_polling),
    Check("work", check_not_done_early, (Case(), Case(async_op=True, seed=1), Case(algorithm="ring", async_op=True))),
    Check("work", check_barrier),
    Check("modes", check_threads_of_a_rank),
    Check("modes", check_issuers_take_turns),
    Check("modes", check_inference_mode),
    Check("modes", check_parameters),
    Check("modes", check_fork),
)
