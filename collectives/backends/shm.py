"""Shared memory inside a host, as a layer over another transport.

The transport below brings the ranks together, carries messages, and reaches other hosts. Collectives among ranks that
share a host are made of reads and writes in memory that all of them have mapped.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch

from collectives.backend import Backend, Bootstrap, Pending
from collectives.backends import between, inside
from collectives.backends.between import Hosts
from collectives.backends.neighbours import Neighbours, exchange, meet
from collectives.backends.shared_buffer import HostBuffer, all_released, header_bytes
from collectives.backends.shared_buffer import clear as clear_header
from collectives.backends.signals import Signals, clear
from collectives.backends.team import Call, Combine, Steps, Team, describe, footprint
from collectives.backends.waiters import BothWays, Waiters
from collectives.errors import UnsupportedError
from collectives.schedules.arithmetic import check_reducible
from collectives.schedules.executor import Posted
from collectives.types import P2P, ReduceOp

_log = logging.getLogger("collectives")
SmallSum: TypeAlias = tuple[Call, Combine, list[list[torch.Tensor]]]
_COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "barrier")


class _Running:
    """The collective that is under way. A communicator has one at a time, so there is one object for all."""

    def __init__(self, signals: Signals) -> None:
        self._signals = signals
        self._steps: Steps = iter(())
        self._posted: Posted | None = None
        self._ready: Callable[[], bool] = signals.arrived
        self._done = True

    def start(self, steps: Steps) -> _Running:
        self._steps = steps
        self._done = False
        self._resume()
        return self

    def drop(self) -> None:
        """Let go of what a failure has left."""
        self._done = True
        self._steps, self._posted = iter(()), None

    def _resume(self) -> None:
        """Go on to what has to be waited for next."""
        try:
            awaited = next(self._steps)
        except BaseException as end:
            self._done = True
            self._steps = iter(())  # lets go of the tensors
            if not isinstance(end, StopIteration):
                raise
            return
        if awaited is None:
            self._posted, self._ready = None, self._signals.arrived
        elif isinstance(awaited, Posted):
            self._posted, self._ready = awaited, awaited.pending.poll
        else:
            self._posted, self._ready = None, awaited

    def poll(self) -> bool:
        while not self._done:
            if not self._ready():
                self._signals.check()
                return False
            self._resume()
        return True

    def wait(self, i: int, deadline: float) -> None:
        while not self._done:
            if self._posted is None:
                if not self._ready():
                    self._signals.wait(self._ready, deadline)
            else:
                for j in range(self._posted.count):
                    self._posted.pending.wait(j, deadline)
            self._resume()


class ShmBackend(Backend):
    """One rank of a communicator, some of whose ranks share memory.

    Args:
        below: the transport, which nobody else uses.
        neighbours: what the ranks of the job share; None of it is this communicator's own.
        roots: for each rank, its rank in the job's first communicator.
        owns: whether this is that communicator, which releases the memory in the end.
        timeout: seconds that set-up may take.
    """

    polls = True
    waits = True
    averages = True
    uneven = True
    shares = True

    def __init__(
        self, below: Backend, neighbours: Neighbours, roots: Sequence[int], owns: bool, timeout: float
    ) -> None:
        self.below = below
        self.name = f"shm+{below.name}"
        self.rank = below.rank
        self.size = below.size
        self.device = below.device
        self.tags = below.tags
        self.max_tag = below.max_tag
        self.max_count = below.max_count
        self.crowded = neighbours.crowded
        self._waiters = Waiters()
        self._neighbours = neighbours
        self._roots = roots
        self._owns = owns
        self._timeout = timeout
        self._forming: Backend | None = None  # below a split that is being set up
        rank_of = {root: rank for rank, root in enumerate(roots)}
        nodes = [[rank_of[root] for root in node if root in rank_of] for node in neighbours.nodes]
        self.nodes = [sorted(node) for node in nodes if node]
        self._offset = -1
        self.team = self._form_team()
        self._hosts = Hosts(self.team, self.nodes, self._send)
        self._one_host = len(self.nodes) == 1
        self._running = _Running(self.team.signals)
        self._buffers: weakref.WeakValueDictionary[int, HostBuffer] = weakref.WeakValueDictionary()
        self._small_sums: dict[tuple[torch.dtype, int, ReduceOp], SmallSum] = {}
        self._combiners: dict[tuple[ReduceOp, torch.dtype], Combine] = {}

    def _form_team(self) -> Team:
        """Make this rank's lines and slots, and learn where the other members have theirs. Collective."""
        heap, segments = self._neighbours.heap, self._neighbours.segments
        members = next(node for node in self.nodes if self.rank in node)
        largest = max(map(len, self.nodes))
        self._offset = heap.reserve(footprint(largest))
        clear(heap.words, self._offset // 8)
        deadline = time.monotonic() + self._timeout
        offsets = [
            int.from_bytes(told, "little") - 1
            for told in exchange(self.below, (self._offset + 1).to_bytes(8, "little"), 8, deadline)
        ]
        roots = [self._roots[rank] for rank in members]
        me = members.index(self.rank)
        signals = Signals(
            [(segments[root].words, offsets[rank] // 8) for root, rank in zip(roots, members, strict=True)],
            me,
            members,
            [self._neighbours.pidfds.get(root, -1) for root in roots],
            self.crowded,
        )
        return Team(members, me, [segments[root] for root in roots], [offsets[r] for r in members], largest, signals)

    # Messages

    def _post(self, ops: Sequence[P2P], tag: int) -> Pending:
        return BothWays(self.below, self._waiters, self.crowded, self.below._post(ops, tag), len(ops))

    def _send(self, ops: Sequence[P2P]) -> Posted:
        """Messages of a collective."""
        limit = self.max_count
        if any(op.tensor.numel() > limit for op in ops):
            ops = [op._replace(tensor=part) for op in ops for part in torch.split(op.tensor, limit)]
        return Posted(self._post(ops, 0), len(ops))

    # Collectives

    def supports(self, operation: str, dtype: torch.dtype, op: ReduceOp | None = None) -> bool:
        if operation not in _COLLECTIVES:
            return False
        if op is not None:
            try:
                check_reducible(dtype, op)
            except TypeError:
                return False
        return True

    def _combiner(self, op: ReduceOp, dtype: torch.dtype) -> Combine:
        found = self._combiners.get((op, dtype))
        if found is None:
            found = self._combiners[op, dtype] = self.team.combiner(op, dtype)
        return found

    def _all_reduce(self, tensor: torch.Tensor, op: ReduceOp) -> Pending:
        small = self._small_sums.get((tensor.dtype, tensor.numel(), op))
        if small is not None:
            return self._running.start(inside.all_reduce_small(self.team, tensor, *small))
        call = describe("all_reduce", tensor.dtype, tensor.numel(), op)
        if not self._one_host:
            return self._running.start(between.all_reduce(self._hosts, call, tensor, op))
        combine = self._combiner(op, tensor.dtype)
        if tensor.nbytes > inside.SMALL_BYTES:
            return self._running.start(inside.all_reduce(self.team, call, tensor, combine))
        if len(self._small_sums) >= 1024:
            self._small_sums.clear()
        small = call, combine, self.team.slots(tensor.numel(), tensor.dtype)
        self._small_sums[tensor.dtype, tensor.numel(), op] = small
        return self._running.start(inside.all_reduce_small(self.team, tensor, *small))

    def _reduce_scatter(self, output: torch.Tensor, input: torch.Tensor, op: ReduceOp) -> Pending:
        n = output.numel()
        call = describe("reduce_scatter", input.dtype, input.numel(), op)
        return self._reduce_scatter_parts(call, output, input, range(0, n * self.size + 1, n), op)

    def _reduce_scatter_v(
        self, output: torch.Tensor, input: torch.Tensor, cuts: Sequence[int], op: ReduceOp
    ) -> Pending:
        call = describe("reduce_scatter", input.dtype, input.numel(), op, cuts=tuple(cuts))
        return self._reduce_scatter_parts(call, output, input, cuts, op)

    def _reduce_scatter_parts(
        self, call: Call, output: torch.Tensor, input: torch.Tensor, cuts: Sequence[int], op: ReduceOp
    ) -> Pending:
        if self._one_host:
            combine = self._combiner(op, input.dtype)
            steps = inside.reduce_scatter(self.team, call, output, input, cuts, combine)
        else:
            steps = between.reduce_scatter(self._hosts, call, output, input, cuts, op)
        return self._running.start(steps)

    def _all_gather(self, output: torch.Tensor, input: torch.Tensor) -> Pending:
        n = input.numel()
        call = describe("all_gather", input.dtype, output.numel())
        return self._all_gather_parts(call, output, input, range(0, n * self.size + 1, n))

    def _all_gather_v(self, output: torch.Tensor, input: torch.Tensor, cuts: Sequence[int]) -> Pending:
        call = describe("all_gather", input.dtype, output.numel(), cuts=tuple(cuts))
        return self._all_gather_parts(call, output, input, cuts)

    def _all_gather_parts(self, call: Call, output: torch.Tensor, input: torch.Tensor, cuts: Sequence[int]) -> Pending:
        buffer = self._buffers.get(output.data_ptr()) if self._buffers else None
        if buffer is not None:
            call = describe("all_gather into a shared buffer", input.dtype, buffer.offset, cuts=tuple(cuts))
            return self._running.start(between.all_gather_shared(self._hosts, call, buffer, input, cuts))
        if self._one_host:
            return self._running.start(inside.all_gather(self.team, call, output, input, cuts))
        return self._running.start(between.all_gather(self._hosts, call, output, input, cuts))

    def _broadcast(self, tensor: torch.Tensor, src: int) -> Pending:
        buffer = self._buffers.get(tensor.data_ptr()) if self._buffers else None
        if buffer is not None:
            call = describe("broadcast of a shared buffer", tensor.dtype, buffer.offset, root=src)
            return self._running.start(between.broadcast_shared(self._hosts, call, buffer, src))
        call = describe("broadcast", tensor.dtype, tensor.numel(), root=src)
        if self._one_host:
            return self._running.start(inside.broadcast(self.team, call, tensor, src))
        return self._running.start(between.broadcast(self._hosts, call, tensor, src))

    def _barrier(self) -> Pending:
        call = describe("barrier", torch.uint8, 0)
        if self._one_host:
            return self._running.start(inside.barrier(self.team, call))
        return self._running.start(between.barrier(self._hosts, call))

    # Memory and life

    def _allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        if numel * dtype.itemsize <= inside.SMALL_BYTES:
            return torch.empty(numel, dtype=dtype)
        return self._neighbours.heap.allocate(numel, dtype)

    def _offer_shared(self, numel: int, dtype: torch.dtype) -> int:
        """The first rank of the host has the buffer in its segment, and tells where."""
        if self.team.me:
            return 0
        members, heap = range(self.team.size), self._neighbours.heap
        offset = heap.reserve(header_bytes(self.team.size) + numel * dtype.itemsize)
        clear_header(heap.words, offset, self.team.size)
        heap.release(offset, lambda: all_released(heap.words, offset, members))
        return offset

    def _map_shared(self, numel: int, dtype: torch.dtype, offers: Sequence[int]) -> HostBuffer:
        keeper = self.team.ranks[0]
        segment = self._neighbours.segments[self._roots[keeper]]
        members, me = self.team.size, self.team.me
        buffer = HostBuffer(
            segment, offers[keeper], self.team.signals, members, me, numel, dtype, one_host=self._one_host
        )
        self._buffers[buffer.tensor.data_ptr()] = buffer
        return buffer

    def _split(self, members: Sequence[int], name: str) -> Backend:
        below = self.below._split(members, name)
        if all(sum(member in node for member in members) < 2 for node in self.nodes):
            return below
        roots = [self._roots[member] for member in members]
        self._forming = below
        try:
            if self.team.signals.killed:
                below._kill()
            return ShmBackend(below, self._neighbours, roots, False, self._timeout)
        finally:
            self._forming = None

    def _kill(self) -> None:
        self.team.signals.kill()
        self.below._kill()
        if (forming := self._forming) is not None:
            forming._kill()

    def _close(self) -> None:
        self._running.drop()
        self._small_sums.clear()
        all_left = self.team.leave()
        self._waiters.close()
        self.below._close()
        self._neighbours.heap.release(self._offset, all_left)
        if self._owns:
            self._neighbours.close()


def wrap(below: Backend, bootstrap: Bootstrap, nodes: Sequence[int] | None = None) -> Backend:
    """Add shared memory to a transport that has just been connected. Collective.

    Returns the transport itself, and logs why, where ranks share no memory. ``nodes``: see ``neighbours.meet``.

    Raises ``UnsupportedError`` for a transport of GPUs.
    """
    if below.device.type != "cpu":
        raise UnsupportedError(
            f"shm is memory of the host, and backend {below.name} moves tensors of {below.device}; use shm+gloo or "
            f"shm+mpi, which carry those through host memory, or {below.name} alone"
        )
    if below.size == 1:
        return below
    try:
        neighbours = meet(below, bootstrap.timeout, bootstrap.info.local_world_size, nodes)
    except UnsupportedError as error:
        if below.rank == 0:
            _log.warning("no shared memory, using %s alone: %s", below.name, error)
        return below
    if all(len(node) == 1 for node in neighbours.nodes):
        if below.rank == 0:
            _log.info("no two ranks share a host, using %s alone", below.name)
        neighbours.close()
        return below
    return ShmBackend(below, neighbours, range(below.size), True, bootstrap.timeout)
