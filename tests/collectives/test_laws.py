"""The contract of the communicator as laws, on every backend and world size.

Each law is a function of a rank's communicator; what it expects is computed by tests/reference.py without any
communication. Every operation runs twice in a row with other data, so that left-over scratch would show.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from collectives import P2P, Communicator, ReduceOp, Work
from collectives.errors import CommClosedError
from tests import reference
from tests.ranks import grid, run_ranks
from tests.reference import DTYPES, data

SHAPES: list[tuple[int, ...]] = [(16, 15), (7, 15), (3,), (1, 7), (), (1, 1, 5), (2, 1, 2), (1023,), (1, 0, 2)]
ALGORITHMS = [None, "ring", "direct"]


def ops(dtype: torch.dtype) -> list[ReduceOp]:
    if dtype.is_floating_point:
        return [ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX]
    return [op for op in ReduceOp if op is not ReduceOp.AVG]


def cases(dtype: torch.dtype) -> list[tuple[ReduceOp, tuple[int, ...]]]:
    """Every shape once, every op at least twice."""
    first, *others = ops(dtype)
    return [(first, shape) for shape in SHAPES] + [(op, shape) for op in others for shape in ((7, 15), (3,))]


def same(actual: torch.Tensor, expected: torch.Tensor, what: object = "") -> None:
    assert actual.shape == expected.shape, f"{what}: shape {tuple(actual.shape)}, not {tuple(expected.shape)}"
    assert actual.dtype == expected.dtype, f"{what}: {actual.dtype}, not {expected.dtype}"
    assert torch.equal(actual, expected), f"{what}: got {actual.flatten()[:20]}, expected {expected.flatten()[:20]}"


def everyone(comm: Communicator, shape: Sequence[int], dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    return [data(rank, shape, dtype, seed) for rank in range(comm.world_size)]


# Reductions


def law_all_reduce(comm: Communicator, algorithm: str | None) -> None:
    for dtype in DTYPES:
        for seed, (op, shape) in enumerate(cases(dtype)):
            inputs = everyone(comm, shape, dtype, seed)
            mine = inputs[comm.rank].clone()
            place = mine.data_ptr()
            work = comm.all_reduce(mine, op, algorithm=algorithm)
            assert isinstance(work, Work)
            assert work.is_completed()
            assert mine.data_ptr() == place
            same(mine, reference.all_reduce(inputs, op), (dtype, op, shape))


def law_reduce_scatter(comm: Communicator, algorithm: str | None) -> None:
    for dtype in DTYPES:
        for seed, (op, shape) in enumerate(cases(dtype)):
            inputs = everyone(comm, (comm.world_size, *shape), dtype, seed)
            mine = inputs[comm.rank].clone()
            output = torch.zeros(shape, dtype=dtype)
            comm.reduce_scatter(output, mine, op, algorithm=algorithm)
            expected = reference.reduce_scatter(inputs, op)[comm.rank]
            same(output, expected.reshape(shape), (dtype, op, shape))
            same(mine, inputs[comm.rank], "the input")


def law_reduce_scatter_v(comm: Communicator, algorithm: str | None) -> None:
    for dtype in DTYPES:
        for seed, sizes in enumerate(uneven(comm.world_size)):
            inputs = everyone(comm, (sum(sizes),), dtype, seed)
            mine = inputs[comm.rank].clone()
            output = torch.zeros(sizes[comm.rank], dtype=dtype)
            op = ReduceOp.AVG if dtype.is_floating_point else ReduceOp.SUM
            comm.reduce_scatter_v(output, mine, sizes, op, algorithm=algorithm)
            same(output, reference.reduce_scatter(inputs, op, sizes)[comm.rank], (dtype, sizes))
            same(mine, inputs[comm.rank], "the input")


def uneven(world_size: int) -> list[list[int]]:
    """Sizes by rank: all different, some zero, all but one zero, all zero."""
    return [
        [3 * rank + 1 for rank in range(world_size)],
        [(rank * 5 + 2) % 4 for rank in range(world_size)],
        [7 if rank == world_size - 1 else 0 for rank in range(world_size)],
        [0] * world_size,
        [2 * (world_size - rank) for rank in range(world_size)],
    ]


def law_average_divides_by_world_size(comm: Communicator) -> None:
    """Not by the number of elements, and not forgotten in reduce_scatter."""
    w, r = comm.world_size, comm.rank
    mean = (w + 1) / 2
    five = torch.full((5,), r + 1.0)
    comm.all_reduce(five, ReduceOp.AVG)
    same(five, torch.full((5,), mean))
    for algorithm in ALGORITHMS:
        piece = torch.zeros(1)
        comm.reduce_scatter(piece, torch.arange(1.0, w + 1) * 2 * (r + 1), ReduceOp.AVG, algorithm=algorithm)
        same(piece, torch.tensor([2 * (r + 1) * mean]))
    # 16-bit floats: the sum leaves their range or precision, the average does not.
    big = torch.full((3,), 60000.0, dtype=torch.float16)
    comm.all_reduce(big, ReduceOp.AVG)
    same(big, torch.full((3,), 60000.0, dtype=torch.float16))


def law_integer_average_is_refused(comm: Communicator) -> None:
    for dtype in (torch.int64, torch.uint8, torch.bool):
        with pytest.raises(TypeError, match=r"AVG.*" + str(dtype)):
            comm.all_reduce(torch.ones(3, dtype=dtype), ReduceOp.AVG)
        with pytest.raises(TypeError, match=r"AVG.*" + str(dtype)):
            comm.reduce_scatter(torch.ones(1, dtype=dtype), torch.ones(comm.world_size, dtype=dtype), ReduceOp.AVG)
    still_works(comm)


def law_bool(comm: Communicator) -> None:
    rows = [[True, False, True], [True, True, False], [False, False, True]]
    mine = torch.tensor(rows[comm.rank % 3])
    inputs = [torch.tensor(rows[rank % 3]) for rank in range(comm.world_size)]
    for op in (ReduceOp.SUM, ReduceOp.MAX, ReduceOp.MIN, ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR):
        result = mine.clone()
        comm.all_reduce(result, op)
        same(result, reference.all_reduce(inputs, op), op)
        assert int(result.view(torch.uint8).max()) <= 1
    gathered = torch.zeros(comm.world_size, 3, dtype=torch.bool)
    comm.all_gather(gathered, mine)
    same(gathered, torch.stack(inputs))
    comm.broadcast(mine, comm.world_size - 1)
    same(mine, inputs[-1])


def law_complex(comm: Communicator) -> None:
    value = torch.tensor([complex(1 + comm.rank, 2 - comm.rank)], dtype=torch.complex64)
    w = comm.world_size
    total = value.clone()
    comm.all_reduce(total)
    expected = [complex(sum(range(1, w + 1)), sum(2 - rank for rank in range(w)))]
    same(total, torch.tensor(expected, dtype=torch.complex64))
    with pytest.raises(TypeError, match="MAX"):
        comm.all_reduce(value, ReduceOp.MAX)
    still_works(comm)


def law_same_bits_on_all_ranks(comm: Communicator, algorithm: str | None) -> list[torch.Tensor]:
    """Random values, whose sum depends on the order: near the float64 sum here, compared across ranks by the test."""
    results = []
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 1e-2)):
        for length in (1, 3, 5, 1023):
            generators = [torch.Generator().manual_seed(100 * length + rank) for rank in range(comm.world_size)]
            inputs = [torch.randn(length, generator=g).to(dtype) for g in generators]
            mine = inputs[comm.rank].clone()
            comm.all_reduce(mine, algorithm=algorithm)
            exact = torch.stack([tensor.double() for tensor in inputs]).sum(0)
            torch.testing.assert_close(mine.double(), exact, rtol=tolerance, atol=tolerance)
            if algorithm == "direct":
                same(mine, reference.all_reduce(inputs), "direct adds in rank order")
            results.append(mine)
    return results


# Movements


def law_all_gather(comm: Communicator, algorithm: str | None) -> None:
    for dtype in DTYPES:
        for seed, shape in enumerate([*SHAPES, (5, 3)]):
            inputs = everyone(comm, shape, dtype, seed)
            mine = inputs[comm.rank].clone()
            output = torch.zeros((comm.world_size, *shape), dtype=dtype)
            comm.all_gather(output, mine, algorithm=algorithm)
            same(output, torch.stack(inputs), (dtype, shape))
            same(mine, inputs[comm.rank], "the input")


def law_all_gather_v(comm: Communicator, algorithm: str | None) -> None:
    for dtype in DTYPES:
        for seed, sizes in enumerate(uneven(comm.world_size)):
            inputs = [data(rank, (size,), dtype, seed) for rank, size in enumerate(sizes)]
            output = torch.zeros(sum(sizes), dtype=dtype)
            comm.all_gather_v(output, inputs[comm.rank].clone(), sizes, algorithm=algorithm)
            same(output, reference.all_gather(inputs), (dtype, sizes))


def law_own_slot(comm: Communicator, algorithm: str | None) -> None:
    """The input may be its own slot of the output, and the output its own slot of the input."""
    w, r = comm.world_size, comm.rank
    for seed, numel in enumerate((1, 6, 300)):
        inputs = everyone(comm, (numel,), torch.float32, seed)
        output = torch.full((w, numel), -99.0)
        output[r] = inputs[r]
        comm.all_gather(output, output[r], algorithm=algorithm)
        same(output, torch.stack(inputs))
        sizes = [numel + rank for rank in range(w)]
        start = sum(sizes[:r])
        pieces = [data(rank, (size,), seed=seed) for rank, size in enumerate(sizes)]
        joined = torch.full((sum(sizes),), -99.0)
        joined[start : start + sizes[r]] = pieces[r]
        comm.all_gather_v(joined, joined[start : start + sizes[r]], sizes, algorithm=algorithm)
        same(joined, torch.cat(pieces))
        wholes = everyone(comm, (w, numel), torch.float32, seed)
        whole = wholes[r].clone()
        comm.reduce_scatter(whole[r], whole, algorithm=algorithm)
        same(whole[r], reference.reduce_scatter(wholes)[r])


def law_broadcast(comm: Communicator) -> None:
    for dtype in DTYPES:
        for seed, shape in enumerate(SHAPES):
            src = seed % comm.world_size
            inputs = everyone(comm, shape, dtype, seed)
            mine = inputs[comm.rank].clone()
            comm.broadcast(mine, src)
            same(mine, inputs[src], (dtype, shape, src))


def law_send_recv(comm: Communicator) -> None:
    """Round a ring in both directions, twice, the second time from the highest tag down."""
    w, r = comm.world_size, comm.rank
    if w == 1:
        return
    for dtype in DTYPES:
        for seed, shape in enumerate(SHAPES):
            got = torch.zeros(shape, dtype=dtype)
            sent = comm.send(data(r, shape, dtype, seed), (r + 1) % w, async_op=True)
            comm.recv(got, (r - 1) % w)
            sent.wait()
            same(got, data((r - 1) % w, shape, dtype, seed))
    sends = [comm.send(data(r, (9,), seed=tag), (r - 1) % w, tag, async_op=True) for tag in range(4)]
    for tag in reversed(range(4)):
        got = torch.zeros(9)
        comm.recv(got, (r + 1) % w, tag)
        same(got, data((r + 1) % w, (9,), seed=tag), tag)
    for work in sends:
        work.wait()


def law_exchange(comm: Communicator) -> None:
    """Everyone sends something of its own length to everyone, itself included, all at once."""
    w, r = comm.world_size, comm.rank
    for seed in range(2):
        outgoing = [data(r, (3 * r + peer + 1,), seed=seed + peer) for peer in range(w)]
        incoming = [torch.zeros(3 * peer + r + 1) for peer in range(w)]
        messages = [P2P.send(tensor, peer) for peer, tensor in enumerate(outgoing)]
        messages += [P2P.recv(tensor, peer) for peer, tensor in enumerate(incoming)]
        comm.exchange(messages).wait()
        for peer, tensor in enumerate(incoming):
            same(tensor, data(peer, (3 * peer + r + 1,), seed=seed + r), peer)
    comm.exchange([])
    still_works(comm)


def law_barrier(comm: Communicator) -> list[tuple[float, float]]:
    """By rank, when each barrier was entered and left (one clock for the host)."""
    times = []
    for turn in range(4):
        time.sleep(0.03 * ((comm.rank + turn) % comm.world_size))
        entered = time.monotonic()
        comm.barrier()
        times.append((entered, time.monotonic()))
    return times


def law_broadcast_object(comm: Communicator) -> None:
    for src in range(comm.world_size):
        for obj in (None, {"rank": src, "list": [1, (2, "three")]}, b"x" * 100_000, ""):
            assert comm.broadcast_object(obj if comm.rank == src else "not this", src) == obj


# Tensors as they come


def law_strides(comm: Communicator, algorithm: str | None) -> None:
    """The result is in the caller's own elements, and nothing beside them is touched."""
    w, r = comm.world_size, comm.rank
    total = w * (w + 1) / 2
    transposed = (torch.ones(4, 3) * (r + 1)).t()
    place = transposed.data_ptr()
    comm.all_reduce(transposed, algorithm=algorithm)
    same(transposed, torch.full((3, 4), total))
    assert transposed.data_ptr() == place

    views: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda base: base[:, 1],
        lambda base: base[2:3],
        lambda base: base[1:3, ::2],
        lambda base: base.t()[1:],
        lambda base: base[3, 2],
        lambda base: base.as_strided((2, 2), (7, 3), 1),
    ]
    for view in views:
        for dtype in (torch.float32, torch.bfloat16):
            bases = everyone(comm, (5, 4), dtype, 3)
            mine = bases[r].clone()
            comm.all_reduce(view(mine), algorithm=algorithm)
            expected = bases[r].clone()
            view(expected).copy_(reference.all_reduce([view(base) for base in bases]))
            same(mine, expected)

            mine = bases[r].clone()
            comm.broadcast(view(mine), w - 1)
            expected = bases[r].clone()
            view(expected).copy_(view(bases[-1]))
            same(mine, expected)

            shape = view(bases[0]).shape
            frame = torch.full((w, *shape, 2), -7, dtype=dtype)
            comm.all_gather(frame[..., 0], view(bases[r]), algorithm=algorithm)
            same(frame[..., 0], torch.stack([view(base) for base in bases]))
            assert bool((frame[..., 1] == -7).all())

    wide = torch.full((w, 6), -7.0)
    inputs = everyone(comm, (w, 3), torch.float32, 1)
    wide[:, ::2] = inputs[r]
    piece = torch.full((2, 3), -7.0)
    comm.reduce_scatter(piece[0], wide[:, ::2], algorithm=algorithm)
    same(piece[0], reference.reduce_scatter(inputs)[r])
    assert bool((piece[1] == -7).all())
    assert bool((wide[:, 1::2] == -7).all())


