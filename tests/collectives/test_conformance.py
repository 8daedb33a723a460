"""Our own backends under the conformance suite: one test for each backend, world size and part of the contract."""

from __future__ import annotations

import pytest

from collectives import Communicator, conformance
from collectives.conformance.report import Report, first_failure
from collectives.conformance.table import RankOutcome
from tests.ranks import POOLS, family, run_ranks

# Three threads are what test_mutants.py compares its planted faults with.
PLAIN = [("threads", 1), ("threads", 2), ("gloo", 2), ("mpi", 2), ("ring+mpi", 2), ("shm+gloo", 3)]
FULL = [("threads", 3), ("mpi", 3), ("ring+gloo", 3), ("shm+mpi", 2)]
EXHAUSTIVE = [
    *(("threads", size) for size in (4, 8)),
    *(
        (backend, size)
        for backend in ("gloo", "mpi", "ring+gloo", "ring+mpi", "shm+gloo", "shm+mpi")
        for size in (1, 2, 3, 4)
    ),
    *(("ring+threads", size) for size in (2, 3)),
]


def run_group(comm: Communicator, group: str) -> RankOutcome:
    """One part of the contract as one task of a pool."""
    return conformance.run_here(comm, conformance.trials([group]))


@pytest.mark.parametrize(
    ("backend", "world_size"),
    [
        *(pytest.param(*pair) for pair in PLAIN),
        *(pytest.param(*pair, marks=pytest.mark.full) for pair in FULL),
        *(pytest.param(*pair, marks=pytest.mark.exhaustive) for pair in EXHAUSTIVE if pair not in PLAIN + FULL),
    ],
)
@pytest.mark.parametrize("group", conformance.GROUPS)
def test_contract(group: str, backend: str, world_size: int) -> None:
    trials = conformance.trials([group])
    outcomes = dict(enumerate(run_ranks(run_group, group, backend=backend, world_size=world_size, timeout=100.0)))
    found = first_failure(trials, outcomes, dict.fromkeys(outcomes, 0), "")
    if found is None:
        return
    if launcher := family(backend):
        POOLS.get(launcher, world_size).kill()  # its communicator was aborted; the next test gets new ranks
    Report(world_size, found[0], [found[1]]).raise_if_failed()
