"""How a process group comes about: from what torch gives a backend, to a communicator."""

from __future__ import annotations

import atexit
import functools
import socket
import weakref
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore

from collectives import backends, rendezvous
from collectives.communicator import Communicator
from collectives.errors import RendezvousError, UnsupportedError
from collectives.launchers import MpiWorld
from collectives.meeting import LOOPBACK, mpi_world
from collectives.torch_backend.features import default_group
from collectives.torch_backend.process_group import CollectivesProcessGroup
from collectives.types import RankInfo

# torch's name to the layer over the transport, and the transport; None: MPI where it starts the ranks, else gloo.
NAMES: Mapping[str, tuple[tuple[str, ...], str | None]] = {
    "cmpi": ((), "mpi"),
    "cshm": (("shm",), None),
    "cring": (("ring",), None),
    "cgloo": ((), "gloo"),
}


def create(name: str, asked: Any, options: Any) -> CollectivesProcessGroup:
    """The process group that torch asks the backend ``name`` for. Collective among the group's ranks.

    Args:
        asked: torch's ``_DistributedBackendOptions``: the group's store, ranks, size, name and time-out.
        options: torch's ``pg_options``, of which there are none.
    """
    if options is not None:
        raise UnsupportedError(f"backend {name} takes no pg_options, found {options!r}; leave them out")
    environ = rendezvous.environment()
    timeout = asked.timeout.total_seconds()
    members = list(asked.global_ranks_in_group)
    world = default_group() if members else None
    if members:  # nothing that all ranks must take part in
        told = _told(environ, lambda: None)
        mpi = isinstance(world, CollectivesProcessGroup) and backends.parse(world.stack).base == "mpi"
    else:
        told = _told(environ, functools.partial(mpi_world, environ))
        mpi = told is not None and told.mpi and mpi_world(environ) is not None
    asked_for = environ.get("COLLECTIVES_BACKEND")
    backend = stack_name(name, asked.group_size if world is None else world.size(), asked_for, mpi=mpi)
    if isinstance(world, CollectivesProcessGroup) and world.stack == backend:
        comm = world.comm._subgroup(members, world.nodes, f"torch {asked.group_id}", timeout)
        return CollectivesProcessGroup(comm, asked.store, name, backend)
    if members and backends.parse(backend).base == "mpi":
        raise UnsupportedError(
            f"new_group(backend={name!r}) makes an MPI communicator of some ranks, for which the default group must be "
            f"on {backend} as well, found {world.name() if world is not None else 'none'}; call "
            f"init_process_group({name!r})"
        )
    generation = asked.store.add(f"collectives/{asked.group_rank}", 1)  # a name may be used again
    store = PrefixStore(f"collectives/{generation}", asked.store)
    comm = _connect(backend, told, asked.group_rank, asked.group_size, store, environ, timeout)
    close_at_exit(comm)
    return CollectivesProcessGroup(comm, asked.store, name, backend, comm._gather_ints(comm.node))


def stack_name(name: str, world_size: int, asked_for: str | None, *, mpi: bool) -> str:
    """The full name for one of ``NAMES``. ``asked_for``, COLLECTIVES_BACKEND, refines a name that it fits.

    So ``shm+mpi`` there is what "cshm" and "cmpi" mean, while "cgloo" stays as it is. ``mpi``: MPI started the job.
    """
    layers, base = NAMES[name]
    if asked_for:
        stack = backends.parse(asked_for)
        if set(layers) <= set(stack.layers) and base in (None, stack.base):
            return asked_for
    if world_size == 1:
        layers = tuple(layer for layer in layers if layer != "shm")
    return "+".join([*layers, base or ("mpi" if mpi else "gloo")])


def close_at_exit(comm: Communicator) -> None:
    """Say goodbye when the program ends without destroying its process groups, as many do."""
    reference = weakref.ref(comm)

    def close() -> None:
        comm = reference()
        if comm is not None and comm._progress.failure is None:
            comm.close()

    atexit.register(close)


def _told(environ: Mapping[str, str], ask_mpi: MpiWorld) -> RankInfo | None:
    """What a launcher says of this process; None where launchers contradict each other, so that torch's word counts."""
    try:
        return rendezvous.resolve(environ, mpi_world=ask_mpi)
    except RendezvousError:
        return None


def _connect(
    backend: str, told: RankInfo | None, rank: int, size: int, store: Any, environ: Mapping[str, str], timeout: float
) -> Communicator:
    if told is not None and (told.rank, told.world_size) == (rank, size):
        plan = rendezvous.plan(environ, backend, device="cpu")
    else:
        plan = rendezvous.plan(environ, backend, device="cpu", rank=rank, world_size=size)
        if plan.stack.base != "mpi":  # which knows best itself
            plan = replace(plan, info=_located(plan.info, store))
    return rendezvous.connect(
        plan, environ, lambda: (store, _host_of(store, environ)), timeout=timeout, setup_timeout=timeout
    )


def _located(info: RankInfo, store: Any) -> RankInfo:
    """The same rank, with the place among the ranks of its host that all ranks' host names give it."""
    store.set(f"host/{info.rank}", socket.gethostname())
    names = [bytes(store.get(f"host/{rank}")).decode() for rank in range(info.world_size)]
    here = [rank for rank, name in enumerate(names) if name == names[info.rank]]
    node = list(dict.fromkeys(names)).index(names[info.rank])
    return replace(info, local_rank=here.index(info.rank), local_world_size=len(here), node=node)


def _host_of(store: Any, environ: Mapping[str, str]) -> str:
    """The host that serves the job's store."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    host: str = getattr(store, "host", None) or environ.get("MASTER_ADDR") or LOOPBACK
    return host
