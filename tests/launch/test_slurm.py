"""Under a real Slurm of one node: srun with and without MPI, sbatch, and what goes wrong there.

Run with ``pytest -m slurm`` as root; the Slurm is started here (one_node_slurm.sh) unless SLURM_CONF names one.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from launch.entry import STOPPED
from tests.collectives.torch_checks import CHECKS
from tests.ranks import ROOT, clean_environment

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]

SCRIPT = Path(__file__).with_name("one_node_slurm.sh")
TINY = {"steps": 5, "layers": 1, "width": 32, "heads": 2, "context": 32, "held-out": 2, "sample": 4, "seed": 3}
LIMIT = 200.0


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The configuration file of a running Slurm."""
    given = os.environ.get("SLURM_CONF")
    if given:
        yield given
        return
    folder = tmp_path_factory.mktemp("slurm")
    # Installing may take minutes on a fresh machine.
    started = subprocess.run([SCRIPT, "start", folder], stdout=subprocess.PIPE, text=True, timeout=500, check=True)
    try:
        yield started.stdout.strip()
    finally:
        subprocess.run([SCRIPT, "stop", folder], timeout=60, check=True)


@pytest.fixture
def env(slurm: str) -> dict[str, str]:
    python = str(Path(sys.executable).parent)
    inherited = clean_environment()
    return {**inherited, "SLURM_CONF": slurm, "PATH": os.pathsep.join([python, inherited["PATH"]])}


def run(command: list[str], env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, env=env, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT
    )


def srun(*arguments: str, n: int = 2, mpi: str = "none") -> list[str]:
    # More tasks than the machine has cores are wanted here.
    return ["srun", f"--mpi={mpi}", "--overcommit", f"--ntasks={n}", sys.executable, "-m", *arguments]


def train(out: Path, backend: str) -> list[str]:
    text = str(ROOT / "tests" / "launch" / "test_slurm.py")
    options = [word for name, value in TINY.items() for word in (f"--{name}", str(value))]
    return ["launch.train", "--backend", backend, "--data", text, "--out", str(out), *options]


