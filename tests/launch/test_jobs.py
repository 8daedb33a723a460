"""Jobs under every launcher that needs no cluster: ranks find each other, whatever the environment has left over."""

from __future__ import annotations

import functools
import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.ranks import ROOT, clean_environment, mpirun

LIMIT = 120.0
FULL = functools.partial(pytest.param, marks=pytest.mark.full)
EXHAUSTIVE = functools.partial(pytest.param, marks=pytest.mark.exhaustive)


def under(launcher: str, n: int) -> tuple[list[str], dict[str, str]]:
    """The beginning of a command line, to be followed by -m MODULE, and its environment."""
    if launcher == "mpirun":
        command, env = mpirun(n)
        return [*command, sys.executable], env
    if launcher == "launch":
        return [sys.executable, "-m", "launch", "-n", str(n)], clean_environment()
    if launcher == "torchrun":
        starter = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        return [*starter, "--nproc-per-node", str(n)], clean_environment()
    return [sys.executable], clean_environment()


def start(launcher: str, *arguments: str, n: int = 2, module: str = "", **variables: str) -> subprocess.Popen[str]:
    command, env = under(launcher, n)
    return subprocess.Popen(
        [*command, "-m", module or "tests.launch.job_program", *arguments],
        env={**env, **variables},
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=LIMIT)
    finally:
        process.kill()
    return process.returncode, out, err


def ranks_of(out: str) -> list[dict[str, object]]:
    return sorted((json.loads(found) for found in re.findall(r"\{.*\}", out)), key=lambda said: said["rank"])


def check_job(process: subprocess.Popen[str], n: int = 2, times: int = 1) -> list[dict[str, object]]:
    code, out, err = finish(process)
    assert code == 0, err
    said = ranks_of(out)
    assert [(one["rank"], one["size"]) for one in said] == [(rank, n) for rank in range(n)]
    assert all(one["sums"] == [n * (n + 1) / 2] * times for one in said)
    return said


@pytest.mark.parametrize(
    ("launcher", "backend"),
    [
        FULL("launch", "gloo"),
        FULL("mpirun", "gloo"),
        FULL("mpirun", "ring+mpi"),
        FULL("torchrun", "gloo"),
        FULL("torchrun", "ring+gloo"),
    ],
)
def test_two_communicators_at_once(launcher: str, backend: str) -> None:
    check_job(start(launcher, "--backend", backend, "--times", "2"), times=2)


@pytest.mark.full
@pytest.mark.parametrize("launcher", ["", "launch"])
def test_one_rank(launcher: str) -> None:
    check_job(start(launcher, n=1), n=1)


