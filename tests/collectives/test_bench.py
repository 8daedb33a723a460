"""The benchmark: that it runs, what its figures mean, and that a wrong result does not pass. No time is asserted."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import collectives
from collectives import Communicator
from collectives.bench import __main__ as bench
from collectives.bench import plot, report, start, tune
from collectives.bench.contenders import COPY, Contender, default_names
from collectives.bench.measure import Bench, Case, Result
from collectives.bench.operations import OPERATIONS
from collectives.selection import Entry, Table
from tests.ranks import ROOT, clean_environment

NBYTES = 30_000  # a few calls a sample
SMALL_CACHE = 200_000  # bytes, so that few tensors are "cold"


def run_bench(*arguments: str, timeout: float = 120.0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "collectives.bench", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=timeout, env=clean_environment(), cwd=ROOT, check=False
    )


@pytest.mark.full
def test_it_starts_its_own_ranks_and_writes_what_it_promises(tmp_path: Path) -> None:
    """All in one: every kind of contender in one process set, the JSON file, and the image."""
    names = ["gloo", "ring+gloo", "lib:gloo", "mpi", "ring+mpi", "lib:mpi", "lib:mpi.I", "mpi@direct"]
    done = run_bench(
        "-n", "2", "--ops", "all_reduce,reduce_scatter,all_gather,broadcast", "--bytes", "1K", "--iterations", "2",
        "--cache", "hot", "--contenders", ",".join(names), "--baseline", "lib:mpi",
        "--json", str(tmp_path / "bench.json"), "--plot", str(tmp_path / "bench.png"),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no launcher: starting 2 ranks with" in done.stdout
    assert "WRONG" not in done.stdout
    data = json.loads((tmp_path / "bench.json").read_text())
    assert data["schema"] == report.SCHEMA
    assert set(data) == {"schema", "machine", "settings", "rows"}
    assert {"cpu", "cores", "last_level_cache", "torch", "mpi", "launcher", "load_before", "load_after", "date"} <= set(
        data["machine"]
    )
    assert data["settings"] == {"baseline": "lib:mpi", "dtype": "float32", "threads": 1}
    assert [(row["operation"], row["contender"]) for row in data["rows"]] == [
        (operation, name)
        for operation in ("all_reduce", "reduce_scatter", "all_gather", "broadcast")
        for name in [COPY, *names]
    ]
    for row in data["rows"]:
        assert set(row) == set(report.Row.__dataclass_fields__)
        assert row["world_size"] == 2
        assert row["nbytes"] == 1024
        assert row["samples"] == 2
        assert row["wrong"] == 0
        assert row["ratio"] is None if row["contender"] == COPY else row["ratio"] > 0
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")


def measured(comm: Communicator, operation: str, cold: bool, dtype: torch.dtype = torch.float32) -> list[Result]:
    """Every algorithm of the package on this communicator."""
    names = ["ring", "direct"] if operation in ("all_reduce", "reduce_scatter", "all_gather") else ["direct", "tree"]
    names = ["pairwise"] if operation == "all_to_all" else names
    call = OPERATIONS[operation].call
    contenders = [Contender(name, {operation: functools.partial(call, comm, algorithm=name)}) for name in names]
    return Bench(Case(operation, NBYTES, dtype, cold), contenders, comm, SMALL_CACHE).run(3)


@pytest.mark.parametrize(("world_size", "cold"), [(1, False), (2, True), (3, False)])
@pytest.mark.parametrize("operation", list(OPERATIONS))
def test_right_results_pass_and_every_sample_counts(operation: str, world_size: int, cold: bool) -> None:
    for results in collectives.run(measured, operation, cold, n=world_size):
        assert len(results) >= 2
        assert all(result.wrong == 0 and len(result.seconds) == 3 for result in results)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64, torch.uint8, torch.float64])
def test_other_dtypes_are_exact_too(dtype: torch.dtype) -> None:
    for results in collectives.run(measured, "all_reduce", False, dtype, n=3):
        assert all(result.wrong == 0 for result in results)


def faulty(comm: Communicator, operation: str, fault: str) -> list[Result]:
    call = OPERATIONS[operation].call

    def run(output: torch.Tensor, input: torch.Tensor) -> None:
        if fault != "does nothing":
            call(comm, output, input)
        if fault == "swaps chunks":
            half = output.numel() // 2
            output.copy_(torch.cat([output[half:], output[:half]]))
        if fault == "one element" and comm.rank == 1:
            output[-1] += 1

    return Bench(Case(operation, NBYTES, torch.float32, False), [Contender("faulty", {operation: run})], comm, 0).run(3)


@pytest.mark.parametrize("fault", ["does nothing", "swaps chunks", "one element"])
@pytest.mark.parametrize("operation", ["all_reduce", "reduce_scatter", "all_gather", "all_to_all"])
def test_wrong_results_are_seen_on_all_ranks(operation: str, fault: str) -> None:
    for copy, other in collectives.run(faulty, operation, fault, n=2):
        assert (copy.contender, copy.wrong) == (COPY, 0)
        assert (other.contender, other.wrong) == ("faulty", 5)  # the samples of warming up are verified as well


def test_a_wrong_result_is_marked_in_the_table() -> None:
    case = Case("all_reduce", 4096, torch.float32, True)
    _, row = report.rows(case, [Result(COPY, [1.0], 0), Result("x", [1.0], 2)], 2, None)
    assert report.Columns(["x"], None).line(row).endswith("WRONG in 2 of 1 samples")


@pytest.mark.parametrize(
    ("operation", "world_size", "factor", "moves"),
    [
        # nccl-tests' bus factors, and how often a tensor of n elements is read or written at least, by all ranks.
        ("all_reduce", 4, 1.5, 8),
        ("reduce_scatter", 4, 0.75, 5),
        ("all_gather", 4, 0.75, 5),
        ("all_to_all", 4, 0.75, 8),
        ("broadcast", 4, 1.0, 4),
        ("reduce", 4, 1.0, 5),
        ("all_reduce", 1, 0.0, 2),
    ],
)
def test_definitions_of_the_figures(operation: str, world_size: int, factor: float, moves: float) -> None:
    nbytes = 8_000_000
    case = Case(operation, nbytes, torch.float32, False)
    results = [Result(COPY, [1.0, 3.0, 2.0], 0), Result("base", [8.0, 4.0, 6.0], 0), Result("x", [16.0, 12.0, 90.0], 0)]
    copy, base, x = report.rows(case, results, world_size, "base")
    assert (x.nbytes, x.seconds) == (nbytes, 16.0)
    assert x.algbw == pytest.approx(nbytes / 16.0 / 1e9)
    assert x.busbw == pytest.approx(factor * nbytes / 16.0 / 1e9)
    # All ranks at once copied nbytes each in 2 s: 2 * world_size * nbytes read or written.
    assert x.bound_percent == pytest.approx(100 * (2.0 * moves / (2 * world_size)) / 16.0)
    assert (x.ratio, x.adds) == (6.0 / 16.0, 10.0)
    assert (base.ratio, base.adds) == (1.0, 0.0)
    assert (copy.ratio, copy.bound_percent) == (None, 100.0)


def test_the_larger_side_is_a_multiple_of_the_ranks() -> None:
    assert Case("all_reduce", 1024, torch.float32, False).numel(3) == 255
    assert Case("all_reduce", 1, torch.float32, False).numel(3) == 3


@pytest.mark.parametrize(
    ("name", "nbytes"), [("1K", 1024), ("64M", 2**26), ("1.5k", 1536), ("2GiB", 2**31), ("100", 100), ("7B", 7)]
)
def test_sizes_by_name(name: str, nbytes: int) -> None:
    assert report.size_bytes(name) == nbytes


def test_names_of_sizes() -> None:
    assert [report.size_name(n) for n in (1024, 1020, 2**26, 2**30, 500, 1536)] == [
        "1K",
        "1K",
        "64M",
        "1G",
        "500",
        "1.5K",
    ]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--bytes", "big"], "expected a size such as 1K"),
        (["--ops", "sort"], "unknown operation 'sort'"),
        (["--cache", "warm"], "expected hot, cold or both"),
        (["--dtype", "decimal"], "expected a dtype"),
        (["--iterations", "0"], "expected at least 1"),
        (["-n", "none"], "expected a number from 1 on"),
        (["-n", "2,3"], "for --tune only"),
    ],
)
def test_bad_arguments(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        bench.main(arguments)
    assert caught.value.code == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--contenders", "carrier-pigeon"], "unknown backend 'carrier-pigeon'"),
        (["--contenders", "gloo@fastest"], "no algorithm 'fastest'"),
        (["--contenders", "lib:gloo.xyz"], "has no call of its own that starts with 'xyz'"),
        (["--contenders", "gloo", "--baseline", "mpi"], "expected one of the contenders, gloo"),
    ],
)
def test_bad_names_are_named(
    arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "environment", lambda: {"RANK": "0", "WORLD_SIZE": "1"})
    monkeypatch.setattr(bench.Field, "communicator", alone)
    assert bench.main(["-n", "1", *arguments]) == 1
    assert words in capsys.readouterr().err


def alone(field: object, backend: str) -> Communicator:
    return collectives.init(backend, rank=0, world_size=1)


def test_everything_over_the_bases_takes_part() -> None:
    names = default_names(["gloo", "mpi"])
    assert {"lib:gloo", "gloo", "ring+gloo", "lib:mpi", "lib:mpi.I", "mpi", "ring+mpi"} <= set(names)
    assert names[0] == "lib:gloo"


def test_without_mpirun_the_launcher_of_this_repository_starts_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "_mpirun", lambda: None)
    chosen = start.starter(3, {"HOME": "/"})
    assert chosen.launcher == "launch"
    assert chosen.command == [sys.executable, "-m", "launch", "-n", "3"]
    assert chosen.environment == {"HOME": "/", "OMP_NUM_THREADS": "1"}


def row(contender: str, nbytes: int, seconds: float, world_size: int = 2, wrong: int = 0) -> report.Row:
    case = Case("all_reduce", nbytes, torch.float32, False)
    return report.rows(case, [Result(COPY, [1.0], 0), Result(contender, [seconds], wrong)], world_size, None)[1]


def test_tuning_takes_the_fastest_and_ignores_noise(tmp_path: Path) -> None:
    times = {
        1024: {"native": 2.0, "ring": 2.98, "direct": 3.0, "doubling": 1.97},  # as good: the usual one
        4096: {"native": 2.0, "ring": 4.0, "direct": 1.98},  # not worth a change
        65536: {"native": 9.0, "ring": 5.0, "direct": 8.0},
    }
    rows = [row(f"mpi@{name}", nbytes, t) for nbytes, known in times.items() for name, t in known.items()]
    rows.append(row("mpi@circulant", 1024, 0.1, wrong=1))
    path = tmp_path / "table.json"
    kept = [Entry("mpi", "all_reduce", 3, {0: "direct"}), Entry("mpi", "all_reduce", 2, {0: "direct"}, op="MAX")]
    path.write_text(Table([*kept, Entry("mpi", "all_reduce", 2, {0: "doubling"})]).dump())
    tune.update(path, rows, {"cpu": "x"})
    table = Table.load(path)
    assert table.measured == {"cpu": "x"}
    assert set(map(str, table.entries)) == set(
        map(
            str,
            [
                *kept,
                Entry("mpi", "all_reduce", 2, {0: "native", 65536: "ring"}),
                Entry("ring+mpi", "all_reduce", 2, {0: "doubling", 4096: "direct", 65536: "ring"}),
            ],
        )
    )


@pytest.mark.exhaustive
def test_tuning_writes_a_table_that_init_reads(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    done = run_bench(
        "-n", "2,3", "--tune", str(path), "--ops", "all_reduce,reduce", "--bytes", "1K,16K", "--iterations", "2",
        timeout=170.0,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    entries = Table.load(path).entries
    assert {entry.world_size for entry in entries} == {2, 3}
    assert {entry.backend for entry in entries} >= {"gloo", "ring+gloo", "mpi", "ring+mpi"}


def test_the_image_needs_matplotlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ValueError, match="pip install matplotlib"):
        plot.save([row("mpi@ring", 1024, 1.0)], {}, tmp_path / "x.png")
