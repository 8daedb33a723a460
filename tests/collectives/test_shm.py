"""What shared memory promises beyond the contract: rank order in every way, one buffer a host, and several hosts."""

from __future__ import annotations

import itertools
import os
import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from collectives import Communicator, ReduceOp, conformance
from collectives.backend import Bootstrap
from collectives.backends.segment import PAGE, Heap
from collectives.backends.shm import ShmBackend, wrap
from collectives.backends.team import PIECE_BYTES, describe, spell
from collectives.conformance.case import same, still_works
from collectives.errors import CollectiveMismatchError, CommError, CommTimeoutError
from collectives.types import RankInfo
from tests import reference
from tests.ranks import run_ranks

PIECE = PIECE_BYTES // 4  # float32 elements
# Around one piece, one slot and the border between one step and several; none is a multiple of the world sizes.
LENGTHS = [1, 16 * 1024, 16 * 1024 + 1, 2 * PIECE - 1, 2 * PIECE + 1, 5 * PIECE + 7]
SIZES = [2, 3, pytest.param(4, marks=pytest.mark.full)]
_numbers = itertools.count()


def sub(comm: Communicator, nodes: list[int] | None = None) -> Communicator:
    """A communicator of all ranks with memory of its own; ``nodes``: as if ranks were on these hosts."""
    transport = comm._transport
    below = transport.below if isinstance(transport, ShmBackend) else transport
    number = next(_numbers)
    info = RankInfo(rank=comm.rank, world_size=comm.world_size, local_world_size=comm.world_size)
    bootstrap = Bootstrap(info, torch.device("cpu"), 30.0, lambda: None)
    backend = wrap(below._split(range(comm.world_size), f"test_shm/{number}"), bootstrap, nodes)
    return Communicator(backend, info, name="shm+test", timeout=30.0)


def noise(rank: int, length: int, dtype: torch.dtype) -> torch.Tensor:
    """Values whose sum depends on the order."""
    return torch.randn(length, generator=torch.Generator().manual_seed(100 * length + rank)).to(dtype)


def memory(comm: Communicator, values: torch.Tensor, shared: bool) -> torch.Tensor:
    tensor = comm.allocate(values.numel(), values.dtype) if shared else torch.empty_like(values)
    return tensor.copy_(values)


WAYS: list[Callable[[int], bool]] = [lambda rank: False, lambda rank: True, lambda rank: rank != 1]


def law_rank_order_in_every_way(comm: Communicator, dtype: torch.dtype) -> None:
    """Private tensors, shared ones, and both at once: always the bits of sums in rank order."""
    w, r = comm.world_size, comm.rank
    for length in LENGTHS:
        inputs = [noise(rank, length, dtype) for rank in range(w)]
        wholes = [noise(rank, length * w, dtype) for rank in range(w)]
        for op, way in [(op, way) for op in (ReduceOp.SUM, ReduceOp.AVG) for way in WAYS]:
            tensor = memory(comm, inputs[r], way(r))
            comm.all_reduce(tensor, op)
            same(tensor, reference.all_reduce(inputs, op), (length, op))
            whole, piece = memory(comm, wholes[r], way(r)), memory(comm, inputs[r], way(r + 1))
            comm.reduce_scatter(piece, whole, op)
            same(piece, reference.reduce_scatter(wholes, op)[r], (length, op))
            same(whole, wholes[r], "the input")
            comm.reduce_scatter(whole[r * length : (r + 1) * length], whole, op)
            same(whole[r * length : (r + 1) * length], piece, "over its own part")


