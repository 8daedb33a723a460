"""Checks of all_reduce, reduce_scatter and reduce."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from collectives.communicator import Communicator
from collectives.conformance import reference
from collectives.conformance.case import (
    COMPLEX,
    FLOATS,
    REDUCED,
    Case,
    Check,
    bits,
    blank,
    everyone,
    place,
    raises,
    require,
    same,
    still_works,
)
from collectives.conformance.grids import algorithms, shapes_and_layouts, uneven
from collectives.schedules.arithmetic import check_reducible
from collectives.types import ReduceOp, Work


def check_all_reduce(comm: Communicator, case: Case) -> None:
    for seed in case.seeds:
        inputs = everyone(comm, case, seed)
        mine = place(comm, case, inputs[comm.rank], seed)
        where = mine.tensor.data_ptr()
        work = comm.all_reduce(mine.tensor, case.op, async_op=case.async_op, algorithm=case.algorithm)
        require(isinstance(work, Work), f"expected a Work, got {work!r}")
        require(case.async_op or work.is_completed(), "a call without async_op returned an unfinished Work")
        work.wait()
        require(mine.tensor.data_ptr() == where, "the caller's tensor was moved")
        mine.expect(reference.all_reduce(inputs, case.op), f"all_reduce on rank {comm.rank}")


def check_reduce_scatter(comm: Communicator, case: Case) -> None:
    for seed in case.seeds:
        inputs = everyone(comm, case, seed, (comm.world_size, *case.shape))
        mine, output = place(comm, case, inputs[comm.rank], seed), blank(comm, case, case.shape, seed + 1)
        options = {"async_op": case.async_op, "algorithm": case.algorithm}
        comm.reduce_scatter(output.tensor, mine.tensor, case.op, **options).wait()  # type: ignore[arg-type]
        output.expect(reference.reduce_scatter(inputs, case.op)[comm.rank], f"reduce_scatter on rank {comm.rank}")
        mine.expect(inputs[comm.rank], "the input of reduce_scatter")


def check_reduce_scatter_v(comm: Communicator, case: Case) -> None:
    for seed in case.seeds:
        sizes = uneven(comm.world_size, seed)
        inputs = everyone(comm, case, seed, (sum(sizes),))
        mine, output = place(comm, case, inputs[comm.rank], seed), blank(comm, case, (sizes[comm.rank],), seed + 1)
        comm.reduce_scatter_v(
            output.tensor, mine.tensor, sizes, case.op, async_op=case.async_op, algorithm=case.algorithm
        ).wait()
        expected = reference.reduce_scatter(inputs, case.op, sizes)[comm.rank]
        output.expect(expected, f"reduce_scatter_v of {sizes} on rank {comm.rank}")
        mine.expect(inputs[comm.rank], "the input of reduce_scatter_v")


def check_reduce(comm: Communicator, case: Case) -> None:
    for seed in case.seeds:
        dst = seed % comm.world_size
        inputs = everyone(comm, case, seed)
        mine = place(comm, case, inputs[comm.rank], seed)
        comm.reduce(mine.tensor, dst, case.op, async_op=case.async_op, algorithm=case.algorithm).wait()
        result = reference.all_reduce(inputs, case.op) if comm.rank == dst else inputs[comm.rank]
        mine.expect(result, f"reduce to rank {dst} on rank {comm.rank}")


def check_average(comm: Communicator, case: Case) -> None:
    """AVG divides by the number of ranks, not of elements, and reduce_scatter does not forget it."""
    w, r = comm.world_size, comm.rank
    mean = (w + 1) / 2
    five = torch.full((5,), r + 1.0, dtype=case.dtype, device=comm.device)
    comm.all_reduce(five, ReduceOp.AVG, algorithm=case.algorithm)
    same(five, torch.full((5,), mean, dtype=case.dtype), "the average of 1 to world_size")
    piece = torch.zeros(1, dtype=case.dtype, device=comm.device)
    whole = torch.arange(1, w + 1, device=comm.device).to(case.dtype) * 2 * (r + 1)
    comm.reduce_scatter(piece, whole, ReduceOp.AVG, algorithm=case.algorithm)
    same(piece, torch.tensor([2 * (r + 1) * mean], dtype=case.dtype), "reduce_scatter with AVG")


def check_accumulation(comm: Communicator, case: Case) -> None:
    """16-bit floats are added, multiplied and divided in float32, and rounded once."""
    w = comm.world_size
    half_a_step = torch.finfo(case.dtype).eps / 2  # added to 1 in 16 bits, it is lost each time
    large = torch.finfo(case.dtype).max / 1.5  # the sum of two leaves the range, the average does not
    for op, first, other in ((ReduceOp.SUM, 1.0, half_a_step), (ReduceOp.AVG, large, large)):
        inputs = [torch.full((4,), other if rank else first).to(case.dtype) for rank in range(w)]
        mine = inputs[comm.rank].to(comm.device)
        expected = reference.all_reduce(inputs, op)
        result = mine.clone()
        comm.all_reduce(result, op, algorithm=case.algorithm)
        same(result, expected, f"{op.name} in float32")
        piece = torch.zeros_like(mine)
        comm.reduce_scatter(piece, torch.stack([mine] * w), op, algorithm=case.algorithm)
        same(piece, expected, f"{op.name} of reduce_scatter in float32")


def check_same_bits(comm: Communicator, case: Case) -> None:
    """Random values, whose sum depends on the order: near the float64 sum, and with the same bits on every rank."""
    tolerance = {torch.float32: 1e-5, torch.float64: 1e-13}.get(case.dtype, 1e-2)
    for seed in case.seeds:
        length = case.shape[0]
        generators = [torch.Generator().manual_seed(1000 * seed + rank) for rank in range(comm.world_size)]
        inputs = [torch.randn(length, generator=g, dtype=torch.float64).to(case.dtype) for g in generators]
        mine = place(comm, case, inputs[comm.rank], seed)
        comm.all_reduce(mine.tensor, case.op, algorithm=case.algorithm)
        exact = torch.stack([tensor.double() for tensor in inputs]).sum(0)
        exact = exact / comm.world_size if case.op is ReduceOp.AVG else exact
        result = mine.tensor.cpu()
        error = float(((result.double() - exact).abs() / (1 + exact.abs())).max())
        require(error < tolerance, f"{error:.1e} from the exact sum, expected less than {tolerance:g}")
        if case.algorithm == "direct":
            same(result, reference.all_reduce(inputs, case.op), "direct adds in rank order")
        mine_in_bytes = bits(result).to(comm.device)
        everywhere = mine_in_bytes.new_empty(comm.world_size, *mine_in_bytes.shape)
        comm.all_gather(everywhere, mine_in_bytes)
        for rank, theirs in enumerate(everywhere):
            require(torch.equal(theirs, mine_in_bytes), f"ranks {comm.rank} and {rank} got other bits")


def check_not_a_number(comm: Communicator, case: Case) -> None:
    """A NaN on one rank is a NaN on all: for MIN and MAX too, wherever it stands."""
    for seed in case.seeds:
        inputs = everyone(comm, case, seed)
        inputs[seed % comm.world_size].view(-1)[seed % 3] = float("nan")
        mine = inputs[comm.rank].clone().to(comm.device)
        comm.all_reduce(mine, case.op, algorithm=case.algorithm)
        same(mine, reference.all_reduce(inputs, case.op), f"{case.op.name} with a NaN on rank {seed % comm.world_size}")


def check_bool(comm: Communicator, case: Case) -> None:
    """Truth values stay truth values: SUM and MAX are "or", and no byte is other than 0 or 1."""
    rows = [torch.tensor(row) for row in ([True, False, True], [True, True, False], [False, False, True])]
    inputs = [rows[rank % 3] for rank in range(comm.world_size)]
    for op in (op for op in ReduceOp if op is not ReduceOp.AVG):
        mine = inputs[comm.rank].clone().to(comm.device)
        comm.all_reduce(mine, op, algorithm=case.algorithm)
        same(mine, reference.all_reduce(inputs, op), f"{op.name} of bool")


def check_undefined(comm: Communicator, case: Case) -> None:
    """A reduction that its dtype does not have raises ``TypeError`` on every rank, before anything is sent."""
    w = comm.world_size
    one, whole = torch.ones(3).to(case.dtype).to(comm.device), torch.ones(3 * w).to(case.dtype).to(comm.device)
    words = [str(case.dtype), *([case.op.name] if case.dtype in REDUCED else [])]
    raises(TypeError, words, lambda: comm.all_reduce(one, case.op))
    raises(TypeError, words, lambda: comm.reduce_scatter(one, whole, case.op))
    raises(TypeError, words, lambda: comm.reduce_scatter_v(one, whole, [3] * w, case.op))
    raises(TypeError, words, lambda: comm.reduce(one, 0, case.op))
    same(one, torch.ones(3).to(case.dtype), "the tensor of a refused call")
    still_works(comm)


def defined(dtype: torch.dtype, op: ReduceOp) -> bool:
    try:
        check_reducible(dtype, op)
    except TypeError:
        return False
    return True


def _every_reduction(shape: tuple[int, ...]) -> Iterator[Case]:
    pairs = [(dtype, op) for dtype in REDUCED for op in ReduceOp if defined(dtype, op)]
    for i, (dtype, op) in enumerate(pairs):
        yield Case(dtype, op, shape, async_op=i % 3 == 1, seed=i)


def _by_algorithm(operation: str) -> Iterator[Case]:
    trials: Sequence[tuple[torch.dtype, ReduceOp, tuple[int, ...]]] = (
        (torch.float32, ReduceOp.SUM, (1023,)),
        (torch.bfloat16, ReduceOp.AVG, (7, 15)),
        (torch.int64, ReduceOp.MAX, (3,)),
    )
    for algorithm in algorithms(operation):
        for i, (dtype, op, shape) in enumerate(trials):
            yield Case(dtype, op, shape, "mixed" if i == 1 else "plain", algorithm, i == 0, seed=i)


def _cases(operation: str) -> tuple[Case, ...]:
    return (*_every_reduction((5,)), *shapes_and_layouts(), *_by_algorithm(operation))


_RANDOM = tuple(
    Case(dtype, op, (length,), algorithm=algorithm, seed=length)
    for algorithm in (None, *algorithms("all_reduce"))
    for dtype, op, length in (
        (torch.float32, ReduceOp.SUM, 1023),
        (torch.float32, ReduceOp.AVG, 5),
        (torch.bfloat16, ReduceOp.SUM, 3),
        (torch.float16, ReduceOp.AVG, 1),
        (torch.float32, ReduceOp.SUM, 9001),
    )
)
_EVERY_ALGORITHM = (None, *algorithms("all_reduce", "reduce_scatter"))

CHECKS = (
    Check("all_reduce", check_all_reduce, _cases("all_reduce")),
    Check("reduce_scatter", check_reduce_scatter, _cases("reduce_scatter")),
    Check("reduce_scatter", check_reduce_scatter_v, (*shapes_and_layouts(), *_by_algorithm("reduce_scatter"))),
    Check("reduce", check_reduce, _cases("reduce")),
    Check(
        "precision",
        check_average,
        tuple(Case(dtype, algorithm=name) for dtype in (*FLOATS, *COMPLEX) for name in _EVERY_ALGORITHM),
    ),
    Check(
        "precision",
        check_accumulation,
        tuple(Case(dtype, algorithm=name) for dtype in (torch.float16, torch.bfloat16) for name in _EVERY_ALGORITHM),
    ),
    Check("precision", check_same_bits, _RANDOM),
    Check(
        "precision",
        check_not_a_number,
        tuple(
            Case(dtype, op, (3,), algorithm=name)
            for name in (None, *algorithms("all_reduce"))
            for dtype, op in (
                (torch.float32, ReduceOp.MAX),
                (torch.float32, ReduceOp.MIN),
                (torch.float64, ReduceOp.MAX),
                (torch.bfloat16, ReduceOp.MIN),
                (torch.float32, ReduceOp.SUM),
            )
        ),
    ),
    Check(
        "precision", check_bool, tuple(Case(torch.bool, algorithm=name) for name in (None, *algorithms("all_reduce")))
    ),
    Check(
        "arguments",
        check_undefined,
        tuple(
            Case(dtype, op)
            for dtype in (*REDUCED, torch.float8_e4m3fn, torch.float8_e5m2)
            for op in ReduceOp
            if not defined(dtype, op)
        ),
    ),
)
