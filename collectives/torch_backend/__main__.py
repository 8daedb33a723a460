"""``python -m collectives.torch_backend [--backend cshm] script.py args``: a script, unedited, on our communicators.

Run it under mpirun, srun, torchrun or ``python -m launch``, or alone.
"""

from __future__ import annotations

import argparse
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from collectives.errors import CommError
from collectives.torch_backend.creation import NAMES
from collectives.torch_backend.default_group import begin

EPILOG = """
Before the script begins, torch.distributed has its default group, on the backend; the script's own
init_process_group returns that one. RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT are
set under every launcher. COLLECTIVES_BACKEND refines the backend, for instance shm+gloo for cshm under mpirun.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. What the script raises passes through."""
    parser = argparse.ArgumentParser(
        prog="python -m collectives.torch_backend",
        description="Run a script that uses torch.distributed on our communicators.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--backend", default="cshm", choices=list(NAMES), help="default: cshm")
    parser.add_argument("-m", "--module", action="store_true", help="the program is a module's name, as in python -m")
    parser.add_argument("program", help="a script, or with -m a module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="what the program gets")
    options = parser.parse_args(arguments)
    if not options.module and not Path(options.program).exists():
        parser.error(f"there is no script {options.program!r} in {Path.cwd()}; for a module write -m before it")
    try:
        begin(options.backend)
    except (CommError, ValueError) as error:
        sys.exit(f"collectives.torch_backend: error: {error}")
    sys.argv = [options.program, *options.arguments]
    if options.module:
        runpy.run_module(options.program, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(options.program).resolve().parent)
        runpy.run_path(options.program, run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main())
