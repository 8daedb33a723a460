"""The tour: its checks pass where they should, fail where they must, and say the same on every rank."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from collectives import Communicator, ReduceOp
from launch import demo
from launch.entry import InputError
from tests import ranks
from tests.ranks import grid, run_ranks

KEYS = {
    "schema", "world_size", "backend", "param_sum_per_rank", "param_sum_spread", "losses",
    "grad_norm_after_all_reduce", "manual_all_reduce_max_diff_vs_single_process", "fsdp_round_trip_all_ranks_ok",
}  # fmt: skip


def tour(comm: Communicator, **changes: Any) -> dict[str, Any]:
    options = argparse.Namespace(world_size=None, num_steps=4, batch_size=3, seed=0, no_write=True)
    vars(options).update(changes)
    return demo.tour(comm, options)


def in_full(backend: str, world_size: int) -> bool:
    return backend != "threads" and (backend, world_size) not in {("gloo", 2), ("ring+mpi", 2)}


@grid(full=in_full)
def test_every_check_passes_and_ranks_agree(backend: str, world_size: int) -> None:
    results = run_ranks(tour, world_size=world_size, backend=backend)
    found = results[0]
    assert found["checks"] == dict.fromkeys(found["checks"], True)
    assert set(found) >= KEYS
    assert (found["world_size"], len(found["param_sum_per_rank"])) == (world_size, world_size)
    assert found["param_sum_spread"] == 0
    assert len(found["losses"]) == 4
    for other in results[1:]:
        del other["bytes_per_rank"]
        assert other == {key: value for key, value in found.items() if key != "bytes_per_rank"}


def test_losses_and_norm_are_those_of_one_process() -> None:
    """Two ranks with three rows each see the rows of one rank with six."""
    [alone] = run_ranks(tour, batch_size=6, world_size=1)
    for world_size in (2, 3):
        found = run_ranks(tour, batch_size=6 // world_size, world_size=world_size)[0]
        assert found["losses"] == pytest.approx(alone["losses"], rel=1e-5)
        assert found["grad_norm_after_all_reduce"] == pytest.approx(alone["grad_norm_after_all_reduce"], rel=1e-5)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_bytes_are_those_of_the_table(world_size: int) -> None:
    """Held: all, then 1/N. Sent: two shares of the model, three where it is gathered twice."""
    found = run_ranks(tour, world_size=world_size)[0]["bytes_per_rank"]
    parameters = sum(p.numel() for p in demo.network(0, FakeComm()).parameters()) * 4
    assert found["DDP"]["parameters"] == parameters
    for name in ("ZeRO-1", "ZeRO-2", "FSDP"):
        assert found[name]["share_of_ddp"] == pytest.approx(1 / world_size, rel=0.02)
    share = parameters * (world_size - 1) / world_size
    for name, times in (("DDP", 2), ("ZeRO-1", 2), ("ZeRO-2", 2), ("FSDP", 3)):
        assert found[name]["sent_per_step"] == pytest.approx(times * share, rel=0.02)


class FakeComm:
    """What ``network`` reads of a communicator."""

    device = torch.device("cpu")


def round_trips(comm: Communicator) -> list[bool]:
    generator = torch.Generator().manual_seed(1)
    tensors = [torch.randn(shape, generator=generator) for shape in (*demo.SHAPES, (1,), (97,), (2, 3, 5))]
    return [torch.equal(t, demo.rebuild(demo.shard_of(t, comm), t.shape, comm)) for t in tensors]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 8])
def test_any_size_goes_round_bit_identical(world_size: int) -> None:
    assert all(all(result) for result in run_ranks(round_trips, world_size=world_size))


def tour_with_fault(comm: Communicator, fault: str) -> dict[str, Any]:
    if fault == "sum for average":
        comm.all_reduce = faulty_all_reduce(comm)  # type: ignore[method-assign]
    elif fault == "rank 1 keeps its own":
        broadcast = comm.broadcast
        comm.broadcast = lambda tensor, src, **o: broadcast(  # type: ignore[method-assign]
            tensor.clone() if comm.rank == 1 and tensor.ndim == 2 else tensor, src, **o
        )
    elif fault == "shards out of order":
        comm.all_gather = faulty_all_gather(comm)  # type: ignore[method-assign]
    return tour(comm)


def faulty_all_reduce(comm: Communicator) -> Any:
    right = comm.all_reduce
    return lambda tensor, op=ReduceOp.SUM, **o: right(tensor, ReduceOp.SUM if op is ReduceOp.AVG else op, **o)


def faulty_all_gather(comm: Communicator) -> Any:
    right = comm.all_gather

    def all_gather(output: torch.Tensor, input: torch.Tensor, **options: Any) -> Any:
        work = right(output, input, **options)
        if not options.get("async_op") and output.numel() > comm.world_size:
            output.copy_(output.view(comm.world_size, -1).flip(0).flatten())
        return work

    return all_gather


@pytest.mark.parametrize(
    ("fault", "check"),
    [
        ("sum for average", "averaged_gradients_equal_single_process"),
        ("rank 1 keeps its own", "broadcast_makes_ranks_equal"),
        ("shards out of order", "shards_rebuild_bit_identical"),
    ],
)
def test_a_planted_fault_fails_its_check(fault: str, check: str) -> None:
    for found in run_ranks(tour_with_fault, fault, world_size=2):
        assert found["checks"][check] is False


def run(arguments: list[str], cwd: Path, prefix: list[str], variables: dict[str, str] | None = None) -> Any:
    return subprocess.run(
        [*prefix, sys.executable, "-m", "launch.demo", *arguments],
        env=variables or ranks.clean_environment(),
        cwd=cwd,
        timeout=120,
        capture_output=True,
        text=True,
    )


@pytest.mark.full
def test_started_plainly_it_starts_two_ranks(tmp_path: Path) -> None:
    done = run(["--num-steps", "3"], tmp_path, [])
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "outputs" / "ddp-demo.json").read_text())
    assert set(found) >= KEYS
    assert found["world_size"] == 2
    assert len(found["losses"]) == 3
    assert found["fsdp_round_trip_all_ranks_ok"] is True
    for word in ("ZeRO-1", "ZeRO-2", "FSDP", "0.500", "L2 norm"):
        assert word in done.stdout


@pytest.mark.exhaustive
@pytest.mark.parametrize("world_size", [2, 3])
def test_under_mpirun_and_without_files(tmp_path: Path, world_size: int) -> None:
    command, variables = ranks.mpirun(world_size)
    done = run(["--no-write", "--num-steps", "2"], tmp_path, command, variables)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("passed:") == 5
    assert list(tmp_path.iterdir()) == []


def test_threads_need_no_processes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        demo.main(["--backend", "ring+threads", "--world-size", "3", "--no-write"])
    assert ended.value.code == 0
    assert "3 ranks over ring+threads" in capsys.readouterr().out


def test_a_failed_check_is_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    right = demo.shard_of
    monkeypatch.setattr(demo, "shard_of", lambda tensor, comm: right(tensor, comm) + 1)
    with pytest.raises(SystemExit) as ended:
        demo.main(["--backend", "threads", "--no-write", "--num-steps", "1"])
    assert ended.value.code == 1


@pytest.mark.parametrize("arguments", [["--world-size", "0"], ["--num-steps", "x"], ["--batch-size", "-1"]])
def test_wrong_arguments(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        demo.main(arguments)
    assert ended.value.code == 2
    assert "expected a whole number from 1 on" in capsys.readouterr().err


def test_a_world_size_that_is_not_the_launchers() -> None:
    with pytest.raises(InputError, match=r"--world-size: expected 2, .* found 3; leave it out"):
        run_ranks(demo.run, argparse.Namespace(world_size=3), world_size=2)
