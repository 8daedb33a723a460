"""What a run of the suite found, on all ranks together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from collectives.conformance.table import RankOutcome, Trial


class ConformanceError(AssertionError):
    """A backend does not keep the contract; the message lists every failed trial."""


@dataclass(frozen=True)
class Finding:
    """A trial that failed. ``errors`` holds by rank what was raised, ``details`` traces or stacks."""

    trial: str
    group: str
    errors: Mapping[int, str]
    details: str

    def __str__(self) -> str:
        said = "; ".join(f"rank {rank}: {error}" for rank, error in sorted(self.errors.items()))
        return f"{self.group}: {self.trial}: {said}"


@dataclass
class Report:
    """How many trials ran and held on all ranks, and what failed. ``stopped`` says why a run ended early."""

    world_size: int
    passed: int = 0
    findings: list[Finding] = field(default_factory=list)
    stopped: str = ""

    @property
    def ok(self) -> bool:
        return not self.findings and not self.stopped

    def __str__(self) -> str:
        head = f"{self.passed} trials held on {self.world_size} ranks, {len(self.findings)} failed"
        lines = [head, *map(str, self.findings), *([self.stopped] if self.stopped else [])]
        return "\n".join(lines)

    def raise_if_failed(self) -> None:
        """Raise ``ConformanceError`` with the findings, and the details of the first."""
        if not self.ok:
            details = f"\n\n{self.findings[0].details}" if self.findings else ""
            raise ConformanceError(f"{self}{details}")


def first_failure(
    wanted: Sequence[Trial], outcomes: Mapping[int, RankOutcome], places: Mapping[int, int], stacks: str
) -> tuple[int, Finding] | None:
    """The first trial that failed on any rank, and its number; None if all held on all.

    ``places`` says which trial each rank began last, -1 for none. Ranks missing in ``outcomes`` hung or died. Errors
    that only echo another rank's do not count, unless there is nothing else.
    """
    silent = [rank for rank in places if rank not in outcomes]
    failures = {rank: outcome.failure for rank, outcome in outcomes.items() if outcome.failure is not None}
    if not failures and not silent:
        return None
    own = [failure.trial for failure in failures.values() if not failure.echo]
    echoed = [failure.trial for failure in failures.values()]
    first = max(0, min(own or [*echoed, *(places[rank] for rank in silent)]))
    errors = {rank: failure.error for rank, failure in failures.items() if failure.trial == first}
    for rank in silent:
        last = f"it began {wanted[places[rank]].name}" if places[rank] >= 0 else "it was started"
        errors[rank] = f"gave no answer after {last}"
    traces = [f"rank {rank}:\n{failure.trace}" for rank, failure in sorted(failures.items())]
    details = "\n".join([*traces, *([stacks] if stacks else [])])
    return first, Finding(wanted[first].name, wanted[first].group, errors, details)
