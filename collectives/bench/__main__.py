"""The command: ``python -m collectives.bench``, or under any launcher."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from collectives.bench import plot, report, start, tune
from collectives.bench.contenders import Field, default_names
from collectives.bench.measure import Bench, Case
from collectives.bench.operations import OPERATIONS
from collectives.errors import CommError
from collectives.launchers import resolve
from collectives.meeting import load_mpi
from collectives.rendezvous import environment
from collectives.schedules import SCHEDULES
from collectives.types import RankInfo

SIZES = "1K,64K,1M,64M"
TUNE_SIZES = "1K,4K,16K,64K,256K,1M,4M,16M,64M"
COMPARED = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")
EPILOG = """
contenders:
  gloo, ring+mpi, ...    the public call over that backend
  mpi@ring, gloo@direct  the same with that algorithm; @native is the library's own, as the backend calls it
  shm+mpi:symmetric      on tensors from allocate(); :shared gathers into one from allocate_shared(), :shards where
                         each rank's part of it is its input already
  lib:mpi, lib:gloo      the library's own blocking calls, unguarded: Allreduce, Reduce_scatter_block, ...
  lib:mpi.I              its calls whose names start so: Iallreduce, ..., each tested until it is done
copy is always there: a plain copy of that many bytes on every rank at once, from which the bound is computed.
Started under mpirun every backend can take part; under other launchers MPI cannot.
"""


def parse(arguments: Sequence[str] | None) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = argparse.ArgumentParser(
        prog="python -m collectives.bench",
        description="Measure collectives against each other and against the libraries' own calls.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = lambda text: [name.strip() for name in text.split(",") if name.strip()]  # noqa: E731
    parser.add_argument("-n", "--ranks", type=names, metavar="N", help="ranks to start without a launcher (default 2)")
    parser.add_argument("--ops", type=names, help=f"of {','.join(OPERATIONS)} (default {','.join(COMPARED)})")
    parser.add_argument("--bytes", type=names, help=f"sizes of the larger side (default {SIZES})")
    parser.add_argument("--dtype", default="float32", help="of the tensors (default float32)")
    parser.add_argument("--contenders", type=names, help="who takes part (default: everything that can)")
    parser.add_argument("--baseline", metavar="NAME", help="whom to compare with (default: the first contender)")
    parser.add_argument("--cache", type=names, help="hot, cold (default both; to tune: hot)")
    parser.add_argument("--iterations", type=int, help="samples of each contender (default: by size, 10 to 100)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw them")
    parser.add_argument("--overhead", action="store_true", help="what a public call adds to the library's, at 1 KiB")
    parser.add_argument("--tune", type=Path, metavar="FILE", help="measure all algorithms; write the table of choices")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds that a call may take (default 120)")
    parser.add_argument("--started-by", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    try:
        _complete(options)
    except ValueError as error:
        parser.error(str(error))
    return parser, options


def _complete(options: argparse.Namespace) -> None:
    """Fill in what was left out, and turn names into values. Raises ``ValueError``."""
    algorithms = [of for of, _ in SCHEDULES]
    tunable = [name for name in OPERATIONS if algorithms.count(name) > 1]
    options.ops = options.ops or (tunable if options.tune else list(COMPARED))
    if unknown := set(options.ops) - set(OPERATIONS):
        raise ValueError(f"unknown operation {unknown.pop()!r}; expected some of {', '.join(OPERATIONS)}")
    if options.overhead:
        options.bytes = options.bytes or ["1K"]
        options.contenders = options.contenders or ["lib:mpi.I", "mpi"]
        options.cache, options.iterations = options.cache or ["hot"], options.iterations or 200
    options.bytes = [report.size_bytes(n) for n in options.bytes or (TUNE_SIZES if options.tune else SIZES).split(",")]
    options.dtype = getattr(torch, options.dtype, None)
    if not isinstance(options.dtype, torch.dtype):
        raise ValueError("--dtype: expected a dtype such as float32 or bfloat16")
    options.cache = options.cache or (["hot"] if options.tune else ["hot", "cold"])
    if unknown := set(options.cache) - {"hot", "cold"}:
        raise ValueError(f"--cache: expected hot, cold or both, found {unknown.pop()!r}")
    if options.iterations is not None and options.iterations < 1:
        raise ValueError(f"--iterations: expected at least 1, found {options.iterations}")
    options.ranks = options.ranks or ["2"]
    if not all(text.isdigit() and int(text) > 0 for text in options.ranks):
        raise ValueError(f"-n: expected a number from 1 on, found {','.join(options.ranks)!r}")
    if len(options.ranks) > 1 and not options.tune:
        raise ValueError("-n: several numbers of ranks are for --tune only")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code: 1 where a result was wrong."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    parser, options = parse(arguments)
    environ = environment()
    info = resolve(environ)
    if options.started_by:
        if info.launcher == "single" and options.ranks != ["1"]:
            parser.error(f"{options.started_by} started this process, but it finds no launcher's variables")
    elif info.launcher == "single":
        code = 0
        for ranks in options.ranks:
            chosen = start.starter(int(ranks), environ)
            sys.stdout.write(f"no launcher: starting {ranks} ranks with {' '.join(chosen.command)}\n")
            sys.stdout.flush()
            code = code or start.run(
                chosen, "collectives.bench", [*arguments, "-n", ranks, "--started-by", chosen.launcher]
            )
        return code
    torch.set_num_threads(1)
    field = Field(options.timeout)
    try:
        with_mpi = info.mpi or info.launcher == "single"
        return _run(options, info, field, ["gloo", "mpi"] if with_mpi else ["gloo"])
    except (CommError, ValueError) as error:
        if info.rank == 0:
            sys.stderr.write(f"collectives.bench: error: {error}\n")
        return 1
    finally:
        field.close()


def _run(options: argparse.Namespace, info: RankInfo, field: Field, bases: list[str]) -> int:
    sync = field.communicator("mpi" if "mpi" in bases else "gloo")
    cache_bytes = report.cache_bytes()
    mpi = load_mpi(environment()).library_version()[1].partition(",")[0] if "mpi" in bases else ""
    machine = report.machine(options.started_by or info.launcher, mpi)
    names = options.contenders or default_names(bases)
    baseline = options.baseline or (None if options.tune else names[0])
    if baseline is not None and baseline not in names:
        raise ValueError(f"--baseline {baseline}: expected one of the contenders, {', '.join(names)}")
    rows: list[report.Row] = []
    if options.tune:
        names = [name for op in options.ops for name in tune.contender_names(bases, op)]
    contenders = field.contenders(dict.fromkeys(names))
    columns = report.Columns((c.name for c in contenders), baseline, options.overhead)
    say = _Voice(sync.rank)
    where = f"{machine['cpu']}, {machine['processors']} processors, load {machine['load_before']:.1f}"
    say(f"{sync.world_size} ranks on {where}")
    say(columns.head())
    for operation in options.ops:
        for cache in options.cache:
            for nbytes in options.bytes:
                case = Case(operation, nbytes, options.dtype, cache == "cold")
                bench = Bench(case, contenders, sync, cache_bytes)
                for name, why in bench.left_out.items():
                    say(f"{operation}: {name} is left out: {why}")
                results = bench.run(options.iterations or _iterations(nbytes))
                found = report.rows(case, results, sync.world_size, baseline)
                rows += found
                for row in found:
                    say(columns.line(row))
    machine["load_after"] = report.load()
    if sync.rank == 0:
        _write(options, rows, machine, baseline)
    return int(any(row.wrong for row in rows))


def _iterations(nbytes: int) -> int:
    return 100 if nbytes <= 64 * 1024 else 30 if nbytes < 16 * 2**20 else 10


class _Voice:
    def __init__(self, rank: int) -> None:
        self._speaks = rank == 0

    def __call__(self, line: str) -> None:
        if self._speaks:
            sys.stdout.write(f"{line}\n")
            sys.stdout.flush()


def _write(options: argparse.Namespace, rows: list[report.Row], machine: dict[str, Any], baseline: str | None) -> None:
    machine["date"] = time.strftime("%Y-%m-%d")
    settings = {"baseline": baseline, "dtype": str(options.dtype).removeprefix("torch."), "threads": 1}
    if options.json:
        options.json.write_text(json.dumps(report.document(rows, machine, settings), indent=1) + "\n")
    if options.plot:
        plot.save(rows, machine, options.plot)
    if options.tune:
        tune.update(options.tune, rows, machine)


if __name__ == "__main__":
    sys.exit(main())
