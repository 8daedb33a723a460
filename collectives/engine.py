"""Progress over transports that can only be waited for: by the caller, or by a thread that runs what is queued."""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Callable, Sequence

from collectives.backend import Pending
from collectives.control import Control
from collectives.errors import CommError, CommTimeoutError
from collectives.interrupts import Interrupts, join
from collectives.operation import Operation
from collectives.progress import Progress


class Engine(Progress):
    """For transports that can only wait: what is not waited for at once runs on a thread, made when first needed."""

    def __init__(self, name: str, members: Sequence[int], kill: Callable[[], None], control: Control | None) -> None:
        super().__init__(name, members, kill, control)
        self._changed = threading.Condition()
        self._queue: queue.SimpleQueue[Operation | None] = queue.SimpleQueue()
        self._unfinished: list[Operation] = []
        self._started = False
        self._threads: list[threading.Thread] = []
        self._interrupts = Interrupts()

    @property
    def pending(self) -> list[Operation]:
        with self._changed:
            self._unfinished = [operation for operation in self._unfinished if not operation.done]
            return [*self._unfinished]

    def submit(self, operation: Operation, sync: bool) -> None:
        with self._changed:
            inline = sync and not self._claim.locked() and not any(other.call for other in self.pending)
            self._unfinished.append(operation)
        if not operation.call:
            operation.begin()
        elif not inline:
            operation.threaded = True
            self._queue.put(operation)
            if not self._started:
                self._started = True
                self._spawn(self._run)

    def _spawn(self, target: Callable[[], None]) -> None:
        thread = threading.Thread(target=target, name=f"collectives engine {self.name}", daemon=True)
        thread.start()
        self._threads = [*(other for other in self._threads if other.is_alive()), thread]

    def _run(self) -> None:
        while self._carry_out():
            pass

    def _carry_out(self) -> bool:
        """The next operation. In a frame of its own, so that nothing holds its tensors while another is waited for."""
        operation = self._queue.get()
        if operation is None:
            return False
        with self._changed:
            self._changed.wait_for(lambda: self._is_next(operation))
        self._block(operation)
        return True

    def _is_next(self, operation: Operation) -> bool:
        """Whether no earlier collective is under way: a caller may be carrying one out itself, on its own thread."""
        earlier = itertools.takewhile(lambda other: other is not operation, self._unfinished)
        return operation.done or (not self._claim.locked() and all(other.done or not other.call for other in earlier))

    def _block(self, operation: Operation) -> None:
        operation.block(time.monotonic() + operation.timeout)
        with self._changed:
            self._changed.notify_all()

    @property
    def busy(self) -> bool:
        return (
            self.failure is not None
            or self._claim.locked()
            or any(not operation.done for operation in self._unfinished)
        )

    def claim(self) -> bool:
        with self._changed:
            return not self.busy and self._claim.acquire(blocking=False)

    def _release(self) -> None:
        super()._release()
        if self._started:
            with self._changed:
                self._changed.notify_all()

    def _finish(self, pending: Pending, deadline: float) -> None:
        with self._interrupts:
            pending.wait(0, deadline)

    def look(self) -> None:
        if self._interrupts.seen():
            self.abort("interrupted by Ctrl-C while it waited")

    def drive(self, operation: Operation, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        if not operation.threaded:
            with self._interrupts:
                operation.block(deadline)
            if self._started:
                with self._changed:
                    self._changed.notify_all()
            return
        with self._changed:
            ended = self._changed.wait_for(lambda: operation.done, timeout)
        if not ended:
            self.fail(operation, CommTimeoutError(f"nothing came within {timeout:g} s"))

    def poll(self, operation: Operation) -> None:
        """A point-to-point operation cannot be asked, so somebody has to wait for it."""
        if not operation.threaded:
            operation.threaded = True
            self._spawn(lambda: self._block(operation))

    def _end(self, operation: Operation | None, error: CommError, tell: bool, leaves: bool = False) -> None:
        super()._end(operation, error, tell, leaves)
        with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        super().close()
        self._queue.put(None)
        join(self._threads)
        self._interrupts.close()
