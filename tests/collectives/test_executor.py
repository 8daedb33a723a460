"""How schedules are executed: in segments and lanes, whatever their lengths; receives are posted before sends."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import collectives
from collectives import CommError, Communicator, ReduceOp
from collectives import collective as execution
from collectives.backend import SCHEDULE_TAGS
from collectives.collective import Collective
from collectives.schedules import SCHEDULES, executor
from collectives.schedules.executor import Chunks, Plan, even_cuts
from tests import reference
from tests.ranks import grid, run_ranks
from tests.reference import data

# Elements in the whole tensor: chunks that end within, at and behind a segment, and some that are empty.
NUMELS = (1, 7, 24, 25, 160, 331)
OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce")


@pytest.fixture
def short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 4 float32 that are added and 8 that are moved, so that small tensors have many."""
    monkeypatch.setattr(execution, "SEGMENT_BYTES", 16)
    monkeypatch.setattr(execution, "MOVE_BYTES", 32)


def all_sizes(comm: Communicator, operation: str, algorithm: str) -> None:
    for seed, numel in enumerate(NUMELS):
        for dtype, op in ((torch.float32, ReduceOp.SUM), (torch.float32, ReduceOp.AVG), (torch.bfloat16, ReduceOp.SUM)):
            inputs = [data(rank, (numel,), dtype, seed) for rank in range(comm.world_size)]
            mine = inputs[comm.rank].clone()
            if operation == "all_reduce":
                comm.all_reduce(mine, op, algorithm=algorithm)
                assert torch.equal(mine, reference.all_reduce(inputs, op))
            elif operation == "reduce":
                comm.reduce(mine, 0, op, algorithm=algorithm)
                assert torch.equal(mine, inputs[comm.rank] if comm.rank else reference.all_reduce(inputs, op))
            elif operation == "broadcast":
                comm.broadcast(mine, comm.world_size - 1, algorithm=algorithm)
                assert torch.equal(mine, inputs[-1])
            elif operation == "reduce_scatter":
                sizes = uneven(numel, comm.world_size)
                output = torch.empty(sizes[comm.rank], dtype=dtype)
                comm.reduce_scatter_v(output, mine, sizes, op, algorithm=algorithm)
                assert torch.equal(output, reference.reduce_scatter(inputs, op, sizes)[comm.rank])
            else:
                sizes = uneven(numel, comm.world_size)
                parts = [tensor[:size] for tensor, size in zip(inputs, sizes, strict=True)]
                output = torch.empty(numel, dtype=dtype)
                comm.all_gather_v(output, parts[comm.rank], sizes, algorithm=algorithm)
                assert torch.equal(output, torch.cat(parts))


def uneven(numel: int, size: int) -> list[int]:
    """Parts of very different lengths, one of them empty."""
    sizes = [numel // (2 + rank) if rank % 3 != 2 else 0 for rank in range(size - 1)]
    while sum(sizes) > numel:
        sizes[sizes.index(max(sizes))] //= 2
    return [*sizes, numel - sum(sizes)]


@pytest.mark.parametrize("world_size", [2, 3, pytest.param(5, marks=pytest.mark.full)])
@pytest.mark.parametrize(("operation", "algorithm"), [key for key in SCHEDULES if key[0] in OPERATIONS])
@pytest.mark.usefixtures("short_segments")
def test_any_number_of_segments(operation: str, algorithm: str, world_size: int) -> None:
    collectives.run(all_sizes, operation, algorithm, n=world_size, timeout=60.0)


@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.usefixtures("short_segments")
def test_any_number_of_lanes(lanes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "LANES", lanes)
    for operation in ("all_reduce", "reduce_scatter", "all_gather"):
        collectives.run(all_sizes, operation, "ring", n=3, timeout=60.0)


@pytest.mark.parametrize(
    ("operation", "algorithm", "moves"),
    [("all_reduce", "ring", 3), ("all_reduce", "direct", 1), ("reduce_scatter", "ring", 0), ("all_gather", "ring", 3)],
)
def test_which_rounds_only_move(operation: str, algorithm: str, moves: int) -> None:
    found = SCHEDULES[operation, algorithm]
    for rank in range(4):
        assert Plan.of(found.schedule(rank, 4), alike=True).moves == moves


def test_rounds_that_may_differ_between_ranks_count_as_adding() -> None:
    """A leaf of a tree only sends, but its parent adds: both must cut the message alike."""
    leaf = list(SCHEDULES["reduce", "tree"].schedule(1, 2, 0))
    assert not any(round.then for round in leaf)
    assert Plan.of(leaf).moves == 0


def receives_first(comm: Communicator) -> list[list[bool]]:
    seen = []
    post = comm._transport._post

    def spy(ops, tag):  # type: ignore[no-untyped-def]
        seen.append([op.sends for op in ops])
        return post(ops, tag)

    comm._transport._post = spy  # type: ignore[method-assign]
    comm.all_reduce(torch.ones(331), algorithm="ring")
    return seen


@pytest.mark.usefixtures("short_segments")
def test_receives_are_posted_before_sends() -> None:
    for seen in collectives.run(receives_first, n=2):
        assert len(seen) > 10
        assert all(sends == sorted(sends) for sends in seen)


def different_calls(comm: Communicator) -> tuple[str, bool]:
    """Rank 0 reduces much, the others gather little: what was raised, and whether memory beside the result is whole."""
    group = comm.split(0)
    assert group is not None
    around = torch.zeros(200_000)
    try:
        if comm.rank == 0:
            group.all_reduce(torch.ones(150_000), timeout=1.0)
        else:
            group.all_gather(around[: comm.world_size], torch.ones(1), timeout=1.0)
    except CommError as error:
        return type(error).__name__, not around[comm.world_size :].any()
    return "nothing", False


@grid(["gloo", "ring+gloo", "ring+mpi", "threads"], [2], threads=(), full=lambda backend, world_size: False)
def test_messages_of_different_calls_are_never_mixed(backend: str, world_size: int) -> None:
    """A transport may write beyond the end of a receive that is too short for what came."""
    for raised, whole in run_ranks(different_calls, world_size=world_size, backend=backend):
        assert raised in ("CollectiveMismatchError", "CommTimeoutError", "CommError")
        assert whole


def test_tags_tell_calls_apart_and_leave_users_theirs() -> None:
    chunks = Chunks(torch.empty(12), even_cuts(12, 3))
    other = Chunks(torch.empty(12), [0, 4, 5, 12])
    call = Collective("all_reduce", torch.float32, chunks, chunks, ReduceOp.SUM)
    calls = [
        (call, "ring"),
        (call, "direct"),
        (replace(call, op=ReduceOp.MAX), "ring"),
        (replace(call, dtype=torch.int32), "ring"),
        (replace(call, operation="reduce", root=0), "ring"),
        (replace(call, operation="reduce", root=1), "ring"),
        (replace(call, input=other, output=other, even=False), "ring"),
    ]
    tags = [call.tag(choice) for call, choice in calls]
    assert tags == [replace(call).tag(choice) for call, choice in calls]
    assert len(set(tags)) == len(tags)
    assert all(0 < tag < SCHEDULE_TAGS for tag in tags)


def test_ranks_that_pass_different_parts_have_one_tag() -> None:
    chunks = [Chunks(torch.empty(numel), even_cuts(numel, 2)) for numel in (4, 6)]
    calls = [Collective("all_to_all", torch.float32, a, b, even=False) for a in chunks for b in chunks]
    assert len({call.tag("pairwise") for call in calls}) == 1
