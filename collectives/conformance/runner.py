"""Run the suite over a backend: ranks as threads or processes of this program."""

from __future__ import annotations

import faulthandler
import tempfile
import threading
from collections.abc import Iterable, Sequence

from collectives.conformance.processes import run_processes
from collectives.conformance.rank import Connect, Factory, Outcomes, Places, Watch, run_rank
from collectives.conformance.report import Report, first_failure
from collectives.conformance.table import Trial, trials


def run(
    factory: Factory,
    world_size: int,
    *,
    groups: Iterable[str] | None = None,
    processes: bool = False,
    timeout: float = 60.0,
    call_timeout: float = 10.0,
    max_failures: int = 3,
) -> Report:
    """Try the contract on a backend, with every rank started here.

    Args:
        factory: ``factory(world_size)`` makes what the ranks share and returns ``connect``; ``connect(rank)``, called
            on each rank, returns that rank's ``Backend`` (or a ``Communicator``). For processes ``connect`` is pickled.
        world_size: how many ranks. Try 1, 2, 3 and an odd size above at least.
        groups: parts of the contract (see ``GROUPS``); None for all.
        processes: ranks are processes instead of threads.
        timeout: seconds that a trial may take; ranks that hang fail it, with their stacks.
        call_timeout: seconds of the communicators, below ``timeout``, so that the library's own error comes first.
        max_failures: after so many failed trials the run stops; after each it goes on with new ranks.

    Returns:
        A report. ``report.raise_if_failed()`` raises ``ConformanceError``.
    """
    wanted = trials(groups)
    report = Report(world_size)
    session = run_processes if processes else run_threads
    while wanted:
        outcomes, places, stacks = session(factory(world_size), world_size, wanted, timeout, call_timeout)
        found = first_failure(wanted, outcomes, places, stacks)
        if found is None:
            report.passed += len(wanted)
            return report
        number, failed = found
        report.passed += number
        report.findings.append(failed)
        wanted = wanted[number + 1 :]
        if len(report.findings) == max_failures and wanted:
            report.stopped = f"stopped after {max_failures} failures, {len(wanted)} trials before the end"
            return report
    return report


def run_threads(
    connect: Connect, world_size: int, wanted: Sequence[Trial], timeout: float, call_timeout: float
) -> tuple[Outcomes, Places, str]:
    """What each rank answered, where each was, and what there is to read about those that hung."""
    outcomes: Outcomes = {}
    places: Places = dict.fromkeys(range(world_size), -1)
    crashed: dict[int, str] = {}
    changed = threading.Condition()

    def main(rank: int) -> None:
        try:
            outcome = run_rank(connect, rank, world_size, wanted, call_timeout, lambda n: places.update({rank: n}))
        except Exception as error:
            with changed:
                crashed[rank] = f"rank {rank} did not start or end: {type(error).__name__}: {error}"
                changed.notify_all()
            return
        with changed:
            outcomes[rank] = outcome
            changed.notify_all()

    ranks = range(world_size)
    threads = [threading.Thread(target=main, args=(rank,), name=f"rank {rank}", daemon=True) for rank in ranks]
    for thread in threads:
        thread.start()
    watch = Watch(timeout)
    with changed:
        while len(outcomes) + len(crashed) < world_size and (left := watch.left(places.values())) > 0:
            changed.wait(min(left, 1.0))
            if crashed or any(outcome.failure for outcome in outcomes.values()):
                watch.hurry()
        answered, said = dict(outcomes), "\n".join(crashed.values())
    hung = len(answered) + len(crashed) < world_size
    return answered, dict(places), "\n".join(filter(None, [said, _stacks() if hung else ""]))


def _stacks() -> str:
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read().decode(errors="replace")
