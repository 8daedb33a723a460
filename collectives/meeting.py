"""Where ranks meet: the job's key-value store, and the address by which a host reaches the others."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, TypeAlias

import torch

from collectives import hosts
from collectives.control import Control
from collectives.errors import RendezvousError, UnsupportedError
from collectives.types import RankInfo

Share: TypeAlias = Callable[["bytes | None", str], bytes]  # rank 0's bytes, under a key, on every rank
LOOPBACK = "127.0.0.1"
_JOB_STORES: dict[tuple[int, str, int], Any] = {}  # a port is a resource of the process, like a descriptor


def load_mpi(environ: Mapping[str, str]) -> Any:
    """The module of the MPI backend, with MPI started. Raises ``UnsupportedError`` where there is none."""
    module = import_module("collectives.backends.mpi")
    module.ensure_mpi(environ)
    return module


def mpi_world(environ: Mapping[str, str]) -> tuple[int, int, int, int] | None:
    """Rank, size, local rank and local size in MPI's world; None where no MPI loads."""
    try:
        world: tuple[int, int, int, int] = load_mpi(environ).mpi_world()
    except UnsupportedError:
        return None
    return world


def meet(info: RankInfo, environ: Mapping[str, str], timeout: float, *, fixed: bool) -> tuple[Any, str]:
    """The job's store, and the host that serves it. ``fixed``: an argument says where, whatever MPI could tell.

    Each call of ``init`` gets keys of its own, so that a second communicator does not read what the first one left.
    """
    torch_dist = import_module("collectives.backends.torch_dist")
    if info.world_size == 1:
        store = torch_dist.open_store(LOOPBACK, 0, is_server=True, world_size=1, timeout=timeout)
        return store, LOOPBACK
    if info.mpi and not fixed and _mpi_world_matches(info, environ):
        return _meet_over_mpi(info, environ, timeout)
    host, port = info.master_addr, info.master_port
    if not host or not port:
        raise RendezvousError(
            f"rank {info.rank} of {info.world_size} ({info.launcher}) does not know where to meet rank 0: "
            f"MASTER_ADDR is {host or 'not set'} and MASTER_PORT is {port or 'not set'}; set both, to the host of rank "
            "0 and a free port on it, or start the program with torchrun, mpirun or 'python -m launch'"
        )
    if info.local_world_size < info.world_size and hosts.is_loopback(host):
        raise RendezvousError(
            f"the job spans several hosts, but MASTER_ADDR={host} is a loopback address, which only its own host can "
            "reach; set it to a name or address of the host of rank 0"
        )
    serves = info.rank == 0 and not info.agent_store
    fd = _inherited_listener(info) if serves else None
    store = _job_store(host, port, serves, info.world_size, fd, timeout)
    generation = store.add(f"{info.job}/generation/{info.rank}", 1)
    return torch_dist.sub_store(store, f"{info.job}/{generation}"), host


def _job_store(host: str, port: int, serves: bool, world_size: int, fd: int | None, timeout: float) -> Any:
    """The connection to the store at a fixed place: one a process, because rank 0 can serve the port only once."""
    key = (os.getpid(), host, port)
    if key not in _JOB_STORES:
        open_store = import_module("collectives.backends.torch_dist").open_store
        _JOB_STORES[key] = open_store(
            host, port, is_server=serves, world_size=world_size, timeout=timeout, listen_fd=fd
        )
    return _JOB_STORES[key]


def _inherited_listener(info: RankInfo) -> int | None:
    """The launcher's listening socket; None where this process did not inherit it, for instance as a grandchild."""
    fd = info.store_fd
    if fd is None:
        return None
    try:
        if not stat.S_ISSOCK(os.fstat(fd).st_mode):
            return None
        with socket.socket(fileno=os.dup(fd)) as listener:
            ours = listener.getsockname()[1:2] == (info.master_port,)
    except OSError:  # closed: then the port is free, and rank 0 binds it itself
        return None
    if not ours:
        return None
    os.set_inheritable(fd, False)
    return fd


def _mpi_world_matches(info: RankInfo, environ: Mapping[str, str]) -> bool:
    world = mpi_world(environ)
    return world is not None and world[:2] == (info.rank, info.world_size)


