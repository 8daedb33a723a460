"""How started operations come to their end: in issue order, polled or by a thread that waits.

An operation is a generator of what must be done before it can go on (see ``schedules.executor``). ``Polling`` advances
it whenever somebody calls; ``Engine`` is for transports that can only wait, and runs queued operations on a thread.
"""

from __future__ import annotations

import itertools
import os
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch

from collectives.backend import Pending
from collectives.control import Control, Waiting, is_late
from collectives.errors import CollectiveMismatchError, CommClosedError, CommError, CommTimeoutError, PeerLostError
from collectives.interrupts import Interrupts
from collectives.messages import Ledger, Message
from collectives.schedules.executor import Posted
from collectives.statistics import Row
from collectives.types import Work

T = TypeVar("T")
_LOOKS = 32  # at what is under way, before anything else is looked at


class Operation(Work):
    """One call, from its start to its end.

    ``what`` is the call with its signature, ``call`` its number among the communicator's collectives (0 for
    point-to-point, which stands in no order) and ``messages`` those of a point-to-point call; ``where`` says for error
    messages which rank of what this is.
    """

    def __init__(
        self,
        progress: Progress,
        steps: Iterator[Posted],
        timeout: float,
        *,
        where: str,
        what: Callable[[], str],
        call: int,
        row: Row,
        messages: Sequence[Message] = (),
    ) -> None:
        self.progress = progress
        self.timeout = timeout
        self.where = where
        self._what = what
        self.call = call
        self.row = row
        self.messages = messages
        self.since = time.monotonic()
        self.threaded = False  # some thread is at it
        self.done = False
        self.error: CommError | None = None
        self._steps = steps
        self._flying: Posted | None = None
        self._lock = threading.Lock()

    @property
    def what(self) -> str:
        return self._what()

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

    def advance(self, looks: int = 1) -> bool:
        """Go as far as polling allows, and give up after ``looks`` in vain. True at the end."""
        if not self._lock.acquire(blocking=False):
            return self.done  # another thread is at it
        try:
            with torch.inference_mode():
                while looks:
                    if self._flying is None or self._flying.pending.poll():
                        self._flying = next(self._steps)
                    else:
                        looks -= 1
        except StopIteration:
            self.end(None)
        except Exception as error:
            self.progress.fail(self, error)
        finally:
            self._lock.release()
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


class _Done(Work):
    """What is done needs no record."""

    def wait(self, timeout: float | None = None) -> None:
        return

    def is_completed(self) -> bool:
        return True

    def exception(self) -> BaseException | None:
        return None


DONE = _Done()


