"""``python -m launch -n 4 [script.py | -m module] args...``: start the ranks of a program on this host."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from launch.processes import allowed_cores
from launch.supervisor import Job

EPILOG = """
Every rank finds RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT in its environment, and
OMP_NUM_THREADS (allowed cores / ranks) unless it is set already. Output lines get their rank in front. When a rank
fails the others are ended, its traceback comes last, and the exit code is its code, or 128 + its signal.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m launch",
        description="Start a Python program as several ranks on this host.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("-n", "--ranks", default="auto", metavar="N", help="how many; auto (default): allowed cores")
    parser.add_argument("-m", "--module", action="store_true", help="the program is a module's name, as in python -m")
    parser.add_argument("program", help="a script, or with -m a module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="what the program gets")
    options = parser.parse_args(arguments)
    if options.ranks == "auto":
        size = allowed_cores()
    elif options.ranks.isdigit() and int(options.ranks) > 0:
        size = int(options.ranks)
    else:
        parser.error(f"-n: expected auto or a number from 1 on, found {options.ranks!r}")
    if options.module:
        if not _module_exists(options.program):
            parser.error(f"there is no module {options.program!r} on the path, as seen from {Path.cwd()}")
        command = [sys.executable, "-m", options.program]
    else:
        if not Path(options.program).exists():
            parser.error(f"there is no script {options.program!r} in {Path.cwd()}; for a module write -m before it")
        command = [sys.executable, options.program]
    return Job([*command, *options.arguments], size, os.environ).run()


def _module_exists(name: str) -> bool:
    """Looks for the top-level package only: finding a submodule would import its parents."""
    return importlib.util.find_spec(name.partition(".")[0]) is not None


if __name__ == "__main__":
    sys.exit(main())
