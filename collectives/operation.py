"""How started operations come to their end: in issue order, polled or by a thread that waits.

An operation is a generator of what must be done before it can go on (see ``schedules.executor``). ``Polling`` advances
it whenever somebody calls; ``Engine`` is for transports that can only wait, and runs queued operations on a thread.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator

import torch

from collectives.errors import CommClosedError, CommError, CommTimeoutError, PeerLostError
from collectives.schedules.executor import Posted
from collectives.statistics import Row
from collectives.types import Work


class Operation(Work):
    """One call, from its start to its end. ``label`` says rank, name, sequence number and signature for errors."""

    def __init__(
        self,
        progress: Progress,
        steps: Iterator[Posted],
        timeout: float,
        *,
        label: Callable[[], str],
        row: Row,
        queued: bool,
    ) -> None:
        self.progress = progress
        self.timeout = timeout
        self.label = label
        self.row = row
        self.queued = queued  # in issue order; point-to-point is not
        self.threaded = False  # some thread is at it
        self.done = False
        self.error: CommError | None = None
        self._steps = steps
        self._flying: Posted | None = None
        self._lock = threading.Lock()

    def wait(self, timeout: float | None = None) -> None:
        if not self.done:
            start = time.perf_counter()
            self.progress.drive(self, self.timeout if timeout is None else timeout)
            self.row.seconds += time.perf_counter() - start
        if self.error is not None:
            raise self.error

    def is_completed(self) -> bool:
        if not self.done:
            self.progress.poll(self)
        return self.done

    def exception(self) -> BaseException | None:
        return self.error

    def advance(self) -> bool:
        """Go as far as polling allows. True at the end."""
        try:
            with torch.inference_mode():
                while self._flying is None or self._flying.pending.poll():
                    self._flying = next(self._steps)
        except StopIteration:
            self.end(None)
        except Exception as error:
            self.progress.fail(self, error)
        return self.done

    def begin(self) -> None:
        """Post what comes first, so that it is under way before the caller goes on."""
        try:
            with torch.inference_mode():
                self._flying = next(self._steps)
        except StopIteration:
            self.end(None)
        except Exception as error:
            self.progress.fail(self, error)

    def block(self, deadline: float) -> None:
        """Go to the end by waiting."""
        with self._lock, torch.inference_mode():
            try:
                while not self.done:
                    if self._flying is not None:
                        for i in range(self._flying.count):
                            self._flying.pending.wait(i, deadline)
                    self._flying = next(self._steps)
            except StopIteration:
                self.end(None)
            except Exception as error:
                self.progress.fail(self, error)

    def end(self, error: CommError | None) -> None:
        if self.done:
            return
        self.error = error
        self._steps = iter(())  # lets go of the tensors
        self._flying = None
        self.done = True


class Progress(ABC):
    """The operations of one communicator that are not done yet, and the failure that ended it, if any."""

    def __init__(self, kill: Callable[[], None]) -> None:
        self.failure: CommError | None = None
        self._kill = kill

    @abstractmethod
    def submit(self, operation: Operation, sync: bool) -> None:
        """Start an operation; ``sync`` says that its caller will wait for it at once."""

    @abstractmethod
    def drive(self, operation: Operation, timeout: float) -> None:
        """Return when the operation is done, or fail it after ``timeout`` seconds."""

    @abstractmethod
    def poll(self, operation: Operation) -> None:
        """Make progress without blocking."""

    @property
    @abstractmethod
    def pending(self) -> list[Operation]:
        """Operations that are not done, oldest first."""

    def fail(self, operation: Operation | None, error: BaseException) -> None:
        """End the communicator: every pending operation raises ``error``, and later calls raise from it."""
        if self.failure is None:
            self.failure = _explained(operation, error)
            self._kill()
        for other in [*self.pending, *([operation] if operation is not None else [])]:
            other.end(self.failure)

    @abstractmethod
    def close(self) -> None:
        """Nothing is pending any more, and nothing will be."""


class Polling(Progress):
    """For transports that progress when asked. ``crowded``: more ranks than cores, so that waiting must not spin."""

    def __init__(self, kill: Callable[[], None], *, waits: bool, crowded: bool) -> None:
        super().__init__(kill)
        self._queue: deque[Operation] = deque()
        self._loose: list[Operation] = []
        self._lock = threading.RLock()
        self._waits = waits
        self._crowded = crowded

    @property
    def pending(self) -> list[Operation]:
        return [*self._loose, *self._queue]

    def submit(self, operation: Operation, sync: bool) -> None:
        with self._lock:
            (self._queue if operation.queued else self._loose).append(operation)
            if not operation.queued:
                operation.begin()
            elif not (sync and len(self._queue) == 1):  # otherwise drive() follows at once
                self._advance()

    def poll(self, operation: Operation) -> None:
        self._advance()

    def _advance(self) -> None:
        with self._lock:
            if self._loose:
                self._loose = [operation for operation in self._loose if not operation.advance()]
            while self._queue and self._queue[0].advance():
                self._queue.popleft()

    def drive(self, operation: Operation, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        if self._waits and self.pending == [operation]:
            operation.block(deadline)
            self._advance()
            return
        turn = 0
        while True:
            self._advance()
            if operation.done:
                return
            turn += 1
            if turn & 31 == 0 and time.monotonic() > deadline:
                self.fail(operation, CommTimeoutError(f"nothing came within {timeout:g} s"))
            # After some eager turns let others run; sleep where they have no core of their own.
            if self._crowded or self._waits:
                time.sleep(0 if turn < 50 else 2e-4)
            elif turn & 255 == 0:
                os.sched_yield()

    def close(self) -> None:
        """Polling leaves nothing behind."""


class Engine(Progress):
    """For transports that can only wait: what is not waited for at once runs on a thread, made when first needed."""

    def __init__(self, kill: Callable[[], None], name: str) -> None:
        super().__init__(kill)
        self._name = name
        self._changed = threading.Condition()
        self._queue: queue.SimpleQueue[Operation | None] = queue.SimpleQueue()
        self._unfinished: list[Operation] = []
        self._started = False

    @property
    def pending(self) -> list[Operation]:
        with self._changed:
            self._unfinished = [operation for operation in self._unfinished if not operation.done]
            return [*self._unfinished]

    def submit(self, operation: Operation, sync: bool) -> None:
        inline = sync and not any(other.queued for other in self.pending)
        with self._changed:
            self._unfinished.append(operation)
        if not operation.queued:
            operation.begin()
        elif not inline:
            operation.threaded = True
            self._queue.put(operation)
            if not self._started:
                self._started = True
                self._spawn(self._run)

    def _spawn(self, target: Callable[[], None]) -> None:
        threading.Thread(target=target, name=f"collectives {self._name}", daemon=True).start()

    def _run(self) -> None:
        while (operation := self._queue.get()) is not None:
            self._block(operation)

    def _block(self, operation: Operation) -> None:
        operation.block(time.monotonic() + operation.timeout)
        with self._changed:
            self._changed.notify_all()

    def drive(self, operation: Operation, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        if not operation.threaded:
            operation.block(deadline)
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

    def fail(self, operation: Operation | None, error: BaseException) -> None:
        super().fail(operation, error)
        with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        self._queue.put(None)


def _explained(operation: Operation | None, error: BaseException) -> CommError:
    """The error with the call it happened in; a foreign one wrapped."""
    where = operation.label() if operation is not None else "communicator"
    kinds = (CommTimeoutError, PeerLostError, CommClosedError)
    kind = next((kind for kind in kinds if isinstance(error, kind)), CommError)
    if isinstance(error, PeerLostError):
        explained: CommError = PeerLostError(f"{where}: {error}", error.rank)
    else:
        explained = kind(f"{where}: {error}")
    explained.__cause__ = error
    return explained