class Progress(ABC):
    """The operations of one communicator that are not done yet, and the failure that ended it, if any.

    This is also what the control plane sees of a communicator (``control.Group``).
    """

    def __init__(self, name: str, members: Sequence[int], kill: Callable[[], None], control: Control | None) -> None:
        self.name = name
        self.members = members
        self.calls = 0
        self.ledger = Ledger()
        self.failure: CommError | None = None
        self._kill = kill
        self._control = control
        self._now: tuple[Callable[[], str], float, float] | None = None  # what, since, time-out of what ``run`` carries
        self._claimed = False  # a collective that is in no queue is under way
        self._ending = threading.Lock()
        self._ended = threading.Event()
        if control is not None:
            control.watch(self)

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

    @property
    @abstractmethod
    def busy(self) -> bool:
        """Whether anything is pending, or the communicator has failed."""

    @abstractmethod
    def claim(self) -> bool:
        """Whether ``run`` may be called now, and must be: nothing is under way, and nothing starts before it ends."""

    def run(
        self,
        start: Callable[..., Pending],
        arguments: tuple[Any, ...],
        what: Callable[[], str],
        row: Row,
        where: str,
        timeout: float,
    ) -> None:
        """Carry one collective of the backend's own from start to end; after ``claim``."""
        self.calls += 1
        since = time.monotonic()
        self._now = (what, since, timeout)
        try:
            self._finish(start(*arguments), since + timeout)
        except Exception as error:
            operation = Operation(self, iter(()), timeout, where=where, what=what, call=self.calls, row=row)
            self.fail(operation, error)
            operation.wait()
        finally:
            self._now = None
            self._release()
            row.seconds += time.monotonic() - since

    def _release(self) -> None:
        self._claimed = False

    def set_up(self, make: Callable[[], T], members: Sequence[int], timeout: float) -> T:
        """``make()`` for ranks ``members``: a failure there ends this communicator, which then can say who is missing.

        ``timeout``: seconds; after a part of it, or of a second, the others are asked whether they are there.
        """
        since = time.monotonic()
        self._now = (lambda: "split", since, timeout)
        try:
            return make()
        except CommError as error:
            if isinstance(error, CommTimeoutError) and self._control is not None:
                missing = self._control.missing(self, self.calls, members)
                error = CommTimeoutError(f"{error}; {missing}" if missing else str(error))
            self.fail(None, error)
            raise self.failure or error from error
        finally:
            self._now = None

    @abstractmethod
    def _finish(self, pending: Pending, deadline: float) -> None:
        """Wait for one pending operation. Raises ``CommTimeoutError`` at ``deadline``."""

    def waiting(self) -> Waiting | None:
        """The oldest collective that is not done, for the control plane."""
        now = self._now
        if now is not None:
            what, since, timeout = now
            return Waiting(self.calls, what(), since, timeout)
        oldest = next((operation for operation in self.pending if operation.call), None)
        return None if oldest is None else Waiting(oldest.call, oldest.what, oldest.since, oldest.timeout)

    def look(self) -> None:  # noqa: B027 (there may be nothing)
        """Whatever must be noticed while callers wait: called by the control plane, on its thread, every 0.1 s."""

    def settle(self, seconds: float) -> None:
        """Let what is pending come to its end, as far as it does soon: the program is ending without waiting for it."""
        deadline = time.monotonic() + seconds
        while (pending := self.pending) and time.monotonic() < deadline:
            if not pending[0].is_completed():
                time.sleep(0.002)

    def awaits(self, member: int) -> bool:
        """Whether a point-to-point operation with ``member`` is not done."""
        return any(message.peer == member for operation in self.pending for message in operation.messages)

    def late_messages(self, now: float) -> list[Message]:
        """What has waited long for a peer's send or receive."""
        late = [operation for operation in self.pending if operation.messages and is_late(operation, now)]
        return [message for operation in late for message in operation.messages]

    def fail(self, operation: Operation | None, error: BaseException) -> None:
        """Something went wrong here: end the communicator, on all ranks."""
        if isinstance(error, CommTimeoutError) and operation is not None and self._control is not None:
            oldest = self.waiting()  # what came after it waits for it, not for a rank
            missing = self._control.missing(self, operation.call if oldest is None else oldest.call)
            error = CommTimeoutError(f"{error}; {missing}") if missing else error
        elif isinstance(error, CommError) and self._control is not None:
            # A transport that broke says little about why. The control plane knows within milliseconds who is lost.
            self._ended.wait(0.5)
        self._end(operation, _explained(operation, error), tell=True)

    def end(self, error: CommError) -> None:
        """Something went wrong elsewhere, says the control plane."""
        oldest = next(iter(self.pending), None)
        self._end(None, error if oldest is None else _explained(oldest, error), tell=False)

    def abort(self, message: str, leaves: bool = False) -> None:
        """Somebody here gives up: end the communicator, on all ranks. ``leaves``: this rank is lost to the others."""
        self._end(None, CommError(message), tell=True, leaves=leaves)

    def _end(self, operation: Operation | None, error: CommError, tell: bool, leaves: bool = False) -> None:
        with self._ending:
            first = self.failure is None
            if first:
                self.failure = error
                self._ended.set()
        if first:
            if tell and self._control is not None:
                self._control.failed(self, error, leaves)
            self._kill()
        for other in [*self.pending, *([operation] if operation is not None else [])]:
            other.end(self.failure)

    def close(self) -> None:
        """Nothing is pending any more, and nothing will be."""
        if self._control is not None:
            self._control.forget(self)


