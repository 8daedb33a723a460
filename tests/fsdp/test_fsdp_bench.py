"""The training benchmark: that it runs, what its figures mean, that a wrong loss does not pass. No time is asserted."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import collectives
from collectives import Communicator
from fsdp import fully_shard
from fsdp.bench import __main__ as bench
from fsdp.bench import deepspeed_parts, measure, plot, report, units
from fsdp.bench.contenders import APART, FSDP2, Contender, names_of, stepper
from fsdp.bench.measure import Result
from fsdp.bench.models import GPT, SHAPES, Block
from tests.ranks import ROOT, clean_environment

TINY = SHAPES["tiny"]


def run_bench(*arguments: str, timeout: float = 170.0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fsdp.bench", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=timeout, env=clean_environment(), cwd=ROOT, check=False
    )


@pytest.mark.full
def test_it_starts_its_own_ranks_and_writes_what_it_promises(tmp_path: Path) -> None:
    """All in one: every contender that is installed, the JSON file, the image, and memory."""
    ours = [f"{backend}:{stage}" for backend in ("shm+gloo", "gloo") for stage in range(4)]
    names = [APART, "torch-ddp", "torch-fsdp1", FSDP2, "torch-ddp-cshm", f"{FSDP2}-cshm", *ours]
    files = ["--json", str(tmp_path / "bench.json"), "--plot", str(tmp_path / "bench.png")]
    done = run_bench("--models", "tiny", "--steps", "2", *files)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (deepspeed_parts.MISSING in done.stdout) is not deepspeed_parts.installed()
    data = json.loads((tmp_path / "bench.json").read_text())
    assert [row["contender"] for row in data["rows"] if not row["contender"].startswith("deepspeed")] == names
    for row in data["rows"]:
        assert (row["world_size"], row["steps"], row["wrong"]) == (2, 2, 0)
        assert (row["communicating"] is not None) is (":" in row["contender"])
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.exhaustive
def test_memory_of_contenders_that_run_alone(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    done = run_bench(
        "--models", "tiny", "--steps", "1", "--contenders", "shm+gloo:3", "--memory", "--json", str(path)
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(path.read_text())["memory"]
    assert [(row["model"], row["contender"]) for row in found] == [("tiny", "shm+gloo:3")]
    assert all(row["peak"] > row["before"] > 0 for row in found)


def trained(comm: Communicator, model: nn.Module, fault: str) -> list[Result]:
    """Who trains apart, and stages 0 and 3, of which the last may go wrong on the last rank."""

    def contender(stage: int) -> Contender:
        mine = fully_shard(copy.deepcopy(model), comm, stage=stage, units=[Block])
        step = stepper(mine)

        def faulty(ids: torch.Tensor) -> torch.Tensor:
            loss = step(ids)
            return loss * 1.001 if comm.rank == comm.world_size - 1 else loss

        return Contender(f"threads:{stage}", faulty if stage == 3 and fault else step, comm)

    contenders = [Contender(APART, stepper(copy.deepcopy(model))), contender(0), contender(3)]
    return measure.run(contenders, TINY, comm, 2)


@pytest.mark.parametrize("world_size", [1, 2])
def test_losses_agree_and_every_step_counts(world_size: int) -> None:
    for results in collectives.run(trained, GPT(TINY), "", n=world_size):
        assert [result.contender for result in results] == [APART, "threads:0", "threads:3"]
        assert all(len(result.seconds) == 2 and result.wrong == 0 for result in results)
        assert results[0].waited is None
        assert all(0 <= result.waited < 1 for result in results[1:] if result.waited is not None)
        apart, *ours = (result.last_loss for result in results)
        assert all((loss == pytest.approx(apart, rel=1e-7)) is (world_size == 1) for loss in ours)


def test_a_wrong_loss_is_seen_on_all_ranks_and_marked() -> None:
    for results in collectives.run(trained, GPT(TINY), "wrong", n=2):
        assert [result.wrong for result in results] == [0, 0, 4]  # the steps of warming up are compared as well
        lines = report.rows("tiny", results, 2)
        assert list(report.table(lines).columns[-1].cells) == ["agree", "agree", "WRONG in 4"]


def test_definitions_of_the_figures() -> None:
    results = [
        Result(APART, [1.0, 3.0, 2.0], None, 0, 1.0, 1.0),
        Result(FSDP2, [6.0, 4.0, 5.0], None, 0, 1.0, 1.0),
        Result("gloo:3", [2.5, 90.0, 1.0], 0.25, 0, 1.0, 1.0),
    ]
    apart, fsdp2, ours = report.rows("tiny", results, 3)
    assert (apart.seconds, apart.to_apart, apart.to_fsdp2) == (2.0, 1.0, 2.5)
    assert (fsdp2.to_apart, fsdp2.to_fsdp2) == (2.5, 1.0)
    assert (ours.seconds, ours.to_apart, ours.to_fsdp2, ours.communicating) == (2.5, 1.25, 2.0, 0.25)
    assert ours.tokens == 3 * TINY.rows * TINY.length / 2.5
    alone = report.rows("tiny", results[2:], 1)[0]
    assert (alone.to_apart, alone.to_fsdp2) == (None, None)


def test_models_have_the_sizes_of_their_names() -> None:
    for name, millions in (("29M", 29), ("91M", 91)):
        with torch.device("meta"):
            assert int(sum(p.numel() for p in GPT(SHAPES[name]).parameters()) / 1e6) == millions


def test_time_per_unit() -> None:
    found = units.microseconds(3, 2, warm_up=1)
    assert list(found) == [units.PLAIN, units.OURS, units.FSDP2]
    assert all(value > 0 for value in found.values())
    assert report.document({}, units=found)["microseconds_per_unit"] == found


def test_memory_is_what_the_system_says() -> None:
    before = measure.proportional_set_size()
    held = bytearray(64 * 2**20)
    held[::4096] = bytes([1]) * len(range(0, len(held), 4096))
    assert measure.proportional_set_size() - before > 48 * 2**20


@pytest.mark.full
def test_the_plot_has_a_panel_for_each_model(tmp_path: Path) -> None:
    results = [Result(APART, [1.0], None, 0, 1.0, 1.0), Result("shm+gloo:3", [1.5], 0.1, 0, 1.0, 1.0)]
    rows = [*report.rows("29M", results, 2), *report.rows("91M", results, 2)]
    plot.save(rows, {"cpu": "x", "processors": 2, "torch": "y"}, tmp_path / "bench.png")
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")


def test_everything_over_the_backends_takes_part() -> None:
    names = names_of(["shm+gloo", "mpi"])
    assert names[0] == APART
    assert {"torch-ddp", "torch-fsdp1", FSDP2, "deepspeed-1", "deepspeed-3", "shm+gloo:0", "mpi:3"} <= set(names)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--models", "7B"], "unknown model '7B'"),
        (["--contenders", "horovod"], "unknown contender 'horovod'"),
        (["--contenders", "gloo:4"], "unknown contender 'gloo:4'"),
        (["--steps", "0"], "expected at least 1"),
    ],
)
def test_bad_arguments(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        bench.main(arguments)
    assert caught.value.code == 2
    assert words in capsys.readouterr().err
