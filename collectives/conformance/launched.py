"""The suite where a launcher started the ranks: every process runs the table, and they tell each other how it went.

Outcomes cross the job's key-value store, not the communicator under test, and with a time-out: what fails on one rank
fails on all, and a rank that hangs or dies holds nobody up.
"""

from __future__ import annotations

import faulthandler
import pickle
import time
from collections.abc import Callable
from datetime import timedelta

from collectives.communicator import Communicator
from collectives.conformance.rank import GRACE, Outcomes
from collectives.conformance.report import Report, first_failure
from collectives.conformance.table import RankOutcome, run_here, trials
from collectives.meeting import meet
from collectives.rendezvous import environment, plan


class Session:
    """This process as one of the ranks. ``make()`` returns its communicator; collective over all ranks.

    After a failure a new communicator is made, and the next part is tried with that.
    """

    def __init__(self, make: Callable[[], Communicator], *, timeout: float = 60.0) -> None:
        """``timeout``: seconds that a part may take. A rank that is still busy then shows its stacks and exits."""
        environ = environment()
        info = plan(environ).info
        self.rank, self.world_size = info.rank, info.world_size
        self._make = make
        self._timeout = timeout
        self._store, _ = meet(info, environ, timeout, fixed=False)
        self._comm: Communicator | None = None
        self._parts = 0
        self._broken = ""

    def run(self, group: str) -> Report:
        """One part of the contract, on all ranks; the same report on each."""
        report = Report(self.world_size)
        if self._broken:
            report.stopped = self._broken
            return report
        wanted = trials([group])
        faulthandler.dump_traceback_later(self._timeout + 2 * GRACE, exit=True)
        try:
            if self._comm is None:
                self._comm = self._make()
            outcome = run_here(self._comm, wanted)
        finally:
            faulthandler.cancel_dump_traceback_later()
        outcomes = self._exchange(outcome)
        found = first_failure(wanted, outcomes, dict.fromkeys(range(self.world_size), 0), "")
        if found is None:
            report.passed = len(wanted)
            return report
        report.passed = found[0]
        report.findings.append(found[1])
        self._comm = None
        if missing := sorted(set(range(self.world_size)) - set(outcomes)):
            self._broken = f"stopped: ranks {missing} hung or died in an earlier part"
        return report

    def close(self) -> None:
        """Leave. Collective where all went well."""
        if self._comm is not None:
            self._comm.close()

    def _exchange(self, outcome: RankOutcome) -> Outcomes:
        """By rank, what those said that answered in time."""
        self._parts += 1
        key = f"conformance/{self._parts}"
        self._store.set(f"{key}/{self.rank}", pickle.dumps(outcome))
        deadline = time.monotonic() + self._timeout
        outcomes: Outcomes = {}
        for rank in range(self.world_size):
            left = timedelta(seconds=max(0.01, deadline - time.monotonic()))
            try:
                self._store.wait([f"{key}/{rank}"], left)
            except RuntimeError:  # the time-out of the store; a rank without an answer is a finding
                continue
            outcomes[rank] = pickle.loads(bytes(self._store.get(f"{key}/{rank}")))
            if outcomes[rank].failure is not None:
                deadline = min(deadline, time.monotonic() + GRACE)
        return outcomes
