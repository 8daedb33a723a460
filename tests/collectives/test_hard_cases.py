"""What went wrong in other systems, with the right answers worked out by hand: silent wrong numbers, hangs, crashes.

A rank that is lost and one that never comes are in test_failures.py and in the conformance suite's "failures".
"""

from __future__ import annotations

import itertools
import time

import pytest
import torch

from collectives import Communicator, ReduceOp
from tests.ranks import grid, run_ranks


def average_of_reduce_scatter(comm: Communicator) -> None:
    """C1: the average is no sum."""
    output = torch.zeros(1)
    comm.reduce_scatter(output, torch.tensor([2.0, 4.0]) * (comm.rank + 1), ReduceOp.AVG)
    assert output.tolist() == [3.0 if comm.rank == 0 else 6.0]


def transposed(comm: Communicator) -> None:
    """C3: the caller's own elements are reduced, not those of a copy."""
    x = (torch.ones(4, 3) * (comm.rank + 1)).t()
    place = x.data_ptr()
    comm.all_reduce(x)
    assert x.data_ptr() == place
    assert torch.equal(x, torch.full((3, 4), 3.0))


def zero_elements(comm: Communicator) -> None:
    """C5: nothing to move, and the ranks stay in step."""
    w, last, empty = comm.world_size, comm.rank == comm.world_size - 1, (1, 0, 2)

    def new() -> torch.Tensor:
        return torch.empty(empty)

    for algorithm in (None, "direct"):
        tensors = [new() for _ in range(9)]
        comm.all_reduce(tensors[0], algorithm=algorithm)
        comm.all_gather(tensors[1], new(), algorithm=algorithm)
        comm.reduce_scatter(tensors[2], new(), algorithm=algorithm)
        comm.broadcast(tensors[3], 0, algorithm=algorithm)
        comm.reduce(tensors[4], w - 1, algorithm=algorithm)
        comm.all_gather_v(tensors[5], new(), [0] * w, algorithm=algorithm)
        comm.reduce_scatter_v(tensors[6], new(), [0] * w, algorithm=algorithm)
        comm.gather(tensors[7] if last else None, new(), w - 1)
        comm.scatter(tensors[8], new() if last else None, w - 1)
        comm.all_to_all(tensors[0], new())
        comm.send(new(), (comm.rank + 1) % w, async_op=True)
        comm.recv(tensors[1], (comm.rank - 1) % w)
        assert all(tensor.shape == empty for tensor in tensors)
        one = torch.ones(1)
        comm.all_reduce(one)
        assert one.item() == w


def averages(comm: Communicator) -> None:
    """C7: AVG divides by the number of ranks, and integers have none, whatever they hold."""
    five = torch.full((5,), comm.rank + 1.0)
    comm.all_reduce(five, ReduceOp.AVG)
    assert five.tolist() == [2.0] * 5
    for values in ([1, 2, 4], [-1, -2, -4]):
        mine = torch.tensor([values[comm.rank]])
        with pytest.raises(TypeError, match=r"AVG.*int64"):
            comm.all_reduce(mine, ReduceOp.AVG)
        assert mine.item() == values[comm.rank]


def polled(comm: Communicator) -> None:
    """C13: asking whether it is done makes progress; waiting twice does nothing more; any order will do."""
    other = 1 - comm.rank
    mine, theirs, total = torch.full((9,), float(comm.rank)), torch.zeros(9), torch.ones(9)
    works = [
        comm.send(mine, other, async_op=True),
        comm.recv(theirs, other, async_op=True),
        comm.all_reduce(total, async_op=True),
    ]
    deadline = time.monotonic() + 30.0
    while not all(work.is_completed() for work in works):
        assert time.monotonic() < deadline, "polling makes no progress"
    for work in [*reversed(works), *works]:
        work.wait()
    assert theirs.tolist() == [float(other)] * 9
    assert total.tolist() == [2.0] * 9


def groups(comm: Communicator) -> None:
    """C15: ranks are the group's own, in the order that was asked for."""
    for members in ([2, 3], [3, 1]):
        group = comm.split(
            0 if comm.rank in members else None, key=members.index(comm.rank) if comm.rank in members else 0
        )
        assert (group is None) == (comm.rank not in members)
        if group is not None:
            assert (group.rank, group.world_size) == (members.index(comm.rank), 2)
            x = torch.tensor([10.0 * comm.rank])
            group.broadcast(x, 0)
            assert x.item() == 10.0 * members[0]
            group.close()


