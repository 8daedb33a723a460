"""The laws under a real launcher, with every test process a rank:

    mpirun -n 2 python -m pytest --with-mpi tests/collectives/test_under_launcher.py
    torchrun --nproc-per-node 2 -m pytest tests/collectives/test_under_launcher.py

In a plain run it is a world of one. tests/collectives/test_drivers.py starts both commands.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator

import pytest
import torch

import collectives
from collectives import Communicator
from tests.collectives import test_laws as laws

UNDER_MPI = "OMPI_COMM_WORLD_SIZE" in os.environ or "PMI_SIZE" in os.environ
SIZE = int(next((os.environ[v] for v in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "WORLD_SIZE") if v in os.environ), 1))
STACKS = ["gloo", "ring+gloo", *(["mpi", "ring+mpi"] if UNDER_MPI else [])]


@pytest.fixture(scope="module", params=STACKS)
def comm(request: pytest.FixtureRequest) -> Generator[Communicator]:
    with collectives.init(request.param, timeout=30.0, setup_timeout=60.0) as communicator:
        yield communicator


def test_the_launcher_is_seen(comm: Communicator) -> None:
    assert comm.world_size == SIZE
    ranks = torch.zeros(SIZE, dtype=torch.int64)
    comm.all_gather(ranks, torch.tensor([comm.rank]))
    assert ranks.tolist() == list(range(SIZE))


@pytest.mark.parametrize("law", laws.PLAIN)
def test_law(comm: Communicator, law: Callable[[Communicator], None]) -> None:
    law(comm)


@pytest.mark.parametrize("law", laws.WITH_ALGORITHM)
def test_law_of_chosen_algorithm(comm: Communicator, law: Callable[..., None]) -> None:
    law(comm, None)