@pytest.mark.parametrize("world_size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rank_order_in_every_way(world_size: int, dtype: torch.dtype) -> None:
    run_ranks(law_rank_order_in_every_way, dtype, world_size=world_size, backend="shm+gloo")


def law_moves_in_every_way(comm: Communicator) -> None:
    w, r = comm.world_size, comm.rank
    for length, way in itertools.product(LENGTHS, WAYS):
        inputs = [noise(rank, length, torch.float32) for rank in range(w)]
        sizes = [length + 5 * rank if rank != w - 1 else 0 for rank in range(w)]
        parts = [noise(rank, size, torch.float32) for rank, size in enumerate(sizes)]
        output = memory(comm, torch.zeros(w * length), way(r + 1))
        comm.all_gather(output, memory(comm, inputs[r], way(r)))
        same(output, torch.cat(inputs), length)
        joined = torch.zeros(sum(sizes))
        comm.all_gather_v(joined, memory(comm, parts[r], way(r)), sizes)
        same(joined, torch.cat(parts), length)
        tensor = memory(comm, inputs[r], way(r))
        comm.broadcast(tensor, length % w)
        same(tensor, inputs[length % w], length)


@pytest.mark.parametrize("world_size", SIZES)
def test_moves_in_every_way(world_size: int) -> None:
    run_ranks(law_moves_in_every_way, world_size=world_size, backend="shm+gloo")


def law_polling_is_enough(comm: Communicator) -> None:
    """Many large operations under way, brought to their end by polling at odd times."""
    w, r = comm.world_size, comm.rank
    rng = random.Random(r)
    works, results, expected = [], [], []
    for turn in range(6):
        inputs = [noise(rank, 3 * PIECE + turn, torch.float32) for rank in range(w)]
        results.append(memory(comm, inputs[r], turn % 2 == 0))
        works.append(comm.all_reduce(results[-1], async_op=True))
        expected.append(reference.all_reduce(inputs))
        results.append(torch.zeros(w * inputs[r].numel()))
        works.append(comm.all_gather(results[-1], inputs[r], async_op=True))
        expected.append(torch.cat(inputs))
        time.sleep(rng.random() * 0.003)
    while not works[-1].is_completed():
        time.sleep(rng.random() * 0.001)
    for result, value in zip(results, expected, strict=True):
        same(result, value)


def law_allocated_memory_is_used_again(comm: Communicator) -> None:
    first = comm.allocate(5 * PIECE, torch.float32)
    place = first.data_ptr()
    view = first[PIECE:]
    del first
    other = comm.allocate(5 * PIECE, torch.float32)
    assert other.data_ptr() != place, "a view of it lives"
    del view
    assert comm.allocate(5 * PIECE, torch.float32).data_ptr() == place
    small = comm.allocate(10, torch.float32)
    comm.all_reduce(small.fill_(1))
    same(small, torch.full((10,), float(comm.world_size)))


def law_memory_that_does_not_exist(comm: Communicator) -> None:
    with pytest.raises(CommError, match="shared memory"):
        comm.allocate(2**45, torch.float32)
    still_works(comm)


@pytest.mark.parametrize(
    "law", [law_polling_is_enough, law_allocated_memory_is_used_again, law_memory_that_does_not_exist]
)
def test_memory(law: Callable[[Communicator], None]) -> None:
    run_ranks(law, world_size=2, backend="shm+gloo")


# Buffers that a host has once


def law_shared_buffer(comm: Communicator, nodes: list[int] | None) -> None:
    """With random delays before everything that a rank may do at a time of its own."""
    w, r = comm.world_size, comm.rank
    group = comm if nodes is None else sub(comm, nodes)
    rng = random.Random(r)
    pause = lambda: time.sleep(rng.choice([0, 0, 0.001, 0.003]))  # noqa: E731
    for numel in (5, 1000, PIECE):
        buffer = group.allocate_shared(numel * w, torch.float32)
        assert buffer is not None
        mine = buffer.part(r * numel, (r + 1) * numel)
        for turn in range(10):
            inputs = [noise(rank + 10 * turn, numel, torch.float32) for rank in range(w)]
            source = inputs[r]
            if turn % 3 == 0 and nodes is None:  # in place, which nobody may do while another still reads
                group.barrier()
                pause()
                source = mine.copy_(source)
            pause()
            work = group.all_gather(buffer.tensor, source, async_op=turn % 2 == 0)
            pause()
            work.wait()
            for _ in range(3):
                same(buffer.tensor, torch.cat(inputs), (numel, turn))
                pause()
            with pytest.raises(ValueError, match="retire"):
                group.all_gather(buffer.tensor, source)
            buffer.retire()
        group.barrier()
        if r == w - 1:
            buffer.part(0, numel * w).copy_(noise(7, numel * w, torch.float32))
        group.broadcast(buffer.tensor, w - 1)
        same(buffer.tensor, noise(7, numel * w, torch.float32))
        buffer.retire()
        writes_of_others = [
            (group.all_reduce, (buffer.tensor,), {}),
            (group.reduce_scatter, (buffer.tensor[:numel], torch.zeros(numel * w)), {}),
            (group.recv, (buffer.tensor, (r + 1) % w), {}),
            (group.all_gather, (buffer.tensor[:w], torch.zeros(1)), {}),
            (group.all_gather, (buffer.tensor, torch.zeros(numel)), {"algorithm": "ring"}),
        ]
        for call, arguments, options in writes_of_others:
            with pytest.raises(ValueError, match="shared buffer"):
                call(*arguments, **options)
        still_works(group)
        buffer.release()
    if nodes is not None:
        group.close()


@pytest.mark.parametrize(
    ("world_size", "nodes"),
    [(2, None), (3, None), (3, [0, 0, 1]), pytest.param(4, [0, 1, 0, 1], marks=pytest.mark.full)],
)
def test_shared_buffer(world_size: int, nodes: list[int] | None) -> None:
    run_ranks(law_shared_buffer, nodes, world_size=world_size, backend="shm+gloo")


def law_other_sizes(comm: Communicator) -> None:
    with pytest.raises(ValueError, match="rank 0: 10 of 4 bytes"):
        comm.allocate_shared(10 + comm.rank, torch.float32)
    still_works(comm)


def law_shared_memory_is_once_a_host(comm: Communicator) -> None:
    buffer = comm.allocate_shared(1000, torch.float32)
    assert buffer is not None
    comm.barrier()
    buffer.part(comm.rank, comm.rank + 1).fill_(comm.rank + 1)
    comm.barrier()
    assert buffer.tensor[: comm.world_size].tolist() == [rank + 1.0 for rank in range(comm.world_size)]
    comm.barrier()


@pytest.mark.parametrize("law", [law_other_sizes, law_shared_memory_is_once_a_host])
def test_shared_buffers(law: Callable[[Communicator], None]) -> None:
    run_ranks(law, world_size=3, backend="shm+gloo")


def law_none(comm: Communicator) -> None:
    assert comm.allocate_shared(10, torch.float32) is None


@pytest.mark.parametrize("backend", ["threads", "gloo"])
def test_other_backends_have_none(backend: str) -> None:
    run_ranks(law_none, world_size=2, backend=backend)


# Several hosts


def law_several_hosts(comm: Communicator, nodes: list[int]) -> list[torch.Tensor]:
    group = sub(comm, nodes)
    assert isinstance(group._transport, ShmBackend)
    hosts = [[rank for rank, node in enumerate(nodes) if node == number] for number in sorted(set(nodes))]
    assert sorted(group._transport.nodes) == sorted(hosts)
    for trial in conformance.trials(part for part in conformance.GROUPS if part != "failures"):
        trial.function(group, trial.case)
    bits = []
    w, r = comm.world_size, comm.rank
    for length in (PIECE * w + 3, 300_000):  # several slots
        inputs = [reference.data(rank, (length,)) for rank in range(w)]
        tensor = inputs[r].clone()
        group.all_reduce(tensor, ReduceOp.AVG)
        same(tensor, reference.all_reduce(inputs, ReduceOp.AVG))
        wholes = [reference.data(rank, (length * w,), torch.bfloat16) for rank in range(w)]
        piece = torch.zeros(length, dtype=torch.bfloat16)
        group.reduce_scatter(piece, wholes[r])
        same(piece, reference.reduce_scatter(wholes)[r])
        gathered = torch.zeros(w * length)
        group.all_gather(gathered, inputs[r])
        same(gathered, torch.cat(inputs))
        group.broadcast(tensor.copy_(inputs[r]), w - 1)
        same(tensor, inputs[w - 1])
        bits.append(noise(r, length, torch.float32))
        group.all_reduce(bits[-1])
    group.close()
    return bits


@pytest.mark.parametrize(
    ("backend", "nodes"),
    [
        pytest.param("gloo", [0, 0, 1], marks=pytest.mark.full),
        pytest.param("gloo", [0, 1, 0, 1], marks=pytest.mark.full),
        pytest.param("mpi", [0, 0, 1], marks=pytest.mark.full),
        pytest.param("mpi", [0, 0, 1, 1], marks=pytest.mark.exhaustive),
        pytest.param("gloo", [1, 0, 0, 0], marks=pytest.mark.exhaustive),
        pytest.param("gloo", [0, 1, 2, 2], marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_several_hosts(backend: str, nodes: list[int]) -> None:
    first, *others = run_ranks(law_several_hosts, nodes, world_size=len(nodes), backend=backend, timeout=120.0)
    for other in others:
        for ours, theirs in zip(first, other, strict=True):
            same(theirs, ours)


def law_one_rank_a_host(comm: Communicator) -> None:
    group = sub(comm, list(range(comm.world_size)))
    assert group._transport.name == "gloo"
    still_works(group)
    group.close()


def test_one_rank_a_host_shares_nothing() -> None:
    run_ranks(law_one_rank_a_host, world_size=2, backend="gloo")


# Failures


def law_mismatch(comm: Communicator) -> list[str]:
    """Other operations, sizes, dtypes and reduce ops are seen at once, by everybody."""
    found = []
    calls: list[Callable[[Communicator, int], Any]] = [
        lambda c, r: c.all_reduce(torch.zeros(3 + r % 2)),
        lambda c, r: c.all_reduce(torch.zeros(3, dtype=torch.int32 if r % 2 else torch.float32)),
        lambda c, r: c.all_reduce(torch.zeros(3), ReduceOp.MAX if r % 2 else ReduceOp.SUM),
        lambda c, r: c.all_reduce(torch.zeros(4)) if r % 2 else c.broadcast(torch.zeros(4), 0),
        lambda c, r: c.broadcast(torch.zeros(200_000), r % 2),
        lambda c, r: c.barrier() if r % 2 else c.all_reduce(torch.zeros(200_000)),
    ]
    for call in calls:
        group = sub(comm)
        start = time.monotonic()
        with pytest.raises(CollectiveMismatchError) as caught:
            call(group, comm.rank)
        found.append(str(caught.value))
        assert time.monotonic() - start < 10
        group.close()
    return found


@pytest.mark.parametrize("world_size", [2, 3])
def test_mismatch(world_size: int) -> None:
    for texts in zip(*run_ranks(law_mismatch, world_size=world_size, backend="shm+gloo"), strict=True):
        for text in texts:
            assert "rank 0 called" in text
            assert "rank 1 called" in text
    assert "all_reduce (3 x float32, SUM)" in run_ranks(law_mismatch, world_size=2, backend="shm+gloo")[1][0]


def law_timeout(comm: Communicator) -> str:
    group = sub(comm)
    if comm.rank == 1:
        comm.barrier()
        group.close()
        return ""
    with pytest.raises(CommTimeoutError) as caught:
        group.all_reduce(torch.zeros(3), timeout=0.3)
    comm.barrier()
    group.close()
    return str(caught.value)


def test_a_time_out_names_who_is_missing() -> None:
    texts = run_ranks(law_timeout, world_size=3, backend="shm+gloo")
    assert "rank 1 on this host" in texts[0]
    assert "rank 1 on this host" in texts[2]


# Parts


def law_split_uses_the_same_memory(comm: Communicator) -> None:
    """A tensor that the parent allocated is in reach of a split, which maps nothing new."""
    maps = lambda: sum("/memfd:collectives" in line for line in open("/proc/self/maps"))  # noqa: E731, SIM115
    before = maps()
    group = comm.split(0, -comm.rank)
    assert group is not None
    assert maps() <= before
    tensor = comm.allocate(3 * PIECE, torch.float32).fill_(comm.rank + 1)
    assert group._transport.team.place(tensor) is not None  # type: ignore[attr-defined]
    group.all_reduce(tensor)
    same(tensor, torch.full((3 * PIECE,), float(sum(range(1, comm.world_size + 1)))))
    group.close()


def test_split_uses_the_same_memory() -> None:
    run_ranks(law_split_uses_the_same_memory, world_size=3, backend="shm+gloo")


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 40)), max_size=40))
def test_the_heap_never_lends_a_byte_twice(steps: list[tuple[bool, int]]) -> None:
    heap = Heap(1)
    lent: list[torch.Tensor] = []
    for takes, pages in steps:
        if takes or not lent:
            lent.append(heap.allocate(pages * PAGE // 4 - 1, torch.float32).fill_(len(lent)))
        else:
            lent.pop(pages % len(lent))
        spans = sorted((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in lent)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    lent.clear()
    heap.reserve(1)
    assert len(heap._free) == 1
    heap.drop()


def test_headers_in_words() -> None:
    call = describe("broadcast", torch.bfloat16, 7, root=2)
    assert spell(*call.details) == "broadcast (7 x bfloat16, root 2)"
    assert spell(*describe("all_reduce", torch.int64, 5, ReduceOp.MAX).details) == "all_reduce (5 x int64, MAX)"
    assert describe("all_gather", torch.bool, 6, cuts=(0, 2, 6)) != describe("all_gather", torch.bool, 6)
    assert os.sysconf("SC_PAGE_SIZE") % PAGE == 0
