"""Ranks for a benchmark that was started without a launcher."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from collectives import hosts


class Start(NamedTuple):
    """How ranks are started: a launcher's name, its command (the program follows) and its environment."""

    launcher: str
    command: list[str]
    environment: dict[str, str]


def starter(ranks: int, environ: Mapping[str, str]) -> Start:
    """mpirun where it and mpi4py are there, because then every backend can take part; else ``python -m launch``."""
    environment = {**environ, "OMP_NUM_THREADS": "1"}  # the ranks compare transports, not thread pools
    mpirun = _mpirun()
    if mpirun is None:
        return Start("launch", [sys.executable, "-m", "launch", "-n", str(ranks)], environment)
    command = [mpirun, "-n", str(ranks)]
    told = subprocess.run([mpirun, "--version"], capture_output=True, text=True, timeout=60, check=False).stdout
    if "Open MPI" in told or "PRRTE" in told:
        if os.geteuid() == 0:
            environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        # Bound to one core, as two ranks are otherwise, gloo's threads wait for the very rank that waits for them.
        command += ["--bind-to", "none"]
        if ranks > hosts.allowed_cores():
            command += ["--oversubscribe"]
            environment["OMPI_MCA_mpi_yield_when_idle"] = "1"
    return Start("mpirun", command, environment)


def _mpirun() -> str | None:
    if importlib.util.find_spec("mpi4py") is None:
        return None
    beside = Path(sys.executable).with_name("mpirun")
    return str(beside) if beside.exists() else shutil.which("mpirun")


def run(start: Start, module: str, arguments: Sequence[str]) -> int:
    """Run a module on the ranks; the launcher's exit code."""
    program = ["-m", module] if start.launcher == "launch" else [sys.executable, "-m", module]
    return subprocess.run([*start.command, *program, *arguments], env=start.environment, check=False).returncode
