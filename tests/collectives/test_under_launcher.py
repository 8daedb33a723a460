"""The conformance suite with every test process a rank of a real launcher:

    mpirun -n 4 python -m pytest --with-mpi tests/collectives/test_under_launcher.py
    torchrun --nproc-per-node 4 -m pytest tests/collectives/test_under_launcher.py

In a plain run it is a world of one. tests/collectives/test_drivers.py starts both commands.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Generator

import pytest

import collectives
from collectives import conformance
from collectives.conformance.launched import Session

UNDER_MPI = "OMPI_COMM_WORLD_SIZE" in os.environ or "PMI_SIZE" in os.environ
BACKENDS = ["mpi", "ring+mpi", "gloo"] if UNDER_MPI else ["gloo", "ring+gloo"]
CHOSEN = os.environ.get("CONFORMANCE_BACKENDS", ",".join(BACKENDS)).split(",")


@pytest.fixture(scope="module", params=CHOSEN)
def session(request: pytest.FixtureRequest) -> Generator[Session]:
    make = functools.partial(collectives.init, request.param, timeout=20.0, setup_timeout=60.0)
    session = Session(make, timeout=60.0)
    yield session
    session.close()


@pytest.mark.parametrize("group", conformance.GROUPS)
def test_contract(session: Session, group: str) -> None:
    session.run(group).raise_if_failed()
