"""One rank's end of a communicator: its life, and how operations are started on it."""

from __future__ import annotations

import os
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from types import TracebackType

import torch
from typing_extensions import Self

from collectives.arguments import Flat, check_numel, check_sizes
from collectives.backend import Backend
from collectives.capabilities import Key, Support, capabilities
from collectives.collective import NATIVE, Algorithm, Collective
from collectives.control import Control
from collectives.engine import Engine
from collectives.errors import CommClosedError, CommError
from collectives.express import Express, short_when_alone
from collectives.fork import generation
from collectives.messages import Message
from collectives.operation import Operation
from collectives.polling import Polling
from collectives.progress import Progress
from collectives.schedules.executor import Post, Posted, Scratch
from collectives.schedules.round import Schedule
from collectives.selection import Selection, Table
from collectives.statistics import Row, Statistics, Stats
from collectives.types import P2P, RankInfo, SharedBuffer, Work
from collectives.validate import Unmet, agree, meet

_AGREEMENT_TAG = 0  # of what is sent before a collective, whatever it is


class Endpoint:
    """What every public call relies on. ``Communicator`` documents the attributes."""

    def __init__(
        self,
        backend: Backend,
        info: RankInfo,
        *,
        name: str,
        layers: Sequence[str] = (),
        device: torch.device | str | None = None,
        timeout: float = 600.0,
        algorithm: str | None = None,
        table: Table | None = None,
        validate: bool = False,
        control: Control | None = None,
        group: str = "",
        members: Sequence[int] | None = None,
    ) -> None:
        self.rank = backend.rank
        self.world_size = backend.size
        self.local_rank = info.local_rank
        self.local_world_size = info.local_world_size
        self.node = info.node
        self.backend = name
        self.device = torch.device(device) if device is not None else backend.device
        self.timeout = timeout
        self._transport = backend
        self._layers = tuple(layers)
        self._validate = validate
        self._selection = Selection(backend, name, ring="ring" in layers, default=algorithm, table=table)
        self._scratch = Scratch()  # collectives run one at a time
        self._statistics = Statistics()
        self._lock = threading.RLock()
        self._generation = generation()
        self._splits = 0
        self._closed = False
        self._children: list[Endpoint] = []
        self._buffers: weakref.WeakSet[SharedBuffer] = weakref.WeakSet()
        self._to_self: defaultdict[int, deque[torch.Tensor]] = defaultdict(deque)
        self._control = control
        self._where = f"rank {self.rank} of {self.world_size} ({name})"
        watched = (group, tuple(range(self.world_size)) if members is None else members, backend._kill, control)
        self._progress: Progress
        if backend.polls:
            # A thread that polls without a pause keeps the interpreter from its peers.
            crowded = info.launcher == "threads" or info.local_world_size > (os.cpu_count() or 1)
            self._progress = Polling(*watched, waits=backend.waits, crowded=crowded)
        else:
            self._progress = Engine(*watched)
        self._express = Express(backend, self._progress, self._where)
        self._unmet = Unmet() if 0 < backend.meets_from < Backend.meets_from else None
        if control is not None:
            control.watch(self._progress)  # last: a peer may be lost already, and this communicator ends at once

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.backend!r} rank {self.rank} of {self.world_size} on {self.device}>"

    def capabilities(self) -> Mapping[Key, Support]:
        """How each (operation, dtype, reduce op) is carried out here: "native", "emulated" or "no".

        ``no`` is alike on every backend and raises ``TypeError``; the results of the others are alike too.
        """
        return capabilities(self._transport, schedules_only=self._selection.ring)

    def stats(self) -> Stats:
        """What was called, sent and waited for so far. Subtract two snapshots to measure what lies between."""
        return self._statistics.snapshot()

    def abort(self, reason: str) -> None:
        """End the communicator now, from any thread: pending and later calls raise ``CommClosedError``."""
        self._abort(f"{self._where} aborted: {reason}")

    def _abort(self, message: str, leaves: bool = False) -> None:
        for child in self._children:
            child._abort(message, leaves)
        self._progress.abort(message, leaves)

    def _abandon(self, error: BaseException) -> None:
        """This rank leaves, by an exception: to its peers it is lost."""
        self._abort(f"{self._where}: its program ended with {type(error).__name__}: {error}", leaves=True)

    def close(self) -> None:
        """Finish what is pending, then release everything. Calling it again does nothing."""
        if self._closed or generation() != self._generation:
            return
        try:
            for work in self._progress.pending:
                if self._progress.failure is None:  # else whoever waits for the work is told, not who closes
                    work.wait()
        finally:
            self._closed = True
            self._express.forget()
            for child in self._children:
                child.close()
            if self._control is not None and not self._progress.name:
                self._control.close()
            self._progress.close()
            self._transport._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not self._closed and self._progress.failure is None:
            self._abandon(error)  # its peers must not wait for a rank that is leaving
        try:
            self.close()
        except CommError:
            if error is None:
                raise

    # Starting operations

    def _flat(self, tensor: torch.Tensor, name: str, written: bool = False) -> Flat:
        return Flat.of(tensor, name, self.device, self._transport.device, written)

    def _even_sizes(self, part: torch.Tensor, part_name: str, whole: torch.Tensor, whole_name: str) -> list[int]:
        check_numel(part_name, part, part.numel(), "")
        why = f"world_size {self.world_size} times the {part.numel()} of {part_name}"
        check_numel(whole_name, whole, self.world_size * part.numel(), why)
        return [part.numel()] * self.world_size

    def _check_sizes(
        self, sizes: Sequence[int], part: tuple[torch.Tensor, str], whole: tuple[torch.Tensor, str]
    ) -> None:
        check_sizes("sizes", sizes, self.world_size)
        check_numel(part[1], part[0], sizes[self.rank], f"sizes[{self.rank}]")
        check_numel(whole[1], whole[0], sum(sizes), "the sum of sizes")

    def _poster(self, row: Row, tag: int) -> Post:
        limit = self._transport.max_count

        def post(ops: Sequence[P2P]) -> Posted:
            longest = 0
            for sends, tensor, _ in ops:
                longest = max(longest, tensor.numel())
                if sends:
                    row.sent_bytes += tensor.nbytes
            if longest > limit:
                ops = [op._replace(tensor=part) for op in ops for part in torch.split(op.tensor, limit)]
            return Posted(self._transport._post(ops, tag), len(ops))

        return post

    def _collective(
        self,
        call: Collective,
        flats: Sequence[Flat],
        async_op: bool = False,
        timeout: float | None = None,
        algorithm: Algorithm = None,
    ) -> Work:
        choice = self._selection.choose(call, algorithm)
        if self._buffers:
            self._check_shared(call, choice)
        row = self._statistics.row(call.operation)
        if choice == NATIVE:
            row.sent_bytes += call.least_bytes(self.world_size, self.rank)
        steps: Iterator[Posted] = iter(())
        if call.numel:
            steps = call.steps(self._transport, choice, self._poster(row, call.tag(choice)), self._scratch, flats)

        earlier = ""

        def what() -> str:
            return f"{call} by {choice if isinstance(choice, str) else choice.__name__}{earlier}"

        if self._validate:
            steps = chain(self._agree(call, what, row), steps)
        elif choice == NATIVE and self._must_meet(call):
            earlier = self._unmet.take() if self._unmet is not None else ""
            post = self._poster(Row(), call.tag(choice, earlier))  # tokens are no part of what the call sends
            steps = chain(meet(self.rank, self.world_size, self._transport.device, post), steps)
        else:
            unmet = self._unmet if choice == NATIVE else None
            if unmet is not None:
                unmet.note(what)
            if algorithm is None and not self._buffers and all(flat.target is None for flat in flats):
                alone = self.world_size == 1 and short_when_alone(call.operation) and not call.dtype.is_complex
                if (alone and call.numel) or (choice == NATIVE and call.plain and call.even):
                    self._check_usable()
                    self._express.learn(call, what, row, unmet)
        return self._start(what, steps, row, async_op, timeout)

    def _must_meet(self, call: Collective) -> bool:
        """Whether the ranks compare what they call before the library's own collective: see ``Backend.meets_from``."""
        if call.numel * call.dtype.itemsize >= self._transport.meets_from:
            return True
        unmet = self._unmet
        return unmet is not None and bool(unmet) and (unmet.full or call.operation == "barrier")

    def _shared(self, tensor: torch.Tensor) -> SharedBuffer | None:
        """The shared buffer that ``tensor`` shows, or a part of."""
        place = tensor.data_ptr()
        for buffer in self._buffers:
            if 0 <= place - buffer.tensor.data_ptr() < buffer.tensor.nbytes:
                return buffer
        return None

    def _check_shared(self, call: Collective, choice: str | Schedule) -> None:
        """A buffer that a host has once is written by nothing but an all_gather or broadcast of all of it."""
        buffer = None if call.output is None else self._shared(call.output.tensor)
        if buffer is None:
            return
        if call.operation not in ("all_gather", "broadcast") or call.numel != buffer.tensor.numel():
            raise ValueError(
                f"{call} would write into a shared buffer, which all ranks of a host have in common; expected a tensor "
                "of this rank's own, or an all_gather or broadcast of the whole buffer"
            )
        if choice != NATIVE:
            raise ValueError(f"{call} into a shared buffer runs by shared memory only; leave algorithm out")
        if not buffer.retired:
            raise ValueError(
                f"{call} into a shared buffer whose last contents this rank has not retired; call retire() when it has "
                "read them"
            )

    def _agree(self, call: Collective, what: Callable[[], str], row: Row) -> Iterator[Posted]:
        number = self._progress.calls + 1
        where = (self.rank, self.world_size, self._transport.device)
        return agree(call, what(), number, *where, self._poster(row, _AGREEMENT_TAG))

    def _start(
        self,
        what: Callable[[], str],
        steps: Iterator[Posted],
        row: Row,
        async_op: bool,
        timeout: float | None,
        messages: Sequence[Message] | None = None,
    ) -> Operation:
        """Begin an operation: a collective, or with ``messages`` a point-to-point one."""
        with self._lock:
            self._check_usable()
            row.calls += 1
            if messages is None:
                self._progress.calls += 1
            operation = Operation(
                self._progress,
                steps,
                self.timeout if timeout is None else timeout,
                where=self._where,
                what=what,
                call=self._progress.calls if messages is None else 0,
                row=row,
                messages=messages or (),
            )
            self._progress.submit(operation, sync=not async_op)
        if not async_op:
            operation.wait()
        return operation

    def _may_be_short(self, options: Mapping[str, object]) -> bool:
        """Whether a call with these keywords may go the short way. A rank alone has nobody to wait for."""
        return self.world_size == 1 and len(options) == 1 and "async_op" in options

    def _check_usable(self) -> None:
        if generation() != self._generation:
            raise CommClosedError(
                f"this process ({os.getpid()}) is a fork of rank {self.rank}'s; "
                "make a communicator of its own, or use the 'spawn' start method"
            )
        if self._progress.failure is not None:
            raise CommClosedError(
                f"rank {self.rank}: the communicator ended earlier: {self._progress.failure}"
            ) from self._progress.failure
        if self._closed:
            raise CommClosedError(f"rank {self.rank}: the communicator is closed")
