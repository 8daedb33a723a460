"""Whatever the shapes, strides, dtypes, splits and world size: the answers are those of tests/reference.py.

Each rank lays its tensors out in its own way. Threads run in this process; the other backends with --full.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from collectives import P2P, Communicator, ReduceOp
from collectives.conformance.case import LAYOUTS, MOVED, REDUCED, Placed
from collectives.conformance.reductions import defined
from collectives.schedules import SCHEDULES
from tests import reference
from tests.ranks import run_ranks
from tests.reference import data

PAIRS = [(dtype, op) for dtype in REDUCED for op in ReduceOp if defined(dtype, op)]
BACKENDS = ["threads", *(pytest.param(b, marks=pytest.mark.full) for b in ("gloo", "mpi", "ring+gloo", "ring+mpi"))]


class Example(NamedTuple):
    """One call. ``shape`` is a rank's part, ``layouts`` those of the two tensors by rank, ``sizes`` uneven parts."""

    operation: str
    world_size: int
    dtype: torch.dtype
    op: ReduceOp
    shape: tuple[int, ...]
    layouts: list[tuple[str, str]]
    sizes: list[int]
    splits: list[list[int]]
    algorithm: str | None
    async_op: bool
    root: int
    seed: int


@st.composite
def examples(draw: st.DrawFn, operations: list[str], largest: int) -> Example:
    operation = draw(st.sampled_from(operations))
    w = draw(st.integers(1, largest))
    reduces = "reduce" in operation
    dtype, op = draw(st.sampled_from(PAIRS)) if reduces else (draw(st.sampled_from(MOVED)), ReduceOp.SUM)
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
    layout = st.sampled_from(list(LAYOUTS))
    sizes = st.lists(st.integers(0, 9), min_size=w, max_size=w)
    names = [name for of, name in SCHEDULES if of == operation.removesuffix("_v")]
    return Example(
        operation,
        w,
        dtype,
        op,
        shape,
        draw(st.lists(st.tuples(layout, layout), min_size=w, max_size=w)),
        draw(sizes),
        draw(st.lists(sizes, min_size=w, max_size=w)),
        draw(st.sampled_from([None, *names])),
        draw(st.booleans()),
        draw(st.integers(0, w - 1)),
        draw(st.integers(0, 9)),
    )


def call(comm: Communicator, example: Example) -> None:
    """Make the call on this rank, twice with other data, and compare."""
    if comm.world_size != example.world_size:  # a part of the ranks of a pool
        group = comm.split(0 if comm.rank < example.world_size else None)
        if group is not None:
            call(group, example)
            group.close()
        return
    for seed in (example.seed, example.seed + 1):
        _call(comm, example, seed)


