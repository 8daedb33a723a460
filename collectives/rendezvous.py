"""From the environment to a communicator: who am I, which backend, which device, and where do the ranks meet.

The only module that touches ``os.environ``. Whom to believe is decided in ``launchers.resolve``, a pure function.
"""

from __future__ import annotations

import functools
import logging
import os
import socket
import sys
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from collectives import backends, hosts
from collectives.backend import Bootstrap
from collectives.communicator import Communicator
from collectives.errors import RendezvousError, UnsupportedError
from collectives.launchers import resolve
from collectives.meeting import (
    LOOPBACK,
    address_between_hosts,
    connect_control,
    load_mpi,
    meet,
    mpi_world,
    require_own_devices,
    sharer,
)
from collectives.selection import Table, agree_on_table
from collectives.types import RankInfo

__all__ = ["Plan", "connect", "environment", "export", "init", "plan", "resolve"]

_log = logging.getLogger("collectives")


@dataclass(frozen=True)
class Plan:
    """What ``init`` will do: the rank, the backend's full name and why it was picked, the device."""

    info: RankInfo
    stack: backends.Stack
    backend: str
    why: str
    device: torch.device


def init(
    backend: str | None = None,
    *,
    device: torch.device | str | None = None,
    timeout: float = 600.0,
    setup_timeout: float = 600.0,
    validate: bool | None = None,
    algorithm: str | None = None,
    table: Table | str | Path | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    local_rank: int | None = None,
    local_world_size: int | None = None,
    master_addr: str | None = None,
    master_port: int | None = None,
) -> Communicator:
    """Join the job that a launcher started, and return the communicator of all its ranks. Collective.

    Works under torchrun, mpirun, srun and ``python -m launch``; without a launcher this process is the only rank.

    Args:
        backend: a base ("gloo", "nccl", "mpi") or layers over one ("ring+gloo"). None: COLLECTIVES_BACKEND, else nccl
            where a CUDA device is visible, else mpi under an MPI launcher whose MPI loads, else gloo; several ranks on
            CPUs then share memory over it ("shm+mpi", "shm+gloo"), or log why they cannot.
        device: where tensors lie by default. None or "cuda": cuda:(local rank modulo visible devices) for nccl and
            "cuda", else the CPU.
        timeout: seconds that a call waits for its peers, unless it says otherwise.
        setup_timeout: seconds that this function waits for them.
        validate: compare what all ranks call before each collective, and raise ``CollectiveMismatchError`` on all of
            them where that differs. Costs an exchange of small messages a call; the same on all ranks.
        algorithm: the default algorithm of collectives; None chooses by operation and size.
        table: rank 0's measured choices of algorithms, as an object or a file (see ``collectives.selection``), which
            all ranks then use. None: COLLECTIVES_TABLE of rank 0, else the one that comes with the package.
        rank, world_size: who this process is, for a job that no launcher started. They outrank every variable.
        local_rank, local_world_size: the same among the ranks of this host.
        master_addr, master_port: where rank 0 serves the job's key-value store. They outrank MASTER_ADDR, MASTER_PORT.

    Raises:
        ValueError: an unknown backend, arguments that contradict each other, or a table that cannot be read.
        UnsupportedError: the backend's library or device is missing here.
        RendezvousError: the environment contradicts itself, or the ranks did not meet.
    """
    if timeout <= 0 or setup_timeout <= 0:
        raise ValueError(f"expected positive seconds, found timeout={timeout}, setup_timeout={setup_timeout}")
    environ = environment()
    chosen = plan(
        environ,
        backend,
        device=device,
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        master_addr=master_addr,
        master_port=master_port,
    )
    _warn(chosen.info)
    return connect(
        chosen,
        environ,
        lambda: meet(chosen.info, environ, setup_timeout, fixed=master_addr is not None),
        timeout=timeout,
        setup_timeout=setup_timeout,
        validate=bool(validate),
        algorithm=algorithm,
        table=table,
    )


def connect(
    chosen: Plan,
    environ: Mapping[str, str],
    meeting: Callable[[], tuple[Any, str]],
    *,
    timeout: float,
    setup_timeout: float,
    validate: bool = False,
    algorithm: str | None = None,
    table: Table | str | Path | None = None,
) -> Communicator:
    """Carry out a plan: the communicator of all ranks that carry out the same one. Collective.

    ``meeting`` opens the ranks' key-value store, whose keys nobody else uses, and says which host serves it; it is
    called where the backend needs one. The rest is as ``init`` has it.
    """
    info = chosen.info
    meeting = functools.cache(meeting)
    several_hosts = info.local_world_size < info.world_size
    address = LOOPBACK
    if several_hosts and chosen.stack.base != "mpi":
        address = address_between_hosts(info, environ, lambda: meeting()[1])
        _log.info("rank %d uses %s (%s)", info.rank, address, hosts.interface_name(address))
    if chosen.stack.base == "nccl" and info.world_size > 1:
        require_own_devices(meeting()[0], info, chosen.device)
    bootstrap = Bootstrap(info, chosen.device, setup_timeout, lambda: meeting()[0], address)
    share = sharer(info, environ, chosen.stack.base, bootstrap.store)
    table = agree_on_table(table or environ.get("COLLECTIVES_TABLE"), info.rank, lambda told: share(told, "table"))
    transport = backends.connect(chosen.stack, bootstrap)
    control = connect_control(info, environ, chosen.stack.base, address, share, setup_timeout)
    comm = Communicator(
        transport,
        info,
        name=chosen.backend if transport.shares else chosen.backend.replace("shm+", ""),
        layers=chosen.stack.layers,
        device=chosen.device,
        timeout=timeout,
        algorithm=algorithm,
        table=table,
        validate=validate,
        control=control,
    )
    if info.world_size > 1:
        _abort_on_uncaught(comm)
    return comm