def losses(out: Path) -> list[float]:
    lines = (out / "train" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines if "loss" in json.loads(line)]


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of one process."""
    out = tmp_path_factory.mktemp("single")
    done = run([sys.executable, "-m", *train(out, "gloo")], clean_environment())
    assert done.returncode == 0, done.stderr
    return losses(out)


@pytest.mark.parametrize("backend", ["gloo", "ring+gloo"])
def test_training_without_any_mpi(env: dict[str, str], backend: str, tmp_path: Path, reference: list[float]) -> None:
    done = run(srun(*train(tmp_path, backend)), env)
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path) == pytest.approx(reference, rel=1e-5)


def test_training_over_mpich(env: dict[str, str], mpich: Path, tmp_path: Path, reference: list[float]) -> None:
    library = str(mpich / "lib" / "libmpi.so.12")
    done = run(srun(*train(tmp_path, "mpi"), mpi="pmi2"), {**env, "MPI4PY_LIBMPI": library})
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path) == pytest.approx(reference, rel=1e-5)


def test_torch_distributed_without_any_mpi(env: dict[str, str]) -> None:
    done = run(srun("tests.collectives.torch_program", "operations", "cshm", "cgloo"), env)
    assert done.returncode == 0, done.stderr
    assert all(done.stdout.count(f"{name}: check_") == len(CHECKS) for name in ("cshm", "cgloo")), done.stdout


def test_torch_distributed_over_mpich(env: dict[str, str], mpich: Path) -> None:
    library = str(mpich / "lib" / "libmpi.so.12")
    program = srun("tests.collectives.torch_program", "operations", "cmpi", mpi="pmi2")
    done = run(program, {**env, "MPI4PY_LIBMPI": library})
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("cmpi: check_") == len(CHECKS), done.stdout


def test_mpich_is_picked_and_named(env: dict[str, str], mpich: Path) -> None:
    library = str(mpich / "lib" / "libmpi.so.12")
    done = run(srun("collectives.info", mpi="pmi2"), {**env, "MPI4PY_LIBMPI": library})
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"backend +shm\+mpi: an MPI launcher", done.stdout)) == 2
    assert len(re.findall(r"MPI +MPICH.*libmpi", done.stdout)) == 2
    assert "rank 1 of 2" in done.stdout


def test_plain_srun_over_open_mpi_raises(env: dict[str, str]) -> None:
    done = run(srun("tests.launch.job_program", "--backend", "mpi"), env)
    assert done.returncode != 0
    explanation = r"RendezvousError: slurm announced rank \d of 2 .* but MPI's world has rank 0 of 1.*--mpi=pmi2"
    assert len(re.findall(explanation, done.stderr)) == 2


def test_an_mpi_that_does_not_speak_pmi2_leaves_gloo_working(env: dict[str, str]) -> None:
    done = run(srun("tests.launch.job_program", "--backend", "gloo", mpi="pmi2"), env)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count('"size": 2') == 2


def test_several_jobs_and_steps_at_once(env: dict[str, str]) -> None:
    jobs = [
        subprocess.Popen(
            srun("tests.launch.job_program", "--backend", "gloo"),
            env=env, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for _ in range(2)
    ]  # fmt: skip
    for job in jobs:
        out, err = job.communicate(timeout=LIMIT)
        assert job.returncode == 0, err
        assert out.count('"size": 2') == 2


def test_a_busy_port_raises(env: dict[str, str]) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = str(holder.getsockname()[1])
        done = run(
            srun("tests.launch.job_program", "--backend", "gloo", "--setup-timeout", "30"), {**env, "MASTER_PORT": port}
        )
    assert done.returncode != 0
    assert f"RendezvousError: expected a free port 127.0.0.1:{port}" in done.stderr


def test_info(env: dict[str, str]) -> None:
    done = run(srun("collectives.info", n=3), env)
    assert done.returncode == 0, done.stderr
    assert all(f"rank {rank} of 3" in done.stdout for rank in range(3))
    assert done.stdout.count("slurm (SLURM_PROCID=") == 3


def test_sbatch(env: dict[str, str], tmp_path: Path, reference: list[float]) -> None:
    log = tmp_path / "log"
    script = str(ROOT / "launch" / "slurm.sbatch")
    done = run(
        ["sbatch", "--wait", "--overcommit", f"--output={log}", script, "-m", *train(tmp_path, "gloo")],
        {**env, "PYTHON": sys.executable},
    )
    assert done.returncode == 0, log.read_text()
    assert losses(tmp_path) == pytest.approx(reference, rel=1e-5)


def test_a_batch_script_without_srun_is_one_rank_and_warns(env: dict[str, str], tmp_path: Path) -> None:
    log, script = tmp_path / "log", tmp_path / "job.sh"
    script.write_text(f"#!/bin/sh\ncd {ROOT}\nexec {sys.executable} -m tests.launch.job_program\n")
    done = run(["sbatch", "--wait", "--overcommit", "--ntasks=2", f"--output={log}", str(script)], env)
    assert done.returncode == 0, log.read_text()
    assert '"size": 1' in log.read_text()
    assert "start the program with srun" in log.read_text()


def show(job: str, env: dict[str, str]) -> str:
    return run(["scontrol", "show", "job", job], env).stdout


def wait_until(true: Callable[[], bool], why: Callable[[], str]) -> None:
    """Looks are counted, not seconds: all of us may be stopped meanwhile."""
    for _ in range(800):
        if true():
            return
        time.sleep(0.25)
    raise AssertionError(why())


def test_a_job_that_is_told_to_end_is_queued_again_and_goes_on(env: dict[str, str], tmp_path: Path) -> None:
    """As before its time limit, Slurm signals the script; losses are those of a run that nothing ended."""
    steps = ["--steps", "800", "--evaluations", "1"]
    whole = run([sys.executable, "-m", "launch", "-n", "2", "-m", *train(tmp_path / "whole", "gloo"), *steps], env)
    assert whole.returncode == 0, whole.stderr
    log, out = tmp_path / "log", tmp_path / "told"
    script = [str(ROOT / "launch" / "slurm.sbatch"), "-m", *train(out, "gloo"), *steps, "--resume", "auto"]
    with_python = {**env, "PYTHON": sys.executable}
    job = run(["sbatch", "--parsable", "--overcommit", f"--output={log}", *script], with_python).stdout.strip()
    try:
        metrics = out / "train" / "metrics.jsonl"
        wait_until(lambda: metrics.exists() and metrics.read_text().count("\n") > 20, lambda: show(job, env))
        assert run(["scancel", "--batch", "--signal=USR1", job], env).returncode == 0
        ended = re.compile("JobState=(COMPLETED|FAILED|CANCELLED|TIMEOUT|NODE_FAIL)")
        wait_until(lambda: ended.search(show(job, env)) is not None, log.read_text)
        state = show(job, env)
        assert "JobState=COMPLETED" in state, state + log.read_text()
    finally:
        run(["scancel", job], env)
    assert "Restarts=1" in state
    said = log.read_text()
    saved = re.search(r"a signal ended the run; step (\d+) of 800 is saved", said)
    assert saved, said
    assert f"exit code {STOPPED}" in said
    assert f"going on after step {saved[1]}" in said
    assert losses(out) == losses(tmp_path / "whole")
    assert len(losses(out)) == 800


def test_mpirun_inside_a_job(env: dict[str, str], tmp_path: Path) -> None:
    log, script = tmp_path / "log", tmp_path / "job.sh"
    line = f"bash {ROOT}/launch/mpirun.sh 2 -m tests.launch.job_program"
    script.write_text(f"#!/bin/sh\ncd {ROOT}\nexport PYTHON={sys.executable}\nexec {line}\n")
    done = run(["sbatch", "--wait", "--overcommit", "--ntasks=2", f"--output={log}", str(script)], env)
    assert done.returncode == 0, log.read_text()
    assert log.read_text().count('"size": 2, "backend": "shm+mpi"') == 2
