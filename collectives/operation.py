"""One call, from its start to its end.

An operation is a generator of what must be done before it can go on (see ``schedules.executor``). Who advances it is in
``progress.py``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from collectives.errors import CommError
from collectives.messages import Message
from collectives.schedules.executor import Posted
from collectives.statistics import Row
from collectives.types import Work

if TYPE_CHECKING:
    from collectives.progress import Progress


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
        if not self.done:
            return self.progress.failure  # of which every pending operation is told, but one after another
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
