"""One rank of a run: from connecting to closing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from collectives.backend import Backend
from collectives.communicator import Communicator
from collectives.conformance.table import RankOutcome, Trial, run_here
from collectives.types import RankInfo

Connect: TypeAlias = Callable[[int], "Backend | Communicator"]
Factory: TypeAlias = Callable[[int], Connect]
Outcomes: TypeAlias = dict[int, RankOutcome]
Places: TypeAlias = dict[int, int]  # rank to the number of the trial that it began last, -1 before the first
START = 120.0  # seconds that ranks may take to connect
LEAVE = 30.0  # and to exit when all went well
GRACE = 5.0  # seconds that the others may still take when one rank has failed


class Watch:
    """How long to wait for ranks that should get ahead: ``timeout`` seconds a trial, less once one has failed."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._seen: list[int] = []
        self._deadline = 0.0
        self._hurries = False

    def left(self, places: Iterable[int]) -> float:
        """Seconds until the next sign of life is overdue."""
        now, seen = time.monotonic(), list(places)
        if seen != self._seen and not self._hurries:
            starting = min(seen, default=0) < 0
            self._seen, self._deadline = seen, now + (START if starting else self._timeout)
        return self._deadline - now

    def hurry(self) -> None:
        if not self._hurries:
            self._hurries = True
            self._deadline = min(self._deadline, time.monotonic() + GRACE)


def _communicator(connect: Connect, rank: int, world_size: int, timeout: float) -> Communicator:
    connected = connect(rank)
    if isinstance(connected, Communicator):
        return connected
    launcher = "conformance" if threading.current_thread() is threading.main_thread() else "threads"
    info = RankInfo(rank=rank, world_size=world_size, local_rank=rank, local_world_size=world_size, launcher=launcher)
    return Communicator(connected, info, name=connected.name, timeout=timeout)


def run_rank(
    connect: Connect,
    rank: int,
    world_size: int,
    wanted: Sequence[Trial],
    timeout: float,
    began: Callable[[int], None],
) -> RankOutcome:
    """What a rank does, from connecting to closing."""
    comm = _communicator(connect, rank, world_size, timeout)
    outcome = run_here(comm, wanted, began)
    if outcome.failure is None:
        comm.close()
    return outcome
