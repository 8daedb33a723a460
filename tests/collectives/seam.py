"""What every transport owes to the communicator, as laws over a bare ``Backend``.

The expected values are computed by tests/reference.py, without communication.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from collectives import P2P, Communicator, ReduceOp
from collectives.backend import Backend, Pending
from tests import reference
from tests.reference import data

TAG = 2**20  # away from those of a communicator that uses the same transport
EVERY_DTYPE = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.uint16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]
REDUCIBLE = [torch.float32, torch.float64, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64]


def finish(backend: Backend, pending: Pending, count: int = 1, seconds: float = 20.0) -> None:
    """Bring ``count`` operations to their end, in the way that this transport offers."""
    deadline = time.monotonic() + seconds
    if backend.waits:
        for i in range(count):
            pending.wait(i, deadline)
        return
    while not pending.poll():
        assert time.monotonic() < deadline, f"rank {backend.rank}: nothing came in {seconds} s"
        time.sleep(0)


def bits(tensor: torch.Tensor) -> list[int]:
    numbers: list[int] = tensor.contiguous().view(torch.uint8).tolist()
    return numbers


def pattern(source: int, target: int, dtype: torch.dtype, length: int = 7) -> torch.Tensor:
    """What ``source`` sends to ``target``: any bits, but none that bool does not have."""
    return data(source, (length,), seed=target).abs().clamp(max=1).to(dtype)


def law_messages_of_every_dtype(backend: Backend) -> None:
    me, others = backend.rank, [rank for rank in range(backend.size) if rank != backend.rank]
    for turn, dtype in enumerate(EVERY_DTYPE):
        sent = {peer: pattern(me, peer, dtype) for peer in others}
        received = {peer: torch.zeros(7, dtype=torch.uint8).to(dtype) for peer in others}
        ops = [P2P.recv(received[peer], peer) for peer in others] + [P2P.send(sent[peer], peer) for peer in others]
        finish(backend, backend._post(ops, TAG + turn), len(ops))
        for peer in others:
            assert bits(received[peer]) == bits(pattern(peer, me, dtype)), dtype
            assert bits(sent[peer]) == bits(pattern(me, peer, dtype)), dtype


def law_order_and_tags(backend: Backend) -> None:
    """Messages with one tag come in order; with another tag, they may be received first."""
    after, before = (backend.rank + 1) % backend.size, (backend.rank - 1) % backend.size
    if backend.size == 1 or not backend.tags:
        return
    posted = []
    for tag in (TAG, TAG + 1):
        for number in range(3):
            posted.append(backend._post([P2P.send(torch.tensor([backend.rank, tag, number]), after)], tag))
    for tag in (TAG + 1, TAG):
        for number in range(3):
            received = torch.zeros(3, dtype=torch.int64)
            finish(backend, backend._post([P2P.recv(received, before)], tag))
            assert received.tolist() == [before, tag, number]
    for pending in posted:
        finish(backend, pending)


def law_large_messages_both_ways(backend: Backend) -> None:
    """Sends that no buffer can hold do not block the receives posted with them, nor the other way round."""
    after, before = (backend.rank + 1) % backend.size, (backend.rank - 1) % backend.size
    if backend.size == 1:
        return
    length = 2**21 + 3
    sent, received = torch.full((length,), backend.rank + 1.0), torch.zeros(length)
    finish(backend, backend._post([P2P.send(sent, after), P2P.recv(received, before)], TAG), 2)
    assert torch.equal(received, torch.full((length,), before + 1.0))


def law_own_collectives(backend: Backend) -> None:
    size, me = backend.size, backend.rank
    for dtype in REDUCIBLE:
        for op in reference.ARITHMETIC:
            for length in (1, 1023):
                if op is not ReduceOp.AVG and backend.supports("all_reduce", dtype, op):
                    inputs = [data(rank, (length,), dtype) for rank in range(size)]
                    result = inputs[me].clone()
                    finish(backend, backend._all_reduce(result, op))
                    assert torch.equal(result, reference.all_reduce(inputs, op)), (dtype, op)
                if op is not ReduceOp.AVG and backend.supports("reduce_scatter", dtype, op):
                    inputs = [data(rank, (length * size,), dtype) for rank in range(size)]
                    given, piece = inputs[me].clone(), torch.zeros(length, dtype=dtype)
                    finish(backend, backend._reduce_scatter(piece, given, op))
                    expected = reference.reduce_scatter(inputs, op)[me]
                    assert torch.equal(piece, expected), (dtype, op)
                    assert torch.equal(given, inputs[me]), "an input was written"
                    own_part = given[me * length : (me + 1) * length]
                    finish(backend, backend._reduce_scatter(own_part, given, op))
                    assert torch.equal(own_part, expected), "over its own part"
    for dtype in EVERY_DTYPE:
        if backend.supports("broadcast", dtype):
            for source in range(size):
                tensor = pattern(me, 0, dtype)
                finish(backend, backend._broadcast(tensor, source))
                assert bits(tensor) == bits(pattern(source, 0, dtype)), dtype
        if backend.supports("all_gather", dtype):
            parts = [pattern(rank, 0, dtype) for rank in range(size)]
            output = torch.zeros(7 * size, dtype=torch.uint8).to(dtype)
            finish(backend, backend._all_gather(output, parts[me]))
            assert bits(output) == bits(torch.cat(parts)), dtype
            output.view(torch.uint8).zero_()
            output[7 * me : 7 * me + 7] = parts[me]
            finish(backend, backend._all_gather(output, output[7 * me : 7 * me + 7]))
            assert bits(output) == bits(torch.cat(parts)), "in place"
    if backend.supports("barrier", torch.uint8):
        finish(backend, backend._barrier())


def law_own_sums_have_the_same_bits(backend: Backend) -> None:
    """Rounded sums: whatever the order of additions, it is one order for all ranks."""
    for dtype in (torch.float32, torch.float64):
        for length in (1, 3, 1023, 100_000):
            if not backend.supports("all_reduce", dtype, ReduceOp.SUM):
                continue
            inputs = [
                torch.randn(length, dtype=dtype, generator=torch.Generator(backend.device).manual_seed(rank))
                for rank in range(backend.size)
            ]
            result = inputs[backend.rank].clone()
            finish(backend, backend._all_reduce(result, ReduceOp.SUM))
            exact = torch.stack(inputs).double().sum(0)
            torch.testing.assert_close(result.double(), exact, rtol=0, atol=1e-5)
            everyone = torch.zeros(backend.size * length, dtype=dtype)
            everyone[backend.rank * length : (backend.rank + 1) * length] = result
            others = [rank for rank in range(backend.size) if rank != backend.rank]
            ops = [P2P.recv(everyone[rank * length : (rank + 1) * length], rank) for rank in others]
            ops += [P2P.send(result, rank) for rank in others]
            if ops:
                finish(backend, backend._post(ops, TAG), len(ops))
            for rank in range(backend.size):
                assert bits(everyone[rank * length : (rank + 1) * length]) == bits(result)


def law_refusals(backend: Backend) -> None:
    """Reductions that the libraries do not do as the contract says are never offered."""
    for operation in ("all_reduce", "reduce_scatter"):
        for dtype in (torch.float16, torch.bfloat16, torch.bool, torch.float8_e4m3fn):
            assert not any(backend.supports(operation, dtype, op) for op in ReduceOp)
        for dtype in (torch.float32, torch.float64):
            assert not backend.supports(operation, dtype, ReduceOp.MIN), "NaN would be lost"


def law_integers_wrap(backend: Backend) -> None:
    """A sum beyond the largest value wraps around, as torch's does, at every length (vectorized ends and middles)."""
    for dtype in (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64):
        for length in (1, 7, 1023):
            if backend.supports("all_reduce", dtype, ReduceOp.SUM):
                result = torch.full((length,), torch.iinfo(dtype).max - 3, dtype=dtype)
                expected = reference.all_reduce([result.clone()] * backend.size)
                finish(backend, backend._all_reduce(result, ReduceOp.SUM))
                assert torch.equal(result, expected), dtype


def law_split(backend: Backend, name: str = "seam/1") -> None:
    """Members in an order of their own get the ranks of that order, and messages of their own."""
    members = list(range(backend.size))[::-1][: max(1, backend.size - 1)]
    if backend.rank not in members:
        return
    part = backend._split(members, name)
    assert (part.rank, part.size) == (members.index(backend.rank), len(members))
    law_messages_of_every_dtype(part)
    law_own_collectives(part)
    part._close()


LAWS: list[Callable[[Backend], None]] = [
    law_messages_of_every_dtype,
    law_order_and_tags,
    law_large_messages_both_ways,
    law_own_collectives,
    law_own_sums_have_the_same_bits,
    law_refusals,
    law_integers_wrap,
    law_split,
]


def all_laws(comm: Communicator) -> None:
    """Every law, on the transport under a communicator that is idle meanwhile."""
    for law in LAWS:
        with comm._transport.device:  # where tensors are made
            law(comm._transport)
        comm.barrier()
