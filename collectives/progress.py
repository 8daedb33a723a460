"""The operations of one communicator that are not done yet, in issue order, and how it fails.

``Polling`` advances them whenever somebody calls; ``Engine`` is for transports that can only wait.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from time import monotonic  # called often enough for a look-up to count
from typing import Any, TypeVar

from collectives.backend import Pending
from collectives.control import Control, Waiting, is_late
from collectives.errors import CollectiveMismatchError, CommClosedError, CommError, CommTimeoutError, PeerLostError
from collectives.messages import Ledger, Message
from collectives.operation import Operation
from collectives.statistics import Row

T = TypeVar("T")


class Progress(ABC):
    """The operations of one communicator that are not done yet, and the failure that ended it, if any.

    This is also what the control plane sees of a communicator (``control.Group``), once that is whole and asks it to
    ``watch``.
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
        self._claim = threading.Lock()  # held while a collective that is in no queue is under way
        self._ending = threading.Lock()
        self._ended = threading.Event()

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
        sent: int,
        where: str,
        timeout: float,
    ) -> None:
        """Carry one collective of the backend's own, which sends ``sent`` bytes, from start to end; after ``claim``."""
        self.calls += 1
        row.calls += 1
        row.sent_bytes += sent
        since = monotonic()
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
            row.seconds += monotonic() - since

    def _release(self) -> None:
        self._claim.release()

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
