"""Training tests ask for ``run``: ranks that are threads; with ``--exhaustive`` each runs on every backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import collectives
from tests.ranks import Run, backends, run_ranks

TIMEOUT = 60.0
EVERYWHERE = ["threads", "gloo", "mpi", "ring+gloo", "shm+gloo"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that asks for ``run`` and names no backends gets these."""
    if "run" not in metafunc.fixturenames or _names_backends(metafunc):
        return
    mark = backends(*EVERYWHERE)
    metafunc.parametrize(*mark.args)


def _names_backends(metafunc: pytest.Metafunc) -> bool:
    for mark in metafunc.definition.iter_markers("parametrize"):
        names = mark.args[0].split(",") if isinstance(mark.args[0], str) else mark.args[0]
        if "backend" in [name.strip() for name in names]:
            return True
    return False


@pytest.fixture
def run(backend: str) -> Run:
    """Calls a function on ``n`` ranks and returns the results by rank."""

    def on_ranks(fn: Callable[..., Any], *args: Any, n: int = 2) -> list[Any]:
        if backend == "threads":
            return collectives.run(fn, *args, n=n, algorithm="direct", timeout=TIMEOUT)
        return run_ranks(fn, *args, world_size=n, backend=backend, timeout=TIMEOUT)

    return on_ranks
