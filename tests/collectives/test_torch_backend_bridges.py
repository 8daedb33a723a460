"""The contract through both bridges: a communicator over a process group, be it gloo's or one of ours."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import collectives
import collectives.torch_backend
from collectives import Communicator, conformance
from collectives.backends.threads import ThreadsBackend, World
from collectives.torch_backend import CollectivesProcessGroup
from collectives.types import RankInfo

Connect = Callable[[int], Communicator]


def gloo_group(store: Any, rank: int, world_size: int) -> dist.ProcessGroup:
    """torch's own, as ``new_group`` makes it."""
    group = dist.ProcessGroup(store, rank, world_size)
    kind = dist.ProcessGroup.BackendType.GLOO
    gloo = dist.ProcessGroupGloo(store, rank, world_size, timedelta(seconds=30))
    group._register_backend(torch.device("cpu"), kind, gloo)
    group._set_default_backend(kind)
    return group


def over_gloo(world_size: int) -> Connect:
    store = dist.HashStore()
    return lambda rank: collectives.from_process_group(gloo_group(store, rank, world_size), timeout=10.0)


def over_ours(world_size: int) -> Connect:
    world, store = World(world_size), dist.HashStore()

    def connect(rank: int) -> Communicator:
        info = RankInfo(rank=rank, world_size=world_size, local_rank=rank, local_world_size=world_size)
        below = Communicator(ThreadsBackend(world, rank), info, name="threads", timeout=10.0)
        return collectives.from_process_group(
            CollectivesProcessGroup(below, store, "cthreads", "threads"), timeout=10.0
        )

    return connect


def over_both(world_size: int) -> Connect:
    """A communicator over one of our groups, over a communicator over gloo's."""
    below, store = over_gloo(world_size), dist.HashStore()

    def connect(rank: int) -> Communicator:
        return collectives.from_process_group(
            CollectivesProcessGroup(below(rank), store, "cgloo", "gloo"), timeout=10.0
        )

    return connect


@pytest.mark.parametrize("group", conformance.GROUPS)
@pytest.mark.parametrize(
    ("bridge", "world_size"),
    [
        pytest.param(over_ours, 2, marks=pytest.mark.full),
        *(pytest.param(over_ours, size, marks=pytest.mark.exhaustive) for size in (1, 3, 4)),
        *(pytest.param(over_gloo, size, marks=pytest.mark.exhaustive) for size in (1, 2, 3, 4)),
        pytest.param(over_both, 2, marks=pytest.mark.exhaustive),
    ],
)
def test_contract(bridge: Callable[[int], Connect], world_size: int, group: str) -> None:
    conformance.run(bridge, world_size, groups=[group]).raise_if_failed()
