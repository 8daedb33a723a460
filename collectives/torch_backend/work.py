"""What a call of a process group returns: torch's ``Work``, over ours."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from collectives.torch_backend.futures import Futures
from collectives.types import Work


def seconds(timeout: timedelta | None) -> float | None:
    """torch's time-outs in seconds; None where it gives none, for which it has several values."""
    if timeout is None:
        return None
    found = timeout.total_seconds()
    return found if found > 0 else None


class GroupWork(dist.Work):
    """Operations that were started together. ``result`` are the tensors that hold what they bring.

    ``finishes`` are called once, when all are done. ``futures`` are the process group's.
    """

    def __init__(
        self,
        works: Sequence[Work],
        result: list[torch.Tensor],
        finishes: Sequence[Callable[[], None]] = (),
        *,
        futures: Futures,
    ) -> None:
        super().__init__()
        self.works = works
        self._result = result
        self._finishes = finishes
        self._finishing = threading.Lock()
        self._futures = futures

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until done. Raises ``CommError``, at the latest after ``timeout``."""
        limit = seconds(timeout)
        for work in self.works:
            work.wait(limit)
        self.finish()
        return True

    def finish(self) -> None:
        """What remains to be done here once all have ended well."""
        if self._finishes:
            with self._finishing:  # who comes second finds the result finished
                for finish in self._finishes:
                    finish()
                self._finishes = ()

    def is_completed(self) -> bool:
        """Whether all have ended, well or badly. Makes progress."""
        ended = [work.is_completed() for work in self.works]  # asks all, so that all get ahead
        if not all(ended):
            return False
        if self.exception() is None:
            self.finish()
        return True

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        return next((error for work in self.works if (error := work.exception()) is not None), None)

    def result(self) -> list[torch.Tensor]:
        """The tensors, once done."""
        self.wait()
        return self._result

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """A future of the tensors. In a backward pass it is completed at the end, else it is complete: this waits."""
        return self._futures.make(self, self.result)

    def get_future_result(self) -> torch.futures.Future[int]:
        """A future of 0, torch's number for a good end."""
        return self._futures.make(self, lambda: int(not self.wait()))


FINISHED = GroupWork((), [], futures=Futures())  # of calls that nobody gets to wait for
