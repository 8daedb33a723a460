"""The contract of a communicator as a suite that anyone can run on a backend of their own.

``run(factory, world_size)`` starts the ranks and returns a ``Report``; ``collectives.conformance.plugin`` does it from
pytest, one test for each part of the contract. Where a launcher starts the ranks, ``launched.Session`` runs the same
table with every process a rank. Checks are plain functions of a communicator and a ``Case``, listed in ``CHECKS``.
"""

from collectives.conformance.case import Case, Check
from collectives.conformance.report import ConformanceError, Finding, Report
from collectives.conformance.runner import run
from collectives.conformance.table import CHECKS, GROUPS, Trial, run_here, trials

__all__ = [
    "CHECKS",
    "GROUPS",
    "Case",
    "Check",
    "ConformanceError",
    "Finding",
    "Report",
    "Trial",
    "run",
    "run_here",
    "trials",
]
