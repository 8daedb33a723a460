"""Where torch's ranks meet under launchers that torch does not know: mpirun and srun set no MASTER_ADDR."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from collectives import rendezvous
from collectives.meeting import meet
from collectives.torch_backend.features import Handler, rendezvous_handlers

_TORCHS_OWN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def extend_env() -> None:
    """Let ``env://``, torch's default, find the ranks of any launcher. torch's own variables come first."""
    handlers = rendezvous_handlers()
    if not isinstance(handlers["env"], EnvHandler):
        handlers["env"] = EnvHandler(handlers["env"])


class EnvHandler:
    """torch's handler of ``env://``, and ours where that one would find too little."""

    def __init__(self, torchs: Handler) -> None:
        self._torchs = torchs

    def __call__(self, url: str, timeout: timedelta = timedelta(minutes=30), **kwargs: Any) -> Iterator[Any]:
        environ = rendezvous.environment()
        asked = "rank=" in url or "world_size=" in url  # by init_process_group's arguments
        if asked or all(environ.get(name) for name in _TORCHS_OWN):
            return self._torchs(url, timeout=timeout, **kwargs)
        return iter([found(timeout.total_seconds())[:3]])


def found(timeout: float) -> tuple[Any, int, int, str]:
    """The job's store, this rank, how many there are, and the host that serves the store. Collective.

    Raises ``RendezvousError`` where no launcher speaks clearly or the ranks do not meet within ``timeout`` seconds.
    """
    environ = rendezvous.environment()
    info = rendezvous.plan(environ, "gloo").info
    store, host = meet(info, environ, timeout, fixed=False)
    return store, info.rank, info.world_size, host