def law_zero_elements(comm: Communicator) -> None:
    """Nothing to do, for every operation, and afterwards the ranks are still in step."""
    w, r = comm.world_size, comm.rank
    empty = torch.zeros(1, 0, 2)
    for async_op in (False, True):
        works = [
            comm.all_reduce(empty, async_op=async_op),
            comm.all_gather(torch.zeros(w, 1, 0, 2), empty, async_op=async_op),
            comm.all_gather_v(torch.zeros(0), empty, [0] * w, async_op=async_op),
            comm.reduce_scatter(torch.zeros(1, 0, 2), torch.zeros(w, 1, 0, 2), async_op=async_op),
            comm.reduce_scatter_v(torch.zeros(0), empty, [0] * w, async_op=async_op),
            comm.broadcast(empty, w - 1, async_op=async_op),
            comm.exchange([P2P.send(empty, (r + 1) % w), P2P.recv(torch.zeros(0), (r - 1) % w)]),
        ]
        for work in works:
            work.wait()
        assert empty.shape == (1, 0, 2)
        one = torch.ones(1)
        comm.all_reduce(one)
        same(one, torch.full((1,), float(w)))


def law_inference_mode(comm: Communicator) -> None:
    w = comm.world_size
    plain = torch.ones(4)
    with torch.inference_mode():
        comm.all_reduce(plain)
        made_inside = torch.ones(3, 2).t()
        comm.all_reduce(made_inside)
        gathered = torch.zeros(w * 4)
        comm.all_gather(gathered, plain)
    same(plain, torch.full((4,), float(w)))
    same(made_inside, torch.full((2, 3), float(w)))
    comm.all_reduce(made_inside.clone())
    plain.requires_grad_()  # refused for a tensor that inference_mode has made


