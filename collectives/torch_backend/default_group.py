"""A default group that is there before the script begins, and that the script's own ``init_process_group`` returns."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from collectives import rendezvous
from collectives.torch_backend.features import INIT_NAMES, default_group
from collectives.torch_backend.rendezvous_handler import found

_log = logging.getLogger("collectives")


def begin(backend: str, timeout: float = 1800.0) -> None:
    """Make torch's default group on ``backend`` for the job that a launcher started. Collective.

    RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set for whoever reads them. From
    then on ``init_process_group`` returns this group, whatever it is asked for; destroyed, it is made again.

    Raises what ``collectives.init`` raises.
    """
    make = functools.partial(_make, backend, timeout, dist.init_process_group)
    make()
    instead = _Instead(make)
    for module, name in INIT_NAMES:
        setattr(module, name, instead)


def _make(backend: str, timeout: float, init: Callable[..., None]) -> None:
    store, rank, size, host = found(timeout)
    info = rendezvous.plan(rendezvous.environment(), "gloo").info
    told = {
        "RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_RANK": info.local_rank,
        "LOCAL_WORLD_SIZE": info.local_world_size,
        "MASTER_ADDR": info.master_addr or host,
        "MASTER_PORT": info.master_port or _port(store),
    }
    rendezvous.export({name: str(value) for name, value in told.items()})
    init(backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout))


def _port(store: Any) -> int:
    from collectives.backends.torch_dist import store_port

    return store_port(store)


class _Instead:
    """What a script calls as ``torch.distributed.init_process_group``."""

    def __init__(self, make: Callable[[], None]) -> None:
        self._make = make
        self._told = False

    def __call__(self, backend: str | None = None, *_: Any, **__: Any) -> dist.ProcessGroup | None:
        if not dist.is_initialized():
            self._make()
        group = default_group()
        if not self._told and group is not None and group.rank() == 0:
            _log.warning(
                "init_process_group(%s) returns the default group that is there already, on %s",
                "" if backend is None else repr(str(backend)),
                dist.get_backend(group),
            )
        self._told = True
        return group
