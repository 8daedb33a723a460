"""Ranks that save or load together: what one of them cannot do, all of them refuse alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from collectives import CommError, Communicator
from fsdp.checkpoint.errors import CheckpointError

T = TypeVar("T")


class Ranks:
    """The ranks of ``comm``, or this process alone."""

    def __init__(self, comm: Communicator | None) -> None:
        self.comm = comm
        self.rank = 0 if comm is None else comm.rank
        self.world_size = 1 if comm is None else comm.world_size

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in rank order."""
        return [value] if self.comm is None else self.comm.all_gather_object(value)

    def broadcast(self, value: T) -> T:
        """Rank 0's value."""
        return value if self.comm is None else self.comm.broadcast_object(value, 0)

    def together(self, fn: Callable[[], T]) -> T:
        """``fn()`` of this rank, if it succeeded on all; else the first failure, as one error on every rank.

        ``fn`` does not communicate.
        """
        answer, error, found = _attempt(fn, self.rank)
        failures = [text for text in self.gather(found) if text is not None]
        if failures:
            raise CheckpointError(failures[0]) from error
        assert answer is not None
        return answer[0]

    def collect(self, fn: Callable[[], T]) -> list[T]:
        """``fn()`` of every rank, in rank order, if it succeeded on all; else as ``together``. Answers are pickled."""
        answer, error, found = _attempt(fn, self.rank)
        rows = self.gather((answer, found))
        failures = [text for _, text in rows if text is not None]
        if failures:
            raise CheckpointError(failures[0]) from error
        return [row[0] for row, _ in rows if row is not None]

    def on_rank_0(self, fn: Callable[[], T]) -> T:
        """``fn()`` of rank 0, on every rank."""
        if self.rank == 0:
            answer, error, found = _attempt(fn, 0)
            self.broadcast((answer, found))
        else:
            error = None
            answer, found = self.broadcast((None, None))
        if found is not None:
            raise CheckpointError(found) from error
        assert answer is not None
        return answer[0]


def _attempt(fn: Callable[[], T], rank: int) -> tuple[tuple[T] | None, Exception | None, str | None]:
    """What ``fn`` gives, or how it fails and the words for it. A failed communicator has told all ranks already."""
    try:
        return (fn(),), None, None
    except CommError:
        raise
    except Exception as error:
        return None, error, describe(error, rank)


def describe(error: Exception, rank: int) -> str:
    """One line on ``error``, which names the file that it is about."""
    if isinstance(error, CheckpointError):
        return str(error)
    if isinstance(error, OSError):
        return (
            f"rank {rank}: expected to read and write the checkpoint's files, found {error.strerror or error} at "
            f"{error.filename}; free space or mend access, then try again"
        )
    return f"rank {rank}: {type(error).__name__}: {error}"
