"""``python -m collectives.info``: what each rank of a job sees, and what ``init`` would choose.

Start it as the training program is started: under torchrun, mpirun, srun, ``python -m launch``, or by itself.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
from collections.abc import Mapping, Sequence

import torch

from collectives import hosts
from collectives.capability_table import render
from collectives.errors import CommError
from collectives.meeting import LOOPBACK, address_between_hosts, load_mpi, own_address
from collectives.rendezvous import Plan, environment, plan
from collectives.types import RankInfo

# The names by which launchers speak; shown where they make no sense together.
PREFIXES = (
    "COLLECTIVES_",
    "TORCHELASTIC_",
    "OMPI_COMM_WORLD_",
    "MV2_COMM_WORLD_",
    "PMI_",
    "PMIX_RANK",
    "PALS_",
    "SLURM_",
)
PLAIN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def describe(chosen: Plan, environ: Mapping[str, str]) -> dict[str, str]:
    """The rows of the report about this process. Collective under an MPI launcher."""
    info = chosen.info
    used = " ".join(f"{name}={value}" for name, value in info.variables.items())
    rows = {
        "launcher": f"{info.launcher} ({used})" if used else info.launcher,
        "host": f"{socket.gethostname()}: node {info.node}, local rank {info.local_rank} of {info.local_world_size}",
        "cores": f"{hosts.allowed_cores()} allowed of {os.cpu_count()}",
        "threads": f"{torch.get_num_threads()} (OMP_NUM_THREADS {environ.get('OMP_NUM_THREADS', 'is not set')})",
        "device": _device(chosen.device),
        "MPI": _mpi(chosen, environ),
        "interface": _interface(chosen, environ),
        "backend": f"{chosen.backend}: {chosen.why}",
        "versions": f"torch {torch.__version__}, Python {sys.version.split()[0]} ({sys.executable})",
    }
    if info.warnings:
        rows["warning"] = "; ".join(info.warnings)
    return rows


def _device(device: torch.device) -> str:
    visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
    name = f" ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else ""
    return f"{device}{name}; {visible} CUDA devices are visible"


def _uses_mpi(chosen: Plan) -> bool:
    return chosen.info.mpi or chosen.stack.base == "mpi"


def _mpi(chosen: Plan, environ: Mapping[str, str]) -> str:
    if not _uses_mpi(chosen):
        return "not loaded: neither the launcher nor the backend needs it (--backend mpi loads it)"
    try:
        path, version = load_mpi(environ).library_version()
    except CommError as error:
        return f"none: {error}"
    return f"{version}, {path or 'linked statically'}"


def _interface(chosen: Plan, environ: Mapping[str, str]) -> str:
    info = chosen.info
    if info.local_world_size == info.world_size:
        return f"lo {LOOPBACK}: the job has one host"

    def met_at() -> str:
        if info.mpi:
            mine = own_address(environ).encode() if info.rank == 0 else None
            return str(load_mpi(environ).broadcast_bytes(mine).decode())
        return info.master_addr or socket.gethostname()

    address = address_between_hosts(info, environ, met_at)
    return f"{hosts.interface_name(address)} {address}: routes to rank 0"


def report(title: str, rows: Mapping[str, str]) -> str:
    """The rows as text, one to a line."""
    width = max(map(len, rows), default=0)
    return "\n".join([title, *(f"  {name:<{width}}  {value}" for name, value in rows.items())]) + "\n"


def _seen(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that may be to blame."""
    return {name: environ[name] for name in sorted(environ) if name in PLAIN or name.startswith(PREFIXES)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report of this rank; exit code 1 where ``init`` would raise."""
    parser = argparse.ArgumentParser(prog="python -m collectives.info", description=__doc__.partition("\n")[0])
    parser.add_argument("--backend", help="as for collectives.init; by default what it would pick")
    parser.add_argument("--device", help="as for collectives.init")
    parser.add_argument("--table", action="store_true", help="print what each backend does, as README.md shows it")
    options = parser.parse_args(arguments)
    if options.table:
        sys.stdout.write(render())
        return 0
    environ = environment()
    try:
        chosen = plan(environ, options.backend, device=options.device)
        title, rows = _title(chosen.info), describe(chosen, environ)
    except (CommError, ValueError) as error:
        sys.stderr.write(report(f"{type(error).__name__}: {error}", _seen(environ)))
        return 1
    sys.stdout.write(report(title, rows))  # in one piece: other ranks write too
    sys.stdout.flush()
    return 0


def _title(info: RankInfo) -> str:
    return f"rank {info.rank} of {info.world_size}"


if __name__ == "__main__":
    sys.exit(main())