def environment() -> dict[str, str]:
    """The variables of this process, as they are now."""
    return dict(os.environ)


def export(variables: Mapping[str, str]) -> None:
    """Set variables of this process, for libraries that read them."""
    os.environ.update(variables)


def _abort_on_uncaught(comm: Communicator) -> None:
    """Let an exception that ends the program end the job at once: a thread may keep the process alive for long."""
    reference, previous = weakref.ref(comm), sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        comm = reference()
        if comm is not None and not hasattr(sys, "ps1"):  # at an interactive prompt the program goes on
            comm._abandon(error)
        previous(kind, error, trace)

    sys.excepthook = hook


def plan(
    environ: Mapping[str, str],
    backend: str | None = None,
    *,
    device: torch.device | str | None = None,
    **identity: Any,
) -> Plan:
    """Decide what ``init`` would do, without meeting anybody. MPI is started where the decision needs it.

    ``identity`` are ``resolve``'s keywords. Raises what ``init`` raises.
    """
    asked = torch.device(device) if device is not None else None
    info = resolve(environ, mpi_world=functools.partial(mpi_world, environ), **identity)
    if backend is not None:
        name, why = backend, "asked for"
    elif environ.get("COLLECTIVES_BACKEND"):
        name, why = environ["COLLECTIVES_BACKEND"], "COLLECTIVES_BACKEND"
    else:
        name, why = _default_backend(info, asked, environ)
    stack = backends.parse(name)
    if stack.base == "mpi":
        info = _agree_with_mpi(info, environ)
    return Plan(info, stack, name, why, _device(asked, stack.base, info))


def _default_backend(info: RankInfo, device: torch.device | None, environ: Mapping[str, str]) -> tuple[str, str]:
    if device.type == "cuda" if device is not None else torch.cuda.is_available():
        return "nccl", "a CUDA device is visible"
    layer = "shm+" if info.world_size > 1 else ""
    if not info.mpi:
        return f"{layer}gloo", f"no CUDA device is used and no MPI launcher started this process ({info.launcher})"
    try:
        load_mpi(environ)
    except UnsupportedError as error:
        reason = str(error).partition("\n")[0]
        if info.rank == 0:
            _log.warning("started by an MPI launcher, but using gloo: %s", reason)
        return f"{layer}gloo", f"an MPI launcher started this process, but no MPI loads: {reason}"
    return f"{layer}mpi", f"an MPI launcher started this process ({info.launcher})"


def _agree_with_mpi(info: RankInfo, environ: Mapping[str, str]) -> RankInfo:
    """MPI knows best which ranks share a host; about rank and size it must say what the launcher says."""
    module = load_mpi(environ)
    rank, size, local_rank, local_size = module.mpi_world()
    used = dict(info.variables)
    launcher = info.launcher
    if launcher == "single" and size > 1:
        launcher = "mpi"
        used["MPI_COMM_WORLD"] = f"rank {rank} of {size}"
    elif (rank, size) != (info.rank, info.world_size):
        path, version = module.library_version()
        told = ", ".join(f"{name}={value}" for name, value in used.items())
        reason = (
            "every process is an MPI world of its own, because this MPI library was not started by a launcher that it "
            "understands"
            if size == 1
            else "the MPI library was started by another launcher"
        )
        raise RendezvousError(
            f"{launcher} announced rank {info.rank} of {info.world_size} ({told}), but MPI's world has rank {rank} of "
            f"{size}: {reason} ({version.partition(',')[0].strip()}, {path}). Use this MPI's own mpirun, or srun "
            "--mpi=pmix or --mpi=pmi2 as it supports, or another backend (--backend gloo)"
        )
    node = info.node if local_size == info.local_world_size else rank // local_size
    return replace(
        info,
        rank=rank,
        world_size=size,
        local_rank=local_rank,
        local_world_size=local_size,
        node=node,
        launcher=launcher,
        variables=used,
        mpi=True,
    )


def _device(asked: torch.device | None, base: str, info: RankInfo) -> torch.device:
    if asked is None:
        asked = torch.device("cuda" if base == "nccl" else "cpu")
    if base == "nccl" and asked.type != "cuda":
        raise ValueError(f"backend nccl moves CUDA tensors, but device={str(asked)!r} was asked for; use backend gloo")
    if asked.type != "cuda":
        return asked
    visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if visible == 0:
        raise UnsupportedError(
            f"rank {info.rank} needs a CUDA device for {base} on {str(asked)!r}, but none is visible here; use backend "
            "gloo or mpi with device='cpu', or a PyTorch build with CUDA and CUDA_VISIBLE_DEVICES that names a device"
        )
    index = info.local_rank % visible if asked.index is None else asked.index
    if index >= visible:
        raise ValueError(f"device {str(asked)!r} does not exist: {visible} CUDA devices are visible, from cuda:0 on")
    return torch.device("cuda", index)


def _warn(info: RankInfo) -> None:
    if info.rank <= 1:  # stale variables may be right on rank 0 by chance, but not on rank 1 too
        for warning in info.warnings:
            _log.warning("rank %d: %s", info.rank, warning)
    # MPI launchers and Slurm bind each rank to cores of its own, so there only the host's own number tells.
    bound = info.mpi or info.launcher == "slurm"
    cores = hosts.host_cores() if bound else hosts.allowed_cores()
    if info.local_rank == 0 and info.local_world_size > cores:
        _log.warning(
            "%d ranks share %d cores of %s: this works, but slowly", info.local_world_size, cores, socket.gethostname()
        )