# Work


def law_async(comm: Communicator, algorithm: str | None) -> None:
    """Many operations in flight; waits in reverse, twice, by polling, and not at all."""
    w, r = comm.world_size, comm.rank
    for turn in range(2):
        tensors, works, expected = [], [], []
        for i, numel in enumerate((5, 1000, 1, 64, 0, 333)):
            inputs = everyone(comm, (numel,), torch.float32, i + turn)
            tensors.append(inputs[r].clone())
            works.append(comm.all_reduce(tensors[-1], async_op=True, algorithm=algorithm))
            expected.append(reference.all_reduce(inputs))
            output = torch.zeros(w, numel)
            tensors.append(output)
            works.append(comm.all_gather(output, inputs[r], async_op=True, algorithm=algorithm))
            expected.append(torch.stack(inputs))
        for work, tensor, value in reversed(list(zip(works, tensors, expected, strict=True))):
            work.wait()
            work.wait()
            assert work.is_completed()
            assert work.exception() is None
            same(tensor, value)
    inputs = everyone(comm, (100,), torch.float32, 9)
    dropped = inputs[r].clone()
    comm.all_reduce(dropped, async_op=True, algorithm=algorithm)  # only later calls wait for it
    still_works(comm)
    same(dropped, reference.all_reduce(inputs))


