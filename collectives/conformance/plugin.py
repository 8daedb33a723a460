"""The suite from pytest: one test for each part of the contract.

pytest_plugins = ["collectives.conformance.plugin"]

@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_my_backend(conformance, world_size):
    conformance(factory, world_size)  # as collectives.conformance.run, for one part
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from collectives.conformance.rank import Factory
from collectives.conformance.runner import run
from collectives.conformance.table import GROUPS


@pytest.fixture(params=GROUPS)
def conformance(request: pytest.FixtureRequest) -> Callable[..., None]:
    """``conformance(factory, world_size, **options)`` runs one part of the contract and raises where it fails."""

    def check(factory: Factory, world_size: int, **options: Any) -> None:
        run(factory, world_size, groups=[request.param], **options).raise_if_failed()

    return check
