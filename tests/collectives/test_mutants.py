"""The conformance suite can fail: it catches every planted fault, and nothing else."""

from __future__ import annotations

import pytest

from collectives import conformance
from tests.collectives.mutants import CALL_TIMEOUT, MUTANTS, healthy

# Those that are noticed by waiting.
SLOW = ("SurvivesItsAbort", "CannotBePolled", "IgnoresDeadlines", "SkipsEmptyTensors", "LeavesBarriersEarly")


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.full if n in SLOW else ()) for n in MUTANTS])
def test_a_planted_fault_is_caught(name: str) -> None:
    factory, group = MUTANTS[name]
    report = conformance.run(factory, 3, groups=[group], timeout=5.0, call_timeout=CALL_TIMEOUT, max_failures=1)
    assert not report.ok, f"{name} passed for healthy"
    assert report.findings[0].group == group
    assert report.findings[0].errors


@pytest.mark.full
def test_the_healthy_one_passes() -> None:
    groups = sorted({group for _, group in MUTANTS.values()})
    report = conformance.run(healthy, 3, groups=groups, call_timeout=CALL_TIMEOUT)
    assert report.ok, str(report)
    assert report.passed > 500


def test_at_least_twelve_kinds_of_fault_are_planted() -> None:
    assert len(MUTANTS) >= 12
    assert len({group for _, group in MUTANTS.values()}) >= 10