def law_polling(comm: Communicator) -> None:
    """``is_completed`` alone brings an operation to its end."""
    w, r = comm.world_size, comm.rank
    inputs = everyone(comm, (1000,), torch.float32, 0)
    reduced, got = inputs[r].clone(), torch.zeros(1000)
    works = [comm.all_reduce(reduced, async_op=True)]
    if w > 1:
        works.append(comm.recv(got, (r - 1) % w, 3, async_op=True))
        works.append(comm.send(inputs[r], (r + 1) % w, 3, async_op=True))
    else:
        got.copy_(inputs[0])
    deadline = time.monotonic() + 20
    for work in works:
        while not work.is_completed():
            assert time.monotonic() < deadline, "polling made no progress"
            time.sleep(0.001)
        work.wait()
        work.wait()
    same(reduced, reference.all_reduce(inputs))
    same(got, inputs[(r - 1) % w])


# Groups


def law_split(comm: Communicator) -> None:
    """Ranks are the group's own, in the order of the keys; groups and parent are used in turn."""
    w, r = comm.world_size, comm.rank
    for members in ([w - 1, 0] if w > 1 else [0], list(range(w))[::-1], [w // 2]):
        group = comm.split(0 if r in members else None, members.index(r) if r in members else 0)
        if group is None:
            assert r not in members
        else:
            assert (group.rank, group.world_size) == (members.index(r), len(members))
            value = torch.tensor([float(r)])
            group.broadcast(value, 0)
            same(value, torch.tensor([float(members[0])]))
            gathered = torch.zeros(len(members))
            group.all_gather(gathered, torch.tensor([float(r)]))
            same(gathered, torch.tensor([float(member) for member in members]))
        still_works(comm)
        if group is not None:
            still_works(group)
            group.close()
            with pytest.raises(CommClosedError):
                group.barrier()
    halves = comm.split(r % 2, r)
    assert halves is not None
    quarter = halves.split(halves.rank // 2)
    assert quarter is not None
    for group in (quarter, comm, halves, comm, quarter):
        still_works(group)
    assert comm.split(None) is None
    quarter.close()
    halves.close()


# Wrong input


def law_wrong_arguments(comm: Communicator) -> None:
    """Refused alike on every rank, before anything is sent: the communicator stays usable."""
    w = comm.world_size
    one = torch.ones(3)
    wrong: list[tuple[type[Exception], str, Callable[[], Any]]] = [
        (ValueError, "output.*3.*input|input.*3", lambda: comm.all_gather(torch.zeros(3 * w + 1), one)),
        (TypeError, "float64.*float32|float32.*float64", lambda: comm.all_gather(torch.zeros(3 * w).double(), one)),
        (ValueError, "output|input", lambda: comm.reduce_scatter(torch.zeros(2), torch.zeros(2 * w + 1))),
        (TypeError, "float", lambda: comm.reduce_scatter(torch.zeros(2), torch.zeros(2 * w, dtype=torch.bfloat16))),
        (ValueError, "sizes", lambda: comm.all_gather_v(torch.zeros(3 * w), one, [3] * (w + 1))),
        (ValueError, "sizes|negative", lambda: comm.all_gather_v(torch.zeros(3 * w), one, [-3] * w)),
        (ValueError, "output", lambda: comm.all_gather_v(torch.zeros(3 * w + 2), one, [3] * w)),
        (ValueError, "input", lambda: comm.reduce_scatter_v(one, torch.zeros(3 * w + 2), [3] * w)),
        (ValueError, f"src.*{w}", lambda: comm.broadcast(one, w)),
        (ValueError, "src.*-1", lambda: comm.broadcast(one, -1)),
        (ValueError, f"dst.*{w}", lambda: comm.send(one, w)),
        (ValueError, "src.*-2", lambda: comm.recv(one, -2)),
        (ValueError, "tag.*-1", lambda: comm.send(one, 0, -1)),
        (ValueError, "no-such", lambda: comm.all_reduce(one, algorithm="no-such")),
        (TypeError, "ReduceOp", lambda: comm.all_reduce(one, "sum")),  # type: ignore[arg-type]
        (TypeError, "BAND", lambda: comm.all_reduce(one, ReduceOp.BAND)),
        (TypeError, "[Tt]ensor", lambda: comm.all_reduce([1.0, 2.0])),  # type: ignore[arg-type]
    ]
    for expected, match, call in wrong:
        with pytest.raises(expected, match=match):
            call()
        same(one, torch.ones(3))
    if w > 1:
        shared = torch.zeros(3 * w + 2)
        with pytest.raises(ValueError, match="overlap"):
            comm.all_gather(shared[: 3 * w], shared[2 + comm.rank * 3 : 5 + comm.rank * 3])
    still_works(comm)


def still_works(comm: Communicator) -> None:
    value = torch.tensor([comm.rank + 1.0, 1.0])
    comm.all_reduce(value)
    w = comm.world_size
    same(value, torch.tensor([w * (w + 1) / 2, float(w)]))


# The tests


WITH_ALGORITHM = [
    law_all_reduce,
    law_reduce_scatter,
    law_reduce_scatter_v,
    law_all_gather,
    law_all_gather_v,
    law_own_slot,
    law_strides,
    law_async,
]
PLAIN = [
    law_average_divides_by_world_size,
    law_integer_average_is_refused,
    law_bool,
    law_complex,
    law_broadcast,
    law_send_recv,
    law_exchange,
    law_broadcast_object,
    law_zero_elements,
    law_inference_mode,
    law_polling,
    law_split,
    law_wrong_arguments,
]


@grid()
@pytest.mark.parametrize("law", PLAIN)
def test_law(law: Callable[..., None], backend: str, world_size: int) -> None:
    run_ranks(law, backend=backend, world_size=world_size)


@grid()
@pytest.mark.parametrize("law", WITH_ALGORITHM)
def test_law_of_chosen_algorithm(law: Callable[..., None], backend: str, world_size: int) -> None:
    run_ranks(law, None, backend=backend, world_size=world_size)


@grid(["threads", "gloo", "mpi"], full=lambda backend, world_size: backend != "threads" or world_size > 3)
@pytest.mark.parametrize("algorithm", ["ring", "direct"])
@pytest.mark.parametrize("law", WITH_ALGORITHM)
def test_law_of_named_algorithm(law: Callable[..., None], algorithm: str, backend: str, world_size: int) -> None:
    run_ranks(law, algorithm, backend=backend, world_size=world_size)


@grid()
def test_same_bits_on_all_ranks(backend: str, world_size: int) -> None:
    for algorithm in ALGORITHMS:
        first, *others = run_ranks(law_same_bits_on_all_ranks, algorithm, backend=backend, world_size=world_size)
        for other in others:
            for ours, theirs in zip(first, other, strict=True):
                same(theirs, ours)


@grid()
def test_nobody_leaves_a_barrier_before_all_have_come(backend: str, world_size: int) -> None:
    for turn in zip(*run_ranks(law_barrier, backend=backend, world_size=world_size), strict=True):
        assert max(entered for entered, _ in turn) <= min(left for _, left in turn)
