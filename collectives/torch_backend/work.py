"""What a call of a process group returns: torch's ``Work``, over ours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from collectives.types import Work


def seconds(timeout: timedelta | None) -> float | None:
    """torch's time-outs in seconds; None where it gives none, for which it has several values."""
    if timeout is None:
        return None
    found = timeout.total_seconds()
    return found if found > 0 else None


class GroupWork(dist.Work):
    """Operations that were started together. ``result`` are the tensors that hold what they bring.

    ``finishes`` are called once, when all are done.
    """

    def __init__(
        self, works: Sequence[Work], result: list[torch.Tensor], finishes: Sequence[Callable[[], None]] = ()
    ) -> None:
        super().__init__()
        self._works = works
        self._result = result
        self._finishes = finishes

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until done. Raises ``CommError``, at the latest after ``timeout``."""
        limit = seconds(timeout)
        for work in self._works:
            work.wait(limit)
        finishes, self._finishes = self._finishes, ()
        for finish in finishes:
            finish()
        return True

    def is_completed(self) -> bool:
        """Whether all have ended, well or badly. Makes progress."""
        ended = [work.is_completed() for work in self._works]  # asks all, so that all get ahead
        return all(ended)

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        return next((error for work in self._works if (error := work.exception()) is not None), None)

    def result(self) -> list[torch.Tensor]:
        """The tensors, once done."""
        self.wait()
        return self._result

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """A future of the tensors, which is done: who asks for it waits here."""
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        self.wait()
        future.set_result(self._result)
        return future

    def get_future_result(self) -> torch.futures.Future[int]:
        """A future of 0, torch's number for a good end."""
        future: torch.futures.Future[int] = torch.futures.Future()
        self.wait()
        future.set_result(0)
        return future


FINISHED = GroupWork((), [])  # of calls that nobody gets to wait for
