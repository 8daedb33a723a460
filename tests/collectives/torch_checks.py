"""What torch.distributed promises of its default group, checked against answers computed without communication."""

from __future__ import annotations

import io
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import collectives
from collectives.torch_backend import features

_c10d: Any = dist  # the type stubs leave out some public names


def data(rank: int, *shape: int, seed: int = 0) -> torch.Tensor:
    """A rank's values: whole numbers, so that sums are exact."""
    return (torch.arange(torch.Size(shape).numel(), dtype=torch.float32) * 3 + rank * 7 + seed).reshape(shape)


def who() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


def total(size: int, *shape: int, seed: int = 0) -> torch.Tensor:
    return sum((data(rank, *shape, seed=seed) for rank in range(size)), torch.zeros(shape))


def expect(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def check_all_reduce() -> None:
    rank, size = who()
    everyone = torch.stack([data(r, 2, 3) for r in range(size)])
    for op, expected in (
        (dist.ReduceOp.SUM, everyone.sum(0)),
        (dist.ReduceOp.AVG, everyone.sum(0) / size),
        (dist.ReduceOp.PRODUCT, everyone.prod(0)),
        (dist.ReduceOp.MIN, everyone.amin(0)),
        (dist.ReduceOp.MAX, everyone.amax(0)),
    ):
        for async_op in (False, True):
            tensor = data(rank, 2, 3)
            work = dist.all_reduce(tensor, op, async_op=async_op)
            assert (work is None) == (not async_op)
            if work is not None:
                assert work.wait()
                assert work.wait()
                assert work.is_completed()
                assert work.is_success()
            expect(tensor, expected)
    bits = torch.tensor([1 << rank])
    dist.all_reduce(bits, dist.ReduceOp.BOR)
    assert bits.item() == 2**size - 1
    for async_op in (False, True):
        counts = torch.tensor([rank, -rank])
        _finish(dist.all_reduce(counts, dist.ReduceOp.AVG, async_op=async_op))  # towards zero
        expect(counts, torch.tensor([sum(range(size)) // size, -(sum(range(size)) // size)]))
    strided = data(rank, 3, 4).t()
    dist.all_reduce(strided)
    expect(strided, total(size, 3, 4).t())


def check_coalesced() -> None:
    rank, size = who()
    tensors = [data(rank, n, seed=n) for n in (1, 5, 0, 64)]
    dist.distributed_c10d.all_reduce_coalesced(tensors)
    for tensor in tensors:
        expect(tensor, total(size, len(tensor), seed=len(tensor)))
    with _c10d.distributed_c10d._coalescing_manager() as several:
        outputs = [torch.zeros(size * n) for n in (2, 5)]
        for n, output in zip((2, 5), outputs, strict=True):
            dist.all_gather_into_tensor(output, data(rank, n))
    del several
    for n, output in zip((2, 5), outputs, strict=True):
        expect(output, torch.cat([data(r, n) for r in range(size)]))
    with _c10d.distributed_c10d._coalescing_manager(async_ops=True) as pending:
        parts = [torch.zeros(n) for n in (2, 5)]
        for n, part in zip((2, 5), parts, strict=True):
            dist.reduce_scatter_tensor(part, data(rank, n * size))
    pending.wait()
    for n, part in zip((2, 5), parts, strict=True):
        expect(part, total(size, n * size)[rank * n : rank * n + n])
    with _c10d.distributed_c10d._coalescing_manager(device=torch.device("cpu"), async_ops=True) as pending:
        gathered = [torch.zeros(3) for _ in range(size)]
        dist.all_gather(gathered, data(rank, 3))
    pending.wait()
    for r, tensor in enumerate(gathered):
        expect(tensor, data(r, 3))


def check_gathers() -> None:
    rank, size = who()
    everyone = [data(r, 2, 3) for r in range(size)]
    for async_op in (False, True):
        for name in ("all_gather_into_tensor", "all_gather_single"):  # the older name and the newer
            whole = torch.zeros(2 * size, 3)
            _finish(getattr(dist, name)(whole, everyone[rank], async_op=async_op))
            expect(whole, torch.cat(everyone))
        apart, beside = [torch.zeros(2, 3) for _ in everyone], list(torch.zeros(2 * size, 3).chunk(size))
        for parts in (apart, beside):
            _finish(dist.all_gather(parts, everyone[rank], async_op=async_op))
            expect(torch.cat(parts), torch.cat(everyone))
        uneven = [torch.zeros(r + 1) for r in range(size)]
        _finish(dist.all_gather(uneven, data(rank, rank + 1), async_op=async_op))
        expect(torch.cat(uneven), torch.cat([data(r, r + 1) for r in range(size)]))
        for root in range(size):
            got = [torch.zeros(2, 3) for _ in everyone]
            _finish(dist.gather(everyone[rank], got if rank == root else None, dst=root, async_op=async_op))
            if rank == root:
                expect(torch.cat(got), torch.cat(everyone))
            mine = torch.zeros(2, 3)
            _finish(dist.scatter(mine, everyone if rank == root else None, src=root, async_op=async_op))
            expect(mine, everyone[rank])


def _finish(work: Any) -> None:
    if work is not None:
        work.wait()


def check_roots() -> None:
    rank, size = who()
    for root in range(size):
        tensor = data(rank, 5)
        dist.broadcast(tensor, root)
        expect(tensor, data(root, 5))
        tensor = data(rank, 5)
        dist.reduce(tensor, root)
        expect(tensor, total(size, 5) if rank == root else data(rank, 5))


def check_reduce_scatter() -> None:
    rank, size = who()
    for async_op in (False, True):
        part = torch.zeros(2, 3)
        for name in ("reduce_scatter_tensor", "reduce_scatter_single"):  # the older name and the newer
            _finish(getattr(dist, name)(part, data(rank, 2 * size, 3), async_op=async_op))
            expect(part, total(size, 2 * size, 3)[2 * rank : 2 * rank + 2])
        _finish(dist.reduce_scatter_tensor(part, data(rank, 2 * size, 3), dist.ReduceOp.AVG, async_op=async_op))
        expect(part, total(size, 2 * size, 3)[2 * rank : 2 * rank + 2] / size)
        uneven = torch.zeros(rank + 1)
        _finish(dist.reduce_scatter(uneven, [data(rank, r + 1, seed=r) for r in range(size)], async_op=async_op))
        expect(uneven, total(size, rank + 1, seed=rank))


def check_all_to_all() -> None:
    rank, size = who()
    for async_op in (False, True):
        got = torch.zeros(2 * size, 3)
        _finish(dist.all_to_all_single(got, data(rank, 2 * size, 3), async_op=async_op))
        expect(got, torch.cat([data(r, 2 * size, 3)[2 * rank : 2 * rank + 2] for r in range(size)]))
        sent, received = [d + 1 for d in range(size)], [rank + 1] * size
        got = torch.zeros(sum(received), 2)
        _finish(dist.all_to_all_single(got, data(rank, sum(sent), 2), received, sent, async_op=async_op))
        start = sum(sent[:rank])
        expect(got, torch.cat([data(r, sum(sent), 2)[start : start + rank + 1] for r in range(size)]))
        parts = [torch.zeros(rank + 1) for _ in range(size)]
        _finish(dist.all_to_all(parts, [data(rank, d + 1, seed=d) for d in range(size)], async_op=async_op))
        expect(torch.cat(parts), torch.cat([data(r, rank + 1, seed=rank) for r in range(size)]))


def check_messages() -> None:
    rank, size = who()
    after, before = (rank + 1) % size, (rank - 1) % size
    got = torch.zeros(4)
    if size > 1:
        requests = [dist.isend(data(rank, 4), after, tag=3), dist.irecv(got, before, tag=3)]
        for request in requests:
            request.wait()
        expect(got, data(before, 4))
        if rank < 2:
            dist.send(data(rank, 4), 1, tag=1) if rank == 0 else dist.recv(got, 0, tag=1)
            expect(got, data(before, 4) if rank == 0 else data(0, 4))
        ops = [dist.P2POp(dist.isend, data(rank, 4), after), dist.P2POp(dist.irecv, got, before)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        expect(got, data(before, 4))
    with pytest.raises(RuntimeError, match="recv_anysource"):
        dist.recv(got)


def check_objects() -> None:
    rank, size = who()
    found: list[Any] = [None] * size
    dist.all_gather_object(found, {"rank": rank, "text": "x" * rank})
    assert found == [{"rank": r, "text": "x" * r} for r in range(size)]
    objects = [("of", 0), None] if rank == 0 else [None, None]
    dist.broadcast_object_list(objects, 0)
    assert objects == [("of", 0), None]
    gathered: list[Any] | None = [None] * size if rank == 0 else None
    dist.gather_object(rank, gathered, 0)
    assert gathered == (list(range(size)) if rank == 0 else None)
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, list("abcdefgh"[:size]) if rank == 0 else None, 0)
    assert mine == ["abcdefgh"[rank]]


def check_futures() -> None:
    rank, size = who()
    tensor = data(rank, 5)
    work = dist.all_reduce(tensor, async_op=True)
    doubled = work.get_future().then(lambda future: future.value()[0] * 2)
    expect(doubled.wait(), total(size, 5) * 2)
    expect(work.result()[0], total(size, 5))


class _Backward(torch.autograd.Function):
    """Its backward calls ``body``, as DDP starts the reduction of a bucket from within a backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, body: Callable[[], None]) -> torch.Tensor:
        ctx.body = body
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        ctx.body()
        return grads[0], None


def in_backward(body: Callable[[], None]) -> None:
    _Backward.apply(torch.ones(1, requires_grad=True), body).sum().backward()  # type: ignore[no-untyped-call]


def check_futures_in_backward() -> None:
    """A backward goes on before its operations have their peers, and they are complete at its end."""
    rank, size = who()
    store, futures, at_end = _c10d.group.WORLD.get_group_store(), [], []

    def again(future: Any) -> torch.Tensor:
        tensor = future.value()[0]
        return dist.all_reduce(tensor, async_op=True).get_future().wait()[0]  # type: ignore[union-attr]

    def body() -> None:
        for seed in range(3):
            work: Any = dist.all_reduce(data(rank, 5, seed=seed), async_op=True)
            futures.append(work.get_future())
            futures.append(futures[-1].then(again))
        assert not any(future.done() for future in futures)
        assert features.at_end_of_backward(lambda: at_end.extend(future.done() for future in futures))
        store.set("first has gone on", "")

    if rank:
        store.wait(["first has gone on"])
    in_backward(body)
    assert at_end == [True] * 6
    for seed in range(3):
        expect(futures[2 * seed + 1].value(), total(size, 5, seed=seed) * size)
    del futures[:]

    def fails() -> None:
        futures.append(dist.all_reduce(data(rank, 5), async_op=True).get_future())  # type: ignore[union-attr]
        raise ArithmeticError("planted")

    with pytest.raises(ArithmeticError, match="planted"):
        in_backward(fails)
    in_backward(lambda: futures.append(_c10d.all_reduce(data(rank, 5, seed=1), async_op=True).get_future()))
    for seed, future in enumerate(futures):
        expect(future.value()[0], total(size, 5, seed=seed))
    in_backward(lambda: expect(_c10d.all_reduce(data(rank, 5), async_op=True).get_future().wait()[0], total(size, 5)))

    def late() -> None:
        at_end[:] = [_c10d.all_reduce(data(rank, 5), async_op=True).get_future().done()]

    in_backward(lambda: expect(torch.tensor(features.at_end_of_backward(late)), torch.tensor(True)))
    assert at_end == [True]


def check_functional() -> None:
    rank, size = who()
    group = dist.group.WORLD
    expect(funcol.all_reduce(data(rank, 5), "sum", group) + 0, total(size, 5))
    expect(funcol.all_gather_tensor(data(rank, 2, 2), 0, group) + 0, torch.cat([data(r, 2, 2) for r in range(size)]))
    expect(funcol.all_gather_tensor(data(rank, 2, 2), 1, group) + 0, torch.cat([data(r, 2, 2) for r in range(size)], 1))
    part = funcol.reduce_scatter_tensor(data(rank, 2 * size), "sum", 0, group) + 0
    expect(part, total(size, 2 * size)[2 * rank : 2 * rank + 2])
    expect(funcol.broadcast(data(rank, 3), 0, group) + 0, data(0, 3))
    got = funcol.all_to_all_single(data(rank, size), None, None, group) + 0
    expect(got, torch.cat([data(r, size)[rank : rank + 1] for r in range(size)]))
    for r, tensor in enumerate(funcol.all_reduce_coalesced([data(rank, 2), data(rank, 3)], "avg", group)):
        expect(tensor + 0, total(size, r + 2) / size)
    gathered = funcol.all_gather_into_tensor_coalesced([data(rank, 2), data(rank, 3)], group)
    for n, tensor in zip((2, 3), gathered, strict=True):
        expect(tensor + 0, torch.cat([data(r, n) for r in range(size)]))
    parts = funcol.reduce_scatter_tensor_coalesced([data(rank, size), data(rank, 3 * size)], "sum", [0, 0], group)
    for n, tensor in zip((1, 3), parts, strict=True):
        expect(tensor + 0, total(size, n * size)[rank * n : rank * n + n])


def check_groups() -> None:
    rank, size = who()
    halves = [[r for r in range(size) if r % 2 == half] for half in range(2)]
    groups = [dist.new_group(members) for members in halves if members]
    mine = halves[rank % 2]
    tensor = data(rank, 3)
    dist.all_reduce(tensor, group=groups[rank % 2])
    expect(tensor, sum((data(r, 3) for r in mine), torch.zeros(3)))
    last = mine[-1]
    tensor = data(rank, 3)
    dist.broadcast(tensor, last, group=groups[rank % 2])  # by its global rank
    expect(tensor, data(last, 3))
    for number, group in enumerate(groups):
        if number == rank % 2:
            dist.destroy_process_group(group)
    everyone = dist.new_group(timeout=timedelta(seconds=20))
    dist.barrier(group=everyone, async_op=True).wait()
    dist.barrier(timeout=timedelta(seconds=20))
    check_roots()


def check_meshes() -> None:
    rank, size = who()
    line = init_device_mesh("cpu", (size,), mesh_dim_names=("all",))
    assert line.get_local_rank() == rank
    rows = 2 if size % 2 == 0 else 1
    grid = init_device_mesh("cpu", (rows, size // rows), mesh_dim_names=("row", "column"))
    tensor = data(rank, 3)
    dist.all_reduce(tensor, group=grid.get_group("column"))
    neighbours = DeviceMesh("cpu", torch.arange(size).view(rows, -1)).mesh[rank // (size // rows)].tolist()
    expect(tensor, sum((data(r, 3) for r in neighbours), torch.zeros(3)))


def check_refusals() -> None:
    rank, _ = who()
    refusal = _refusal(dist.monitored_barrier)  # from 2.15 on torch lets it reach a group written in Python
    assert refusal is None or "monitored_barrier" in refusal
    with pytest.raises(RuntimeError, match="split"):
        dist.split_group(split_ranks=[[0]])
    group: Any = dist.group.WORLD
    with pytest.raises(RuntimeError, match=r"split_group.*new_group"):
        group.split_group([0])
    with pytest.raises(RuntimeError, match="PREMUL_SUM"):
        dist.all_reduce(data(rank, 2), _c10d._make_nccl_premul_sum(2.0))
    with pytest.raises(TypeError, match="AVG"):
        dist.all_reduce(torch.ones(2, dtype=torch.bool), dist.ReduceOp.AVG)
    with pytest.raises(RuntimeError, match="pg_options"):
        dist.new_group([0, *range(1, dist.get_world_size())], pg_options=object())
    with pytest.raises(TypeError, match="dense"):
        dist.all_reduce(torch.ones(2, 2).to_sparse())
    group.monitored_barrier(timedelta(seconds=20))


def _refusal(call: Callable[[], object]) -> str | None:
    try:
        call()
    except (RuntimeError, ValueError) as error:
        return str(error)
    return None


def check_borrowed() -> None:
    """A communicator over the group, which stays there when that one is closed."""
    rank, size = who()
    with collectives.from_process_group(dist.group.WORLD, timeout=20.0) as comm:
        assert (comm.rank, comm.world_size) == (rank, size)
        tensor = data(rank, 5)
        comm.all_reduce(tensor)
        expect(tensor, total(size, 5))
        half = comm.split(rank % 2)
        assert half is not None
        tensor = data(rank, 5)
        half.all_reduce(tensor)
        expect(tensor, sum((data(r, 5) for r in range(rank % 2, size, 2)), torch.zeros(5)))
    tensor = data(rank, 5)
    dist.all_reduce(tensor)
    expect(tensor, total(size, 5))


def check_who() -> None:
    group: Any = dist.group.WORLD
    rank, size = who()
    assert (group.rank(), group.size()) == (rank, size)
    assert dist.get_backend() == group.name()
    assert group.group_name == dist.distributed_c10d._get_default_group().group_name
    assert group._device_types == [torch.device("cpu")]
    assert torch.load(io.BytesIO(_saved(group.group_desc)), weights_only=True) == group.group_desc
    assert group.comm.world_size == size
    group.set_timeout(timedelta(seconds=33))
    assert group.comm.timeout == 33.0


def _saved(obj: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(obj, buffer)
    return buffer.getvalue()


CHECKS: list[Callable[[], None]] = [
    check_all_reduce,
    check_coalesced,
    check_gathers,
    check_roots,
    check_reduce_scatter,
    check_all_to_all,
    check_messages,
    check_objects,
    check_futures,
    check_futures_in_backward,
    check_functional,
    check_groups,
    check_meshes,
    check_refusals,
    check_borrowed,
    check_who,
]
