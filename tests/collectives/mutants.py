"""Backends and communicators with one planted fault each, over threads. The conformance suite must catch every one.

``MUTANTS`` maps a name to (factory, the part of the contract that it breaks).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from collectives import P2P, Communicator, ReduceOp, Work
from collectives.arguments import Flat
from collectives.backend import Pending
from collectives.backends.threads import ThreadsBackend, World
from collectives.conformance.rank import Connect, Factory
from collectives.errors import CommError
from collectives.schedules.executor import Post, Posted
from collectives.statistics import Row
from collectives.types import RankInfo

CALL_TIMEOUT = 4.0


def healthy(world_size: int) -> Connect:
    world = World(world_size)
    return lambda rank: ThreadsBackend(world, rank)


def transport(kind: type[ThreadsBackend]) -> Factory:
    def factory(world_size: int) -> Connect:
        world = World(world_size)
        return lambda rank: kind(world, rank)

    return factory


def communicator(kind: type[Communicator]) -> Factory:
    def factory(world_size: int) -> Connect:
        world = World(world_size)

        def connect(rank: int) -> Communicator:
            info = RankInfo(rank=rank, world_size=world_size, local_rank=rank, local_world_size=world_size)
            return kind(ThreadsBackend(world, rank), info, name="mutant", timeout=CALL_TIMEOUT)

        return connect

    return factory


# Faulty transports


class _Transport(ThreadsBackend):
    """Groups split from a faulty transport are faulty too."""

    def _split(self, members: Sequence[int], name: str) -> ThreadsBackend:
        return type(self)(self.world, members.index(self.rank), [self.members[m] for m in members], name)


class DropsTheLastElement(_Transport):
    def _post(self, ops: Sequence[P2P], tag: int) -> Any:
        return super()._post([op._replace(tensor=op.tensor[: max(1, op.tensor.numel() - 1)]) for op in ops], tag)


class LosesTheTag(_Transport):
    def _post(self, ops: Sequence[P2P], tag: int) -> Any:
        return super()._post(ops, min(tag, 1))


class _Hasty:
    """Says that it is done without looking."""

    def __init__(self, pending: Pending) -> None:
        self._pending = pending

    def poll(self) -> bool:
        self._pending.poll()
        return True

    def wait(self, i: int, deadline: float) -> None:
        self.poll()


class ReturnsBeforeDone(_Transport):
    def _post(self, ops: Sequence[P2P], tag: int) -> Any:
        return _Hasty(super()._post(ops, tag))


class _Lazy(_Hasty):
    """Makes progress only when waited for."""

    def poll(self) -> bool:
        return False

    def wait(self, i: int, deadline: float) -> None:
        self._pending.wait(i, deadline)


class CannotBePolled(_Transport):
    def _post(self, ops: Sequence[P2P], tag: int) -> Any:
        return _Lazy(super()._post(ops, tag))


class IgnoresDeadlines(_Transport):
    def _post(self, ops: Sequence[P2P], tag: int) -> Any:
        pending = super()._post(ops, tag)
        wait = pending.wait

        def patient(i: int, deadline: float) -> None:
            wait(i, deadline + 60.0)

        pending.wait = patient  # type: ignore[method-assign]
        return pending


class OvertakesItself(_Transport):
    """Of several messages that wait for their receiver, the last one arrives first."""

    def _post(self, ops: Sequence[P2P], tag: int) -> Any:
        pending = super()._post(ops, tag)
        with self.world.changed:
            for op in ops:
                waiting = self.world.sends[self.group, self.rank, op.peer, tag]
                if op.sends and len(waiting) > 1:
                    waiting.rotate(1)
        return pending


class ForgetsTheKey(ThreadsBackend):
    """The ranks of a group are in the order of their old ranks."""

    def _split(self, members: Sequence[int], name: str) -> ThreadsBackend:
        return super()._split(sorted(members), name)


class HearsItsParent(_Transport):
    def _split(self, members: Sequence[int], name: str) -> ThreadsBackend:
        return super()._split(members, self.group)


class SurvivesItsAbort(_Transport):
    def _kill(self) -> None:
        return


# Faulty collectives of a library's own


class _Native(_Transport):
    """Has an all_reduce of its own: everyone sends all to all, and adds in rank order."""

    def supports(self, operation: str, dtype: torch.dtype, op: ReduceOp | None = None) -> bool:
        return operation == "all_reduce"

    def _all_reduce(self, tensor: torch.Tensor, op: ReduceOp) -> Any:
        terms = [tensor.clone() if peer == self.rank else torch.empty_like(tensor) for peer in range(self.size)]
        peers = [peer for peer in range(self.size) if peer != self.rank]
        mine = terms[self.rank]
        ops = [*(P2P.send(mine, peer) for peer in peers), *(P2P.recv(terms[peer], peer) for peer in peers)]
        pending = ThreadsBackend._post(self, ops, 0)
        for i in range(len(ops)):
            pending.wait(i, time.monotonic() + CALL_TIMEOUT)
        tensor.view(torch.uint8).copy_(self.combine(terms, op).view(torch.uint8))
        return pending

    def combine(self, terms: list[torch.Tensor], op: ReduceOp) -> torch.Tensor:
        functions: dict[ReduceOp, Callable[..., torch.Tensor]] = {
            ReduceOp.SUM: torch.add,
            ReduceOp.PRODUCT: torch.mul,
            ReduceOp.MIN: torch.minimum,
            ReduceOp.MAX: torch.maximum,
            ReduceOp.BAND: torch.bitwise_and,
            ReduceOp.BOR: torch.bitwise_or,
            ReduceOp.BXOR: torch.bitwise_xor,
        }
        total = terms[0]
        for term in terms[1:]:
            total = functions[op](total, term)
        return total


class AccumulatesIn16Bits(_Native):
    pass  # it says that it serves every dtype, and adds 16-bit floats as they are


class _WithoutSixteenBits(_Native):
    def supports(self, operation: str, dtype: torch.dtype, op: ReduceOp | None = None) -> bool:
        return super().supports(operation, dtype, op) and dtype not in (torch.float16, torch.bfloat16)


class AddsFromItself(_WithoutSixteenBits):
    """Each rank begins with its own contribution: every rank gets other bits."""

    def combine(self, terms: list[torch.Tensor], op: ReduceOp) -> torch.Tensor:
        return super().combine(terms[self.rank :] + terms[: self.rank], op)


class LosesNotANumber(_WithoutSixteenBits):
    def combine(self, terms: list[torch.Tensor], op: ReduceOp) -> torch.Tensor:
        if op is ReduceOp.MAX and terms[0].is_floating_point():
            return torch.stack(terms).nan_to_num(-torch.inf).amax(0)
        return super().combine(terms, op)


class AddsBoolAsBytes(_WithoutSixteenBits):
    def combine(self, terms: list[torch.Tensor], op: ReduceOp) -> torch.Tensor:
        if op is ReduceOp.SUM and terms[0].dtype is torch.bool:
            return super().combine([term.view(torch.uint8) for term in terms], op).view(torch.bool)
        return super().combine(terms, op)


class PromisesTooMuch(_WithoutSixteenBits):
    """Says that it has a reduce_scatter, and does not."""

    def supports(self, operation: str, dtype: torch.dtype, op: ReduceOp | None = None) -> bool:
        return operation == "reduce_scatter"


# Faulty communicators


class AveragesByNumel(Communicator):
    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = ReduceOp.SUM, **options: Any) -> Work:
        if op is not ReduceOp.AVG:
            return super().all_reduce(tensor, op, **options)
        work = super().all_reduce(tensor, ReduceOp.AVG, **options)
        work.wait()
        tensor.mul_(self.world_size / max(1, tensor.numel()))
        return work


class ForgetsToAverage(Communicator):
    def reduce_scatter(
        self, output: torch.Tensor, input: torch.Tensor, op: ReduceOp = ReduceOp.SUM, **options: Any
    ) -> Work:
        return super().reduce_scatter(output, input, ReduceOp.SUM if op is ReduceOp.AVG else op, **options)


class ForgetsTheCopyBack(Communicator):
    def _flat(self, tensor: torch.Tensor, name: str, written: bool = False) -> Flat:
        return super()._flat(tensor, name, written)._replace(target=None)


class WritesBesideTheTensor(Communicator):
    def broadcast(self, tensor: torch.Tensor, src: int, **options: Any) -> Work:
        work = super().broadcast(tensor, src, **options)
        work.wait()
        if tensor.storage_offset() > 0:
            tensor.detach().as_strided((1,), (1,), tensor.storage_offset() - 1).zero_()
        return work


class SwapsTwoChunks(Communicator):
    def all_gather(self, output: torch.Tensor, input: torch.Tensor, **options: Any) -> Work:
        work = super().all_gather(output, input, **options)
        work.wait()
        if self.world_size > 1 and output.dim() > 1:
            output[:2] = output[:2].flip(0).clone()
        return work


class ReducesInsideTheInput(Communicator):
    def reduce_scatter(
        self, output: torch.Tensor, input: torch.Tensor, op: ReduceOp = ReduceOp.SUM, **options: Any
    ) -> Work:
        work = super().reduce_scatter(output, input, op, **options)
        work.wait()
        if input.numel():
            input.reshape(self.world_size, -1)[self.rank] = output.reshape(-1)
        return work


class ReducesEverywhere(Communicator):
    """Partial sums, here whole ones, stay on ranks that are not the destination."""

    def reduce(self, tensor: torch.Tensor, dst: int, op: ReduceOp = ReduceOp.SUM, **options: Any) -> Work:
        return self.all_reduce(tensor, op, async_op=bool(options.get("async_op")))


class TakesTheWrongRoot(Communicator):
    def broadcast(self, tensor: torch.Tensor, src: int, **options: Any) -> Work:
        return super().broadcast(tensor, (src + 1) % self.world_size, **options)


class SendsStaleScratch(Communicator):
    """Packs a strided tensor once, and sends the same packet again the next time."""

    def _flat(self, tensor: torch.Tensor, name: str, written: bool = False) -> Flat:
        flat = super()._flat(tensor, name, written)
        packets: dict[tuple[torch.dtype, int], torch.Tensor] = self.__dict__.setdefault("_packets", {})
        if not written and tensor.numel() and not tensor.is_contiguous():
            return flat._replace(tensor=packets.setdefault((tensor.dtype, tensor.numel()), flat.tensor))
        return flat


class MiscountsUnevenSizes(Communicator):
    def all_gather_v(self, output: torch.Tensor, input: torch.Tensor, sizes: Sequence[int], **options: Any) -> Work:
        work = super().all_gather_v(output, input, sizes, **options)
        work.wait()
        if len(set(sizes)) > 1 and output.numel() > 1:
            output[1:] = output[:-1].clone()
        return work


class RoundsOnOneRank(Communicator):
    """The last bit differs on rank 1, where the result is no whole number."""

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = ReduceOp.SUM, **options: Any) -> Work:
        work = super().all_reduce(tensor, op, **options)
        work.wait()
        if self.rank == 1 and tensor.dtype is torch.float32:
            beside = torch.nextafter(tensor.detach(), torch.tensor(torch.inf))
            tensor.detach().copy_(torch.where(tensor.detach().frac() == 0, tensor.detach(), beside))
        return work


class LeavesBarriersEarly(Communicator):
    def barrier(self, *, async_op: bool = False, timeout: float | None = None) -> Work:
        return super().exchange([], async_op=async_op, timeout=timeout)


class TruncatesIntegerAverages(Communicator):
    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = ReduceOp.SUM, **options: Any) -> Work:
        integer = isinstance(tensor, torch.Tensor) and not (tensor.is_floating_point() or tensor.is_complex())
        return super().all_reduce(tensor, ReduceOp.SUM if op is ReduceOp.AVG and integer else op, **options)


class IgnoresTheCountLimit(Communicator):
    def _poster(self, row: Row, tag: int) -> Post:
        return lambda ops: Posted(self._transport._post(ops, tag), len(ops))


class SkipsEmptyTensors(Communicator):
    """One rank leaves out what has no elements, and is out of step from then on."""

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = ReduceOp.SUM, **options: Any) -> Work:
        if self.rank == 0 and isinstance(tensor, torch.Tensor) and tensor.numel() == 0:
            tensor = tensor.new_zeros(1)
        return super().all_reduce(tensor, op, **options)


class WaitsOnlyOnce(Communicator):
    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = ReduceOp.SUM, **options: Any) -> Work:
        work = super().all_reduce(tensor, op, **options)
        if options.get("async_op"):
            waits: Iterator[None] = iter([None])
            once = work.wait

            def wait(timeout: float | None = None) -> None:
                if next(waits, self) is self:
                    raise CommError("this Work was waited for before")
                once(timeout)

            work.wait = wait  # type: ignore[method-assign]
        return work


MUTANTS: dict[str, tuple[Factory, str]] = {
    kind.__name__: (communicator(kind) if issubclass(kind, Communicator) else transport(kind), group)
    for kind, group in (
        (AveragesByNumel, "precision"),
        (ForgetsToAverage, "precision"),
        (ForgetsTheCopyBack, "all_reduce"),
        (WritesBesideTheTensor, "broadcast"),
        (DropsTheLastElement, "all_gather"),
        (SwapsTwoChunks, "all_gather"),
        (ReducesInsideTheInput, "reduce_scatter"),
        (ReducesEverywhere, "reduce"),
        (TakesTheWrongRoot, "broadcast"),
        (SendsStaleScratch, "gather and scatter"),
        (LosesTheTag, "messages"),
        (OvertakesItself, "messages"),
        (ReturnsBeforeDone, "work"),
        (CannotBePolled, "work"),
        (WaitsOnlyOnce, "work"),
        (LeavesBarriersEarly, "work"),
        (AccumulatesIn16Bits, "precision"),
        (AddsFromItself, "precision"),
        (LosesNotANumber, "precision"),
        (RoundsOnOneRank, "precision"),
        (AddsBoolAsBytes, "precision"),
        (MiscountsUnevenSizes, "all_gather"),
        (TruncatesIntegerAverages, "arguments"),
        (SkipsEmptyTensors, "all_reduce"),
        (IgnoresTheCountLimit, "limits"),
        (PromisesTooMuch, "capabilities"),
        (ForgetsTheKey, "groups"),
        (HearsItsParent, "groups"),
        (IgnoresDeadlines, "failures"),
        (SurvivesItsAbort, "failures"),
    )
}
