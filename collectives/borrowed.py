"""A communicator over what somebody else has connected."""

from __future__ import annotations

import socket
from importlib import import_module
from typing import Any

from collectives.backend import Backend
from collectives.communicator import Communicator
from collectives.types import RankInfo


def from_process_group(group: Any, *, timeout: float = 600.0) -> Communicator:
    """A communicator of the ranks of a process group of ``torch.distributed``. Collective over the group.

    The group remains the caller's: closing the communicator leaves it alone, but whatever fails the communicator, or
    aborts it, ends the group as well. While the communicator lives, nobody else sends messages through the group.

    Args:
        group: a ``torch.distributed.ProcessGroup``, as ``init_process_group`` and ``new_group`` make them.
        timeout: seconds that a call waits for its peers. The group's own time-out still holds for its collectives.

    Raises:
        TypeError: that is no process group, or this rank is not in it.
        UnsupportedError: the group serves neither CPU nor CUDA tensors.
    """
    backend: Backend = import_module("collectives.backends.process_group").backend_of(group)
    alone = RankInfo(rank=backend.rank, world_size=backend.size, local_world_size=backend.size, local_rank=backend.rank)
    comm = Communicator(backend, alone, name=backend.name, device=backend.device, timeout=timeout)
    names = comm.all_gather_object(socket.gethostname())
    here = [rank for rank, name in enumerate(names) if name == names[comm.rank]]
    comm.local_rank, comm.local_world_size = here.index(comm.rank), len(here)
    comm.node = list(dict.fromkeys(names)).index(names[comm.rank])
    return comm
