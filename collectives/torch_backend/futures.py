"""Futures of operations: those that a backward pass starts are completed at its end, all others at once.

torch's DDP asks for the future of each bucket as it fills, and waits for all of them, in C++, in a callback at the end
of the backward. Ours runs before that one, since it is asked for when the first bucket starts, so the operations get
ahead while gradients are computed, and the thread that needs their results finishes them. Callbacks of the futures run
there too, in the order in which the futures were asked for: one that communicates, as PowerSGD's do, finds the same
order on all ranks, which callbacks of a thread's would not.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

from collectives.torch_backend.features import at_end_of_backward, current_backward

LOOK_EVERY = 1e-3  # seconds; looking more often takes from the computation beside it


class Future(torch.futures.Future[Any]):
    """A future of what ``finish`` returns, or raises, once it is called: whoever waits calls it, once."""

    def __init__(self, finish: Callable[[], Any]) -> None:
        super().__init__()
        self._finish = finish
        self._lock = threading.RLock()
        self._taken = False
        self.error: Exception | None = None

    def complete(self) -> None:
        """Have the value, or the error, when this returns."""
        with self._lock:
            if self._taken:
                return
            self._taken = True
            try:
                value = self._finish()
            except Exception as error:
                self.error = error
                self.set_exception(error)
            else:
                self.set_result(value)

    def wait(self) -> Any:
        self.complete()
        return super().wait()


class Started(Protocol):
    """An operation that is under way."""

    def is_completed(self) -> bool: ...  # makes progress, never waits


class Futures:
    """The futures of one process group that are not complete yet, in the order of their operations."""

    def __init__(self) -> None:
        self._pending: list[Future] = []
        self._under_way: list[Started] = []  # what their operations are
        self._backward = -1  # the last whose end we are told of
        self._finishing = False
        self._looking = False
        self._lock = threading.Lock()

    def make(self, work: Started, finish: Callable[[], Any]) -> Future:
        """A future of what ``finish``, which waits for ``work``, returns."""
        future = Future(finish)
        if self._finishing or not self._told_of_the_end():
            future.complete()
            return future
        with self._lock:
            self._pending.append(future)
            self._under_way.append(work)
            if not self._looking:
                self._looking = True
                threading.Thread(target=self._look, name="collectives futures", daemon=True).start()
        return future

    def _told_of_the_end(self) -> bool:
        """Whether a backward is running, at whose end ``_finish`` is called."""
        backward = current_backward()
        if backward is not None and backward != self._backward:
            if not at_end_of_backward(self._finish):
                return False
            self._backward = backward
        return backward is not None

    def _finish(self) -> None:
        """Complete all, be they of a backward around this one, or of one that failed: they come earlier anyway.

        Raises the first error, so that the backward does.
        """
        errors = []
        self._finishing = True
        try:
            while self._pending:
                future = self._pending.pop(0)
                future.complete()
                errors += [] if future.error is None else [future.error]
        finally:
            self._finishing = False
        with self._lock:
            self._under_way.clear()
        if errors:
            raise errors[0]

    def _look(self) -> None:
        """While the backward computes: progress for transports that make none by themselves."""
        while True:
            with self._lock:
                works = [*self._under_way]
                self._looking = bool(works)
            if not works:
                return
            ended = [work for work in works if work.is_completed()]
            with self._lock:
                self._under_way = [work for work in self._under_way if work not in ended]
            time.sleep(LOOK_EVERY)
