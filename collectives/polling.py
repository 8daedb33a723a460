"""Progress over transports that are asked whether they are done."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from collectives.backend import Pending
from collectives.control import Control
from collectives.errors import CommTimeoutError
from collectives.operation import Operation
from collectives.progress import Progress

_LOOKS = 32  # at what is under way, before anything else is looked at


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
            while self._queue and not self._claim.locked() and self._queue[0].advance(looks):
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
            if self._claim.locked():
                return None
            if not self._loose:
                return self._queue[0] if self._queue else None
            return self._loose[0] if len(self._loose) == 1 and not self._queue else None

    @property
    def busy(self) -> bool:
        return bool(self._queue or self._loose) or self._claim.locked() or self.failure is not None

    def claim(self) -> bool:
        if not self._claim.acquire(False):
            return False
        # Only now, so that what somebody submits meanwhile either is seen here or sees the claim.
        if self._queue or self._loose or self.failure is not None:
            self._claim.release()
            return False
        return True

    def _finish(self, pending: Pending, deadline: float) -> None:
        if self._waits:
            pending.wait(0, deadline)
            return
        poll, looks = pending.poll, range(1 if self._crowded else _LOOKS)
        turn = 0
        while True:
            for _ in looks:
                if poll():
                    return
            turn += len(looks)
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