def truth_values(comm: Communicator) -> None:
    """C17: bool is moved exactly, and reduces to truth values; complex numbers add, and have no order."""
    rows = [torch.tensor([True, False, True]), torch.tensor([True, True, False])]
    mine, gathered = rows[comm.rank], torch.empty(6, dtype=torch.bool)
    comm.all_gather(gathered, mine)
    assert gathered.tolist() == [*rows[0].tolist(), *rows[1].tolist()]
    sent = mine.clone()
    comm.broadcast(sent, 1)
    assert sent.tolist() == rows[1].tolist()
    dealt = torch.empty(3, dtype=torch.bool)
    comm.scatter(dealt, gathered if comm.rank == 0 else None, 0)
    assert dealt.tolist() == mine.tolist()
    expected = {ReduceOp.MAX: [True, True, True], ReduceOp.MIN: [True, False, False], ReduceOp.SUM: [True, True, True]}
    for op, right in expected.items():
        result = mine.clone()
        comm.all_reduce(result, op)
        assert result.view(torch.uint8).tolist() == [int(value) for value in right], op
    z = torch.tensor([1 + 2j, 3 - 1j][comm.rank]).reshape(1)
    comm.all_reduce(z)
    assert z.item() == 4 + 1j
    with pytest.raises(TypeError, match=r"MAX.*complex64"):
        comm.all_reduce(z, ReduceOp.MAX)


def same_bits(comm: Communicator) -> None:
    """C19: all ranks get the same bits."""
    for dtype, length in itertools.product((torch.float32, torch.bfloat16), (1, 3, 5, 1023)):
        parts = [
            torch.randn(length, generator=torch.Generator().manual_seed(r)).to(dtype) for r in range(comm.world_size)
        ]
        mine = parts[comm.rank].clone()
        comm.all_reduce(mine)
        exact = torch.stack([part.double() for part in parts]).sum(0)
        torch.testing.assert_close(mine.double(), exact, rtol=1e-2, atol=1e-2 if dtype == torch.bfloat16 else 1e-5)
        everyones = torch.empty(comm.world_size * length, dtype=dtype)
        comm.all_gather(everyones, mine)
        assert all(torch.equal(theirs, mine) for theirs in everyones.split(length))


def long_counts(comm: Communicator) -> None:
    """C21: more elements than the transport counts are sent in parts."""
    transport = comm._transport
    before, transport.max_count = transport.max_count, 1000
    try:
        for algorithm in (None, "direct"):
            x = torch.arange(2501.0) * (comm.rank + 1)
            comm.all_reduce(x, algorithm=algorithm)
            assert torch.equal(x, torch.arange(2501.0) * sum(range(1, comm.world_size + 1)))
    finally:
        transport.max_count = before


def leading_ones(comm: Communicator) -> None:
    """C23: contiguous tensors with a leading dimension of 1, and one row of a larger one, which alone changes."""
    w = comm.world_size
    for shape in ((1, 2, 2), (2, 1, 2), (1,), ()):
        x = torch.full(shape, comm.rank + 1.0)
        comm.all_reduce(x)
        assert torch.equal(x, torch.full(shape, w * (w + 1) / 2))
    a = torch.arange(12.0).reshape(4, 3)
    comm.all_reduce(a[2:3])
    expected = torch.arange(12.0).reshape(4, 3)
    expected[2] *= w
    assert torch.equal(a, expected)


CASES = {
    2: (average_of_reduce_scatter, transposed, polled, truth_values, leading_ones, zero_elements, long_counts),
    3: (averages, same_bits, leading_ones),
    4: (zero_elements, groups, same_bits),
}


def all_cases(comm: Communicator) -> None:
    for case in CASES[comm.world_size]:
        case(comm)


@grid(
    ["threads", "gloo", "mpi", "ring+gloo", "ring+mpi", "shm+gloo", "shm+mpi"],
    world_sizes=(2, 3, 4),
    threads=(),
    full=lambda backend, world_size: backend != "threads",
)
def test_hard_cases(backend: str, world_size: int) -> None:
    run_ranks(all_cases, backend=backend, world_size=world_size)