class Polling(Progress):
    """For transports that progress when asked. ``crowded``: more ranks than cores, so that waiting must not spin."""

    def __init__(
        self,
        name: str,
        members: Sequence[int],
        kill: Callable[[], None],
        control: Control | None,
        *,
        waits: bool,
        crowded: bool,
    ) -> None:
        super().__init__(name, members, kill, control)
        self._queue: deque[Operation] = deque()
        self._loose: list[Operation] = []
        self._lock = threading.RLock()
        self._waits = waits
        self._crowded = crowded

    @property
    def pending(self) -> list[Operation]:
        # Two copies, each at one stroke. Not under the lock: who holds it may be waiting for the control plane, which
        # asks for this.
        return [*self._loose, *self._queue]

    def submit(self, operation: Operation, sync: bool) -> None:
        with self._lock:
            (self._queue if operation.call else self._loose).append(operation)
            if not operation.call:
                operation.begin()
            elif not (sync and len(self._queue) == 1):  # otherwise drive() follows at once
                self._advance()

    def poll(self, operation: Operation) -> None:
        self._advance()

    def _advance(self, looks: int = 1) -> None:
        with self._lock:
            if self._loose:
                self._loose = [operation for operation in self._loose if not operation.advance()]
                looks = 1
            while self._queue and not self._claimed and self._queue[0].advance(looks):
                self._queue.popleft()

    def drive(self, operation: Operation, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while self._waits and (first := self._first_of_all()) is not None:
            first.block(deadline)
            self._advance()
            if operation.done:
                return
        turn = 0
        looks = 1 if self._crowded or self._waits else _LOOKS  # what is tried in vain costs others their turn
        while True:
            self._advance(looks)
            if operation.done:
                return
            turn += looks
            try:
                self._pause(turn, deadline)
            except CommTimeoutError as error:
                self.fail(operation, error)

    def _first_of_all(self) -> Operation | None:
        """The one operation that can be waited for before any other; None where messages are under way beside it."""
        with self._lock:
            if self._claimed:
                return None
            if not self._loose:
                return self._queue[0] if self._queue else None
            return self._loose[0] if len(self._loose) == 1 and not self._queue else None

    @property
    def busy(self) -> bool:
        return bool(self._queue or self._loose) or self._claimed or self.failure is not None

    def claim(self) -> bool:
        with self._lock:
            if self._queue or self._loose or self._claimed or self.failure is not None:
                return False
            self._claimed = True
            return True

    def _finish(self, pending: Pending, deadline: float) -> None:
        if self._waits:
            pending.wait(0, deadline)
            return
        turn, looks = 0, 1 if self._crowded else _LOOKS
        while True:
            for _ in range(looks):
                if pending.poll():
                    return
            turn += looks
            self._pause(turn, deadline)
            if self.failure is not None:
                raise self.failure

    def _pause(self, turn: int, deadline: float) -> None:
        """Between two looks: after some eager turns let others run; sleep where they have no core of their own."""
        if turn & 31 == 0 and time.monotonic() > deadline:
            raise CommTimeoutError("nothing came in time")
        if self._crowded or self._waits:
            os.sched_yield() if turn < 100 else time.sleep(1e-4)
        elif turn & 255 == 0:
            os.sched_yield()


class Engine(Progress):
    """For transports that can only wait: what is not waited for at once runs on a thread, made when first needed."""

    def __init__(self, name: str, members: Sequence[int], kill: Callable[[], None], control: Control | None) -> None:
        super().__init__(name, members, kill, control)
        self._changed = threading.Condition()
        self._queue: queue.SimpleQueue[Operation | None] = queue.SimpleQueue()
        self._unfinished: list[Operation] = []
        self._started = False
        self._interrupts = Interrupts()

    @property
    def pending(self) -> list[Operation]:
        with self._changed:
            self._unfinished = [operation for operation in self._unfinished if not operation.done]
            return [*self._unfinished]

    def submit(self, operation: Operation, sync: bool) -> None:
        with self._changed:
            inline = sync and not self._claimed and not any(other.call for other in self.pending)
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
        threading.Thread(target=target, name=f"collectives engine {self.name}", daemon=True).start()

    def _run(self) -> None:
        while (operation := self._queue.get()) is not None:
            with self._changed:
                self._changed.wait_for(lambda: self._is_next(operation))
            self._block(operation)

    def _is_next(self, operation: Operation) -> bool:
        """Whether no earlier collective is under way: a caller may be carrying one out itself, on its own thread."""
        earlier = itertools.takewhile(lambda other: other is not operation, self._unfinished)
        return operation.done or (not self._claimed and all(other.done or not other.call for other in earlier))

    def _block(self, operation: Operation) -> None:
        operation.block(time.monotonic() + operation.timeout)
        with self._changed:
            self._changed.notify_all()

    @property
    def busy(self) -> bool:
        return self.failure is not None or self._claimed or any(not operation.done for operation in self._unfinished)

    def claim(self) -> bool:
        with self._changed:
            if self.busy:
                return False
            self._claimed = True
            return True

    def _release(self) -> None:
        self._claimed = False
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
        self._interrupts.close()


def _explained(operation: Operation | None, error: BaseException) -> CommError:
    """The error with the call it happened in; a foreign one wrapped."""
    where = "communicator"
    if operation is not None:
        number = f"call {operation.call}: " if operation.call else ""
        where = f"{operation.where}, {number}{operation.what}"
    kinds = (CommTimeoutError, PeerLostError, CollectiveMismatchError, CommClosedError)
    kind = next((kind for kind in kinds if isinstance(error, kind)), CommError)
    if isinstance(error, PeerLostError):
        explained: CommError = PeerLostError(f"{where}: {error}", error.rank)
    else:
        explained = kind(f"{where}: {error}")
    explained.__cause__ = error
    return explained
