"""What is under way in MPI: tested, never waited for."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from collectives.errors import CommError

if TYPE_CHECKING:
    from collectives.backends.mpi import MpiBackend


class MpiPending:
    """Requests that were posted together."""

    __slots__ = ("_backend", "_requests", "_tensors")

    def __init__(self, backend: MpiBackend, requests: list[Any], tensors: Any) -> None:
        self._backend = backend
        self._requests = requests
        self._tensors = tensors
        backend.active.add(self)

    def poll(self) -> bool:
        requests = self._requests
        try:
            while requests:
                if not requests[-1].Test():
                    if self._backend.killed:
                        raise CommError(f"rank {self._backend.rank}, mpi: the transport was stopped")
                    return False
                requests.pop()
        except self._backend.MPI.Exception as error:
            raise self._backend.translate(error) from error
        self._backend.active.discard(self)
        return True

    def wait(self, i: int, deadline: float) -> None:
        raise AssertionError("a polling backend is polled")


class MpiCollective:
    """One of the library's collectives, of which at most one is under way: this is lighter than ``MpiPending``."""

    __slots__ = ("_backend", "_tensors", "_test")

    def __init__(self, backend: MpiBackend, test: Callable[[], bool], tensors: Any) -> None:
        self._backend = backend
        self._test = test
        self._tensors = tensors
        backend.collective = self

    def poll(self) -> bool:
        try:
            if self._test():
                self._backend.collective = None
                return True
        except self._backend.MPI.Exception as error:
            raise self._backend.translate(error) from error
        if self._backend.killed:
            raise CommError(f"rank {self._backend.rank}, mpi: the transport was stopped")
        return False

    def wait(self, i: int, deadline: float) -> None:
        raise AssertionError("a polling backend is polled")