def _call(comm: Communicator, e: Example, seed: int) -> None:
    w, r = comm.world_size, comm.rank
    first, second = e.layouts[r]

    def mine(values: torch.Tensor) -> Placed:
        return Placed(values, first, comm.device)

    def blank(*shape: int) -> Placed:
        return Placed(torch.ones(shape).to(e.dtype), second, comm.device)

    inputs = [data(rank, e.shape, e.dtype, seed) for rank in range(w)]
    wholes = [data(rank, (w, *e.shape), e.dtype, seed) for rank in range(w)]
    kwargs = {"async_op": e.async_op, "algorithm": e.algorithm}
    if e.operation == "all_reduce":
        tensor = mine(inputs[r])
        comm.all_reduce(tensor.tensor, e.op, **kwargs).wait()
        tensor.expect(reference.all_reduce(inputs, e.op), str(e))
    elif e.operation == "reduce":
        tensor = mine(inputs[r])
        comm.reduce(tensor.tensor, e.root, e.op, **kwargs).wait()
        tensor.expect(reference.all_reduce(inputs, e.op) if r == e.root else inputs[r], str(e))
    elif e.operation == "broadcast":
        tensor = mine(inputs[r])
        comm.broadcast(tensor.tensor, e.root, **kwargs).wait()
        tensor.expect(inputs[e.root], str(e))
    elif e.operation == "all_gather":
        tensor, output = mine(inputs[r]), blank(w, *e.shape)
        comm.all_gather(output.tensor, tensor.tensor, **kwargs).wait()
        output.expect(torch.stack(inputs), str(e))
        tensor.expect(inputs[r], str(e))
    elif e.operation == "reduce_scatter":
        tensor, output = mine(wholes[r]), blank(*e.shape)
        comm.reduce_scatter(output.tensor, tensor.tensor, e.op, **kwargs).wait()
        output.expect(reference.reduce_scatter(wholes, e.op)[r], str(e))
        tensor.expect(wholes[r], str(e))
    elif e.operation == "all_gather_v":
        parts = [data(rank, (size,), e.dtype, seed) for rank, size in enumerate(e.sizes)]
        tensor, output = mine(parts[r]), blank(sum(e.sizes))
        comm.all_gather_v(output.tensor, tensor.tensor, e.sizes, **kwargs).wait()
        output.expect(reference.all_gather(parts), str(e))
    elif e.operation == "reduce_scatter_v":
        wholes = [data(rank, (sum(e.sizes),), e.dtype, seed) for rank in range(w)]
        tensor, output = mine(wholes[r]), blank(e.sizes[r])
        comm.reduce_scatter_v(output.tensor, tensor.tensor, e.sizes, e.op, **kwargs).wait()
        output.expect(reference.reduce_scatter(wholes, e.op, e.sizes)[r], str(e))
        tensor.expect(wholes[r], str(e))
    elif e.operation == "gather":
        tensor, output = mine(inputs[r]), blank(w, *e.shape)
        comm.gather(output.tensor if r == e.root else None, tensor.tensor, e.root, **kwargs).wait()
        output.expect(torch.stack(inputs) if r == e.root else torch.ones(w, *e.shape).to(e.dtype), str(e))
    elif e.operation == "scatter":
        tensor, output = mine(wholes[e.root]), blank(*e.shape)
        comm.scatter(output.tensor, tensor.tensor if r == e.root else None, e.root, **kwargs).wait()
        output.expect(wholes[e.root][r], str(e))
    elif e.operation == "all_to_all":
        sent = [data(rank, (sum(row),), e.dtype, seed) for rank, row in enumerate(e.splits)]
        received = [row[r] for row in e.splits]
        tensor, output = mine(sent[r]), blank(sum(received))
        comm.all_to_all(output.tensor, tensor.tensor, received, e.splits[r], **kwargs).wait()
        output.expect(reference.all_to_all(sent, e.splits)[r], str(e))
    else:
        parts = [
            [data(src, (size,), e.dtype, seed + dst) for dst, size in enumerate(e.splits[src])] for src in range(w)
        ]
        outgoing = [mine(part) for part in parts[r]]
        incoming = [blank(row[r]) for row in e.splits]
        messages = [P2P.send(tensor.tensor, dst) for dst, tensor in enumerate(outgoing)]
        messages += [P2P.recv(tensor.tensor, src) for src, tensor in enumerate(incoming)]
        comm.exchange(messages, tag=e.root, async_op=e.async_op).wait()
        for src, tensor in enumerate(incoming):
            tensor.expect(parts[src][r], str(e))


REDUCTIONS = ["all_reduce", "reduce", "reduce_scatter", "reduce_scatter_v"]
MOVEMENTS = ["all_gather", "all_gather_v", "broadcast", "gather", "scatter", "all_to_all", "exchange"]


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda name: f"on-{name}")
@pytest.mark.parametrize("operations", [REDUCTIONS, MOVEMENTS], ids=["reductions", "movements"])
def test_answers(backend: str, operations: list[str], request: pytest.FixtureRequest) -> None:
    threads = backend == "threads"
    examples_wanted = 150 if threads else 60
    if not (request.config.option.full or request.config.option.exhaustive):
        examples_wanted //= 3

    @settings(
        max_examples=examples_wanted,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate] if not threads else [Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(examples(operations, 5 if threads else 3))
    def holds(example: Example) -> None:
        run_ranks(call, example, backend=backend, world_size=example.world_size if threads else 3)

    holds()
