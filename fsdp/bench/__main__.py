"""The command: ``python -m fsdp.bench``, or under any launcher."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from collectives.bench import report as described
from collectives.bench import start
from collectives.errors import CommError
from collectives.launchers import resolve
from collectives.rendezvous import environment
from fsdp.bench import checkpoint, deepspeed_parts, measure, plot, report, units
from fsdp.bench.contenders import DEEPSPEED, Field, check, names_of
from fsdp.bench.models import SHAPES

BACKENDS, MODELS, UNITS = "shm+gloo,gloo", "29M,91M", 200
EPILOG = """
contenders:
  apart                        processes that never communicate: the step time that cannot be beaten
  torch-ddp, -fsdp1, -fsdp2    torch's own, on gloo
  torch-ddp-cshm, -fsdp2-cshm  torch's own, on our shared memory (collectives.torch_backend)
  deepspeed-1, deepspeed-3     ZeRO of DeepSpeed, where it is installed
  shm+gloo:3, gloo:0, ...      ours, on that backend and at that stage
They take turns, step by step, in one process set. Every loss is compared. MPI needs mpirun around the command.
"""


def parse(arguments: Sequence[str] | None) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = argparse.ArgumentParser(
        prog="python -m fsdp.bench",
        description="Measure training against torch's data parallelism, DeepSpeed, and no communication at all.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("-n", "--ranks", type=int, default=2, help="ranks to start without a launcher (default 2)")
    parser.add_argument(
        "--models", type=_names, default=_names(MODELS), help=f"of {','.join(SHAPES)} (default {MODELS})"
    )
    parser.add_argument("--backends", type=_names, default=_names(BACKENDS), help=f"for ours (default {BACKENDS})")
    parser.add_argument("--contenders", type=_names, help="who takes part (default: everything that can)")
    parser.add_argument("--steps", type=int, default=10, help="steps of each contender that count (default 10)")
    parser.add_argument("--memory", action="store_true", help="also the memory of each contender, in ranks of its own")
    parser.add_argument("--units", action="store_true", help=f"only Python's time per unit, on {UNITS} tiny ones")
    parser.add_argument("--checkpoint", action="store_true", help="only saving and loading, on the first backend")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw them")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds that a collective may take (default 300)")
    parser.add_argument("--started-by", help=argparse.SUPPRESS)
    parser.add_argument("--memory-of", metavar="CONTENDER", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    try:
        _complete(options)
    except ValueError as error:
        parser.error(str(error))
    return parser, options


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _complete(options: argparse.Namespace) -> None:
    """Fill in what was left out. Raises ``ValueError``."""
    if unknown := set(options.models) - set(SHAPES):
        raise ValueError(f"unknown model {unknown.pop()!r}; expected some of {', '.join(SHAPES)}")
    if options.ranks < 1 or options.steps < 1:
        raise ValueError(f"-n and --steps: expected at least 1, found {options.ranks} and {options.steps}")
    options.contenders = options.contenders or names_of(options.backends)
    for name in options.contenders:
        check(name)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code: 1 where losses differed."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    parser, options = parse(arguments)
    torch.set_num_threads(1)
    if options.units:
        return _units(options)
    environ = environment()
    info = resolve(environ)
    missing = not deepspeed_parts.installed() and any(name in DEEPSPEED for name in options.contenders)
    if missing:
        options.contenders = [name for name in options.contenders if name not in DEEPSPEED]
    if options.started_by:
        if info.launcher == "single" and options.ranks != 1:
            parser.error(f"{options.started_by} started this process, but it finds no launcher's variables")
    elif info.launcher == "single":
        if missing:
            Console().print(deepspeed_parts.MISSING)
        return _start(options, arguments, environ)
    elif options.memory:
        parser.error(
            "--memory runs each contender in ranks of its own, and starts those itself; leave the launcher out"
        )
    with Field(options.timeout) as field:
        try:
            return _rank(options, info.launcher, field)
        except (CommError, ValueError) as error:
            if info.rank == 0:
                sys.stderr.write(f"fsdp.bench: error: {error}\n")
            return 1


def _console() -> Console:
    """Tables keep their columns: mpirun gives ranks a terminal of its own, which is narrow and in no window."""
    return Console(width=max(100, Console().width), force_terminal=False)


def _units(options: argparse.Namespace) -> int:
    machine = described.machine("none", "")
    found = units.microseconds(UNITS, options.steps)
    _console().print(report.units_table(found, units.FSDP2))
    if options.json:
        _write(options.json, report.document(_after(machine), units=found))
    return 0


def _start(options: argparse.Namespace, arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    """Start the ranks; with ``--memory`` once more for each contender and model, and tell of those here."""
    chosen = start.starter(options.ranks, environ)
    say = _console()
    say.print(f"no launcher: starting {options.ranks} ranks with {' '.join(chosen.command)}", soft_wrap=True)
    with_us = ["--started-by", chosen.launcher]
    timed = [argument for argument in arguments if argument != "--memory"]
    code = start.run(chosen, "fsdp.bench", [*timed, *with_us])
    if not options.memory:
        return code
    memories: dict[str, list[measure.Memory]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for model in options.models:
            for name in options.contenders:
                one = Path(folder) / "memory.json"
                alone = ["-n", str(options.ranks), "--models", model, "--memory-of", name, "--json", str(one)]
                if code := start.run(chosen, "fsdp.bench", [*alone, *with_us]) or code:
                    return code
                memories.setdefault(model, []).append(measure.Memory(**json.loads(one.read_text())))
            say.print(report.memory_table(model, memories[model]))
    if options.json:
        written = json.loads(options.json.read_text())
        written["memory"] = report.document({}, memories=memories)["memory"]
        _write(options.json, written)
    return code


def _rank(options: argparse.Namespace, launcher: str, field: Field) -> int:
    """What a rank does."""
    sync = field.communicator("gloo")
    if options.memory_of:
        found = measure.memory(options.memory_of, options.models[0], field, sync)
        if sync.rank == 0:
            _write(options.json, found._asdict())
        return 0
    machine = described.machine(options.started_by or launcher, "")
    say = _console() if sync.rank == 0 else Console(quiet=True)
    if options.checkpoint:
        saved: dict[str, Any] = {}
        for model in options.models:
            times, behind = checkpoint.run(model, options.backends[0], field, sync, options.steps)
            say.print(checkpoint.table(model, sync.world_size, times, behind))
            saved[model] = {"times": [row._asdict() for row in times], "step": behind._asdict()}
        if sync.rank == 0 and options.json:
            _write(options.json, {**report.document(_after(machine)), "checkpoint": saved})
        return 0
    rows: list[report.Row] = []
    for model in options.models:
        contenders = [field.contender(name, SHAPES[model], sync) for name in options.contenders]
        results = measure.run(contenders, SHAPES[model], sync, options.steps)
        del contenders  # the next model needs the memory
        found_here = report.rows(model, results, sync.world_size)
        say.print(report.table(found_here))
        rows += found_here
    if sync.rank == 0:
        if options.json:
            _write(options.json, report.document(_after(machine), rows))
        if options.plot:
            plot.save(rows, machine, options.plot)
    return int(any(row.wrong for row in rows))


def _after(machine: dict[str, Any]) -> dict[str, Any]:
    return {**machine, "load_after": described.load(), "date": time.strftime("%Y-%m-%d")}


def _write(path: Path, what: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(what, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
