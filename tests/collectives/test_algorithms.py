"""Every schedule over real numbers: what the checker proves is also what the executor does."""

from __future__ import annotations

import pytest
import torch

from collectives import Communicator, ReduceOp
from collectives.collective import Collective
from collectives.schedules import SCHEDULES
from collectives.schedules.executor import Chunks, even_cuts
from tests import reference
from tests.ranks import run_ranks
from tests.reference import data

# Fewer elements than ranks, chunks of one length and of several.
CASES = [(numel, dtype) for numel in (1, 7, 60, 1023) for dtype in (torch.float32, torch.bfloat16, torch.int64)]


def each_case(comm: Communicator, op: bool) -> list[tuple[list[torch.Tensor], ReduceOp]]:
    cases = []
    # Chunks of more segments than the executor has lanes; for more ranks, of two segments.
    long = 2_500_000 if comm.world_size == 2 else 700_000
    for seed, (numel, dtype) in enumerate([*CASES, (long, torch.float32)]):
        reduction = ReduceOp.AVG if op and seed % 2 and dtype.is_floating_point else ReduceOp.SUM
        cases.append(([data(rank, (numel,), dtype, seed) for rank in range(comm.world_size)], reduction))
    return cases


def all_reduces(comm: Communicator, algorithm: str) -> None:
    for inputs, op in each_case(comm, True):
        mine = inputs[comm.rank].clone()
        comm.all_reduce(mine, op, algorithm=algorithm)
        assert torch.equal(mine, reference.all_reduce(inputs, op))


def reduces(comm: Communicator, algorithm: str) -> None:
    for inputs, op in each_case(comm, True):
        for root in (0, comm.world_size - 1):
            mine = inputs[comm.rank].clone()
            comm.reduce(mine, root, op, algorithm=algorithm)
            assert torch.equal(mine, reference.all_reduce(inputs, op) if comm.rank == root else inputs[comm.rank])


def reduce_scatters(comm: Communicator, algorithm: str) -> None:
    for inputs, op in each_case(comm, True):
        numel = inputs[0].numel()
        sizes = [numel // comm.world_size * (rank % 2) for rank in range(comm.world_size)]
        sizes[0] = numel - sum(sizes)
        output = torch.empty(sizes[comm.rank], dtype=inputs[0].dtype)
        comm.reduce_scatter_v(output, inputs[comm.rank], sizes, op, algorithm=algorithm)
        assert torch.equal(output, reference.reduce_scatter(inputs, op, sizes)[comm.rank])


def all_gathers(comm: Communicator, algorithm: str) -> None:
    for inputs, _ in each_case(comm, False):
        sizes = [inputs[0].numel() * (rank % 3) for rank in range(comm.world_size)]
        pieces = [piece.repeat(3)[:size] for piece, size in zip(inputs, sizes, strict=True)]
        output = torch.empty(sum(sizes), dtype=inputs[0].dtype)
        comm.all_gather_v(output, pieces[comm.rank], sizes, algorithm=algorithm)
        assert torch.equal(output, torch.cat(pieces))


def broadcasts(comm: Communicator, algorithm: str) -> None:
    for inputs, _ in each_case(comm, False):
        for root in (0, comm.world_size - 1):
            mine = inputs[comm.rank].clone()
            comm.broadcast(mine, root, algorithm=algorithm)
            assert torch.equal(mine, inputs[root])


CALLS = {
    "all_reduce": all_reduces,
    "reduce": reduces,
    "reduce_scatter": reduce_scatters,
    "all_gather": all_gathers,
    "broadcast": broadcasts,
}


@pytest.mark.parametrize("world_size", [2, 5, *(pytest.param(size, marks=pytest.mark.full) for size in (3, 4, 8))])
@pytest.mark.parametrize(("operation", "algorithm"), [key for key in SCHEDULES if key[0] in CALLS])
def test_every_algorithm_computes_the_reference(operation: str, algorithm: str, world_size: int) -> None:
    run_ranks(CALLS[operation], algorithm, world_size=world_size, backend="threads", timeout=60.0)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("numel", [0, 1, 8, 11])
def test_what_a_library_sends_is_counted_exactly(numel: int, size: int) -> None:
    tensor = torch.empty(numel, dtype=torch.int16)
    chunks, nbytes = Chunks(tensor, even_cuts(numel, size)), tensor.nbytes
    expected = {"all_reduce": 2 * (size - 1) * nbytes, "all_gather": (size - 1) * nbytes}
    expected |= {"reduce_scatter": (size - 1) * nbytes, "broadcast": nbytes if size > 1 else 0}
    for operation, total in expected.items():
        call = Collective(operation, tensor.dtype, chunks, chunks, root=0 if operation == "broadcast" else None)
        assert sum(call.least_bytes(size, rank) for rank in range(size)) == total
