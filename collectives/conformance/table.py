"""The one table of checks, and how one rank runs a part of it."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from collectives.communicator import Communicator
from collectives.conformance import arguments, failures, groups, messages, movements, reductions, works
from collectives.conformance.case import Case, Check
from collectives.errors import CommError

CHECKS: tuple[Check, ...] = tuple(
    check for module in (reductions, movements, messages, works, groups, arguments, failures) for check in module.CHECKS
)
GROUPS: tuple[str, ...] = tuple(dict.fromkeys(check.group for check in CHECKS))


class Trial(NamedTuple):
    """One check with one case. Pickles, because checks are functions of modules."""

    group: str
    function: Callable[[Communicator, Case], None]
    case: Case

    @property
    def name(self) -> str:
        return f"{self.function.__name__}[{self.case}]"


class Failure(NamedTuple):
    """A trial that did not hold on a rank. ``echo``: only because another rank had ended the communicator."""

    trial: int
    error: str
    trace: str
    echo: bool


class RankOutcome(NamedTuple):
    """What a rank has to say about a list of trials: how many it passed, and the one that it stopped at."""

    passed: int
    failure: Failure | None
    seconds: dict[str, float]  # by function


def trials(groups: Iterable[str] | None = None) -> list[Trial]:
    """The table, spelt out, of some ``groups`` or all. Raises ``ValueError`` for a group that does not exist."""
    wanted = tuple(GROUPS if groups is None else groups)
    if unknown := set(wanted) - set(GROUPS):
        raise ValueError(f"unknown groups {sorted(unknown)}; expected some of {', '.join(GROUPS)}")
    return [Trial(c.group, c.function, case) for c in CHECKS if c.group in wanted for case in c.cases]


def run_here(
    comm: Communicator, wanted: Sequence[Trial], began: Callable[[int], None] = lambda number: None
) -> RankOutcome:
    """Run trials in order on this rank, as all ranks do, up to the first that fails.

    Then the communicator is aborted, so that no rank waits for this one. ``began`` hears the number of each trial.
    """
    seconds: dict[str, float] = {}
    for number, trial in enumerate(wanted):
        began(number)
        start = time.perf_counter()
        try:
            trial.function(comm, trial.case)
        except Exception as error:
            # Nothing is known about a transport under test: aborting it may fail as well.
            try:
                comm.abort(f"{trial.name} failed: {error}")
            except Exception as another:
                error.__context__ = another
            echo = isinstance(error, CommError)
            text = f"{type(error).__name__}: {error}"
            return RankOutcome(number, Failure(number, text, traceback.format_exc(), echo), seconds)
        name = trial.function.__name__
        seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - start
    return RankOutcome(len(wanted), None, seconds)