@pytest.mark.full
def test_stale_plain_variables_lose_under_mpirun() -> None:
    """Case L3: mpirun of two ranks in a shell that still exports a world of one."""
    process = start("mpirun", "--backend", "gloo", RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    code, out, err = finish(process)
    assert code == 0, err
    assert [one["rank"] for one in ranks_of(out)] == [0, 1]
    assert "WORLD_SIZE=1" in err
    assert "ignored" in err


@pytest.mark.full
def test_mpi_is_picked_under_mpirun() -> None:
    assert {one["backend"] for one in check_job(start("mpirun"))} == {"shm+mpi"}


@pytest.mark.full
def test_the_variable_picks_the_backend() -> None:
    said = check_job(start("launch", COLLECTIVES_BACKEND="ring+gloo"))
    assert {one["backend"] for one in said} == {"ring+gloo"}


@pytest.mark.full
def test_mpi_without_an_mpi_launcher_says_what_to_do() -> None:
    code, _, err = finish(start("launch", "--backend", "mpi"))
    assert code == 1
    assert re.search(r"launch announced rank \d of 2 .* MPI's world has rank 0 of 1.*mpirun", err)


@pytest.mark.full
def test_more_ranks_than_cores_work_and_warn_once() -> None:
    n = len(os.sched_getaffinity(0)) + 1
    code, out, err = finish(start("launch", "--backend", "gloo", n=n))
    assert code == 0, err
    assert [one["rank"] for one in ranks_of(out)] == list(range(n))
    assert err.count("ranks share") == 1


@pytest.mark.full
def test_two_jobs_at_once() -> None:
    """Case L5, first part: no two jobs can choose the same port."""
    for job in [start("launch", "--backend", "gloo") for _ in range(2)]:
        check_job(job)


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_twenty_jobs_in_a_row_two_at_once() -> None:
    for _ in range(10):
        for job in [start("launch", "--backend", "gloo") for _ in range(2)]:
            check_job(job)


@pytest.mark.full
def test_a_busy_port_is_named_in_seconds() -> None:
    """Case L5, second part: plain variables name the port, and somebody else has it."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = str(holder.getsockname()[1])
        variables = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        code, _, err = finish(start("", "--backend", "gloo", "--setup-timeout", "100", **variables))
    assert code == 1
    assert f"127.0.0.1:{port}" in err
    assert "RendezvousError" in err


@pytest.mark.full
def test_plain_variables_are_enough() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        port = str(holder.getsockname()[1])
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    jobs = [start("", "--backend", "gloo", RANK=str(rank), **place) for rank in range(2)]
    assert [ranks_of(finish(job)[1])[0]["rank"] for job in jobs] == [0, 1]


@pytest.mark.full
def test_setting_up_has_a_time_out_of_its_own() -> None:
    """Case L9: a rank comes later than a call may take."""
    check_job(start("launch", "--backend", "gloo", "--timeout", "2", "--late", "4"))


@pytest.mark.full
def test_a_rank_that_does_not_arrive_in_time() -> None:
    code, _, err = finish(start("launch", "--backend", "gloo", "--setup-timeout", "2", "--late", "20"))
    assert code == 1
    assert "RendezvousError" in err


@pytest.mark.parametrize("how", [EXHAUSTIVE("raise"), "thread", FULL("sys.exit")])
def test_a_failing_rank_0_ends_a_waiting_rank_1(how: str) -> None:
    """Case L1 under this project's launcher."""
    started = time.monotonic()
    code, _, err = finish(start("launch", how, "gloo", module="tests.collectives.exits"))
    assert time.monotonic() - started < 50  # the communicator would wait for 60
    assert code == (3 if how == "sys.exit" else 1)
    assert "launch: rank 0 of 2 failed" in err
    if how != "sys.exit":
        assert "ArithmeticError: the first failure" in err


@pytest.mark.full
@pytest.mark.parametrize("how", [EXHAUSTIVE("plain"), EXHAUSTIVE("close"), "late"])
def test_ranks_end_well_with_and_without_close(how: str) -> None:
    """Case L7: one rank is done before the other, and nobody has to close anything."""
    code, out, err = finish(start("launch", how, "gloo", module="tests.collectives.exits"))
    assert (code, err) == (0, "")
    assert sorted(out.splitlines()) == ["[0] rank 0 is done", "[1] rank 1 is done"]


# python -m collectives.info, and the starters to copy


@pytest.mark.parametrize("launcher", ["launch", EXHAUSTIVE(""), FULL("mpirun"), EXHAUSTIVE("torchrun")])
def test_info(launcher: str) -> None:
    n = 2 if launcher else 1
    code, out, err = finish(start(launcher, n=n, module="collectives.info"))
    assert code == 0, err
    for rank in range(n):
        assert f"rank {rank} of {n}" in out
    rows = ("launcher", "host", "cores", "threads", "device", "MPI", "interface", "backend")
    assert all(out.count(f"  {row} ") >= n for row in rows)
    name = {"": "single", "mpirun": "openmpi"}.get(launcher, launcher)
    assert out.count(f" {name}") >= n
    if launcher == "mpirun":
        assert re.search(r"MPI +\S.*/\S*libmpi", out)
        assert "OMPI_COMM_WORLD_RANK=1" in out


@pytest.mark.full
def test_info_says_what_is_wrong() -> None:
    code, out, err = finish(start("", module="collectives.info", WORLD_SIZE="2"))
    assert (code, out) == (1, "")
    assert "RANK" in err
    assert "WORLD_SIZE  2" in err


@pytest.mark.full
@pytest.mark.parametrize("name", ["mpirun.sh", EXHAUSTIVE("torchrun.sh")])
def test_starters(name: str) -> None:
    env = {**clean_environment(), "PYTHON": sys.executable}
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env["PATH"]])
    line = ["bash", str(ROOT / "launch" / name), "3", "-m", "tests.launch.job_program", "--backend", "gloo"]
    process = subprocess.Popen(line, env=env, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    check_job(process, n=3)