def _meet_over_mpi(info: RankInfo, environ: Mapping[str, str], timeout: float) -> tuple[Any, str]:
    """Rank 0 takes any free port and tells the others where, so that no port is guessed."""
    torch_dist = import_module("collectives.backends.torch_dist")
    store: Any = None
    told: bytes | None = None
    failure: Exception | None = None
    if info.rank == 0:
        try:
            host = LOOPBACK if info.local_world_size == info.world_size else own_address(environ)
            store = torch_dist.open_store(host, 0, is_server=True, world_size=info.world_size, timeout=timeout)
            told = f"{host} {torch_dist.store_port(store)}".encode()
        except RendezvousError as error:
            told, failure = f"! {error}".encode(), error
    module = load_mpi(environ)
    module.guard_exit()  # MPI is running now, so a rank that dies would wait in MPI_Finalize for the others
    host, _, port = module.broadcast_bytes(told).decode().partition(" ")
    if host == "!":
        raise RendezvousError(f"rank 0 could not serve the key-value store: {port}") from failure
    if store is None:
        store = torch_dist.open_store(host, int(port), is_server=False, world_size=info.world_size, timeout=timeout)
    return store, host


def sharer(info: RankInfo, environ: Mapping[str, str], base: str, store: Callable[[], Any]) -> Share:
    """What carries rank 0's bytes to every rank before there is a communicator: MPI, or the job's store."""
    if info.world_size == 1:
        return lambda told, key: told or b""
    if base == "mpi":
        broadcast = load_mpi(environ).broadcast_bytes
        return lambda told, key: bytes(broadcast(told))

    def share(told: bytes | None, key: str) -> bytes:
        if told is not None:
            store().set(key, told)
        return bytes(store().get(key))

    return share


def connect_control(
    info: RankInfo, environ: Mapping[str, str], base: str, address: str, share: Share, timeout: float
) -> Control | None:
    """The control plane of the job; None where there is nobody else. ``address`` is what peers reach this host at."""
    if info.world_size == 1:
        return None
    if base == "mpi" and info.local_world_size < info.world_size:
        address = own_address(environ)
    return Control(info.rank, info.world_size, lambda told: share(told, "control"), address, timeout)


def own_address(environ: Mapping[str, str]) -> str:
    name = environ.get("GLOO_SOCKET_IFNAME")
    return hosts.interface_address(name.split(",")[0]) if name else hosts.own_address()


def address_between_hosts(info: RankInfo, environ: Mapping[str, str], met_at: Callable[[], str]) -> str:
    """This host's address for its peers on other hosts: that of the interface that routes to rank 0."""
    if environ.get("GLOO_SOCKET_IFNAME"):
        return own_address(environ)
    served_at = met_at()
    target = hosts.resolve_host(served_at)
    if info.rank == 0 and hosts.is_loopback(target):
        target = hosts.own_address()  # many hosts give their own name a loopback address
    address = hosts.routed_address(target) if not hosts.is_loopback(target) else target
    if hosts.is_loopback(address):
        raise RendezvousError(
            f"rank 0 is on another host, but its name {served_at!r} means {target} on {socket.gethostname()}, which "
            "is this host itself; mend /etc/hosts, or set MASTER_ADDR to an address, or GLOO_SOCKET_IFNAME to an "
            "interface"
        )
    return address


def require_own_devices(store: Any, info: RankInfo, device: torch.device) -> None:
    """NCCL needs a device for each rank. Ranks may each see another single device, so only the devices can tell."""
    mine = f"{socket.gethostname()} {torch.cuda.get_device_properties(device).uuid}"
    store.set(f"device/{info.rank}", mine)
    everyone = [bytes(store.get(f"device/{rank}")).decode() for rank in range(info.world_size)]
    for rank, who in enumerate(everyone):
        if (other := everyone.index(who)) < rank:
            raise UnsupportedError(
                f"rank {info.rank} has {device} of {torch.cuda.device_count()} visible, but ranks {other} and {rank} "
                "share one CUDA device, which nccl cannot; start at most as many ranks on a host as it has devices, "
                "or use --backend gloo"
            )
