"""What README.md shows to authors of backends, done: an out-of-tree backend under the suite, in a folder of its own."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from collectives import Communicator, conformance
from collectives.backend import Bootstrap
from collectives.backends.torch_dist import GlooBackend, create_gloo
from collectives.conformance.case import Case
from collectives.conformance.processes import run_processes
from collectives.conformance.report import Finding, first_failure
from collectives.conformance.runner import run_threads
from collectives.conformance.table import Trial
from collectives.types import RankInfo
from tests.collectives.mutants import healthy
from tests.ranks import ROOT, clean_environment

BACKEND = (ROOT / "tests" / "collectives" / "outside.py").read_text()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    section = (ROOT / "README.md").read_text().split("## Your own backend")[1].split("\n## ")[0]
    (snippet,) = re.findall(r"```python\n(.*?)```", section, flags=re.DOTALL)
    assert len([line for line in snippet.splitlines() if line.strip()]) <= 10
    (tmp_path / "test_my_backend.py").write_text(snippet)
    (tmp_path / "my_backend.py").write_text(BACKEND)
    return tmp_path


def pytest_in(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options],
        cwd=folder,
        env=clean_environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=170,
    )


@pytest.mark.parametrize("parts", ["messages", pytest.param("", marks=pytest.mark.exhaustive)], ids=["some", "all"])
def test_the_snippet_passes_a_backend_that_keeps_the_contract(folder: Path, parts: str) -> None:
    done = pytest_in(folder, *(["-k", parts] if parts else []))
    assert done.returncode == 0, done.stdout + done.stderr
    (passed,) = re.findall(r"(\d+) passed", done.stdout)
    assert int(passed) == 3 * (1 if parts else len(conformance.GROUPS))


@pytest.mark.full
def test_the_snippet_names_what_is_wrong(folder: Path) -> None:
    (folder / "my_backend.py").write_text(BACKEND.replace("append(tensor.clone())", "append(tensor.flip(0))"))
    done = pytest_in(folder, "-k", "broadcast and 2")
    assert done.returncode == 1
    assert "check_broadcast" in done.stdout
    assert "elements are wrong" in done.stdout


# The runner's own promises


def gloo(path: str, world_size: int, rank: int) -> GlooBackend:
    info = RankInfo(rank=rank, world_size=world_size, local_rank=rank, local_world_size=world_size)
    store = torch.distributed.FileStore(path, world_size)
    return create_gloo(Bootstrap(info, torch.device("cpu"), 30.0, lambda: store))


@pytest.mark.full
def test_ranks_that_are_processes(tmp_path: Path) -> None:
    def factory(world_size: int) -> functools.partial[GlooBackend]:
        return functools.partial(gloo, str(tmp_path / "store"), world_size)

    report = conformance.run(factory, 2, groups=["all_to_all", "modes"], processes=True)
    assert report.ok, str(report)
    assert report.passed > 40


def check_dies(comm: Communicator, case: Case) -> None:
    if comm.rank == 1:
        os._exit(7)
    comm.barrier()


def check_hangs(comm: Communicator, case: Case) -> None:
    if comm.rank == 1:
        time.sleep(60)


def check_raises(comm: Communicator, case: Case) -> None:
    if comm.rank == 1:
        raise ValueError("only here")
    comm.barrier()


def check_holds(comm: Communicator, case: Case) -> None:
    comm.barrier()


def trouble(trial: Callable[[Communicator, Case], None], tmp_path: Path, processes: bool) -> Finding:
    wanted = [Trial("planted", function, Case()) for function in (check_holds, trial, check_holds)]
    connect = functools.partial(gloo, str(tmp_path / "store"), 2) if processes else healthy(2)
    session = run_processes if processes else run_threads
    start = time.monotonic()
    outcomes, places, stacks = session(connect, 2, wanted, 8.0 if processes else 3.0, 2.0)
    assert time.monotonic() - start < 60
    found = first_failure(wanted, outcomes, places, stacks)
    assert found is not None
    assert found[0] == 1
    return found[1]


@pytest.mark.full
def test_a_dead_rank_is_named_with_its_exit_code(tmp_path: Path) -> None:
    finding = trouble(check_dies, tmp_path, True)
    assert "gave no answer" in finding.errors[1]
    assert "rank 1 left with exit code 7" in finding.details


@pytest.mark.full
@pytest.mark.parametrize("processes", [False, True], ids=["threads", "processes"])
def test_a_hung_rank_is_named_with_its_stack(tmp_path: Path, processes: bool) -> None:
    finding = trouble(check_hangs, tmp_path, processes)
    assert "check_hangs" in finding.errors[1]
    assert "in check_hangs" in finding.details


def test_a_failure_on_one_rank_ends_the_others_and_is_the_finding(tmp_path: Path) -> None:
    finding = trouble(check_raises, tmp_path, False)
    assert "only here" in finding.errors[1]


def test_unknown_groups_are_refused() -> None:
    with pytest.raises(ValueError, match=r"no-such-group.*broadcast"):
        conformance.trials(["no-such-group"])


LAUNCHED = """
import os, time
import collectives
from collectives.conformance.launched import Session

class Faulty(collectives.Communicator):
    def broadcast(self, tensor, src, **options):
        work = super().broadcast(tensor, src, **options)
        if self.rank == 1 and len(made) == 1:
            raise ArithmeticError("only on rank 1")
        return work

made = []

def make():
    made.append(collectives.init("gloo", timeout=8.0))
    made[-1].__class__ = Faulty
    return made[-1]

session = Session(make, timeout=4.0)
first = session.run("broadcast")
assert not first.ok and "only on rank 1" in str(first), str(first)
second = session.run("broadcast")  # with a new communicator
assert second.ok, str(second)
if session.rank == 1:
    time.sleep(8)
    os._exit(0)
last = session.run("arguments")
assert not last.ok and "gave no answer" in str(last), str(last)
assert "hung or died" in str(session.run("objects"))
print("rank 0 heard of everything")
os._exit(0)
"""


@pytest.mark.full
def test_ranks_of_a_launcher_tell_each_other(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(LAUNCHED)
    done = subprocess.run(
        [sys.executable, "-m", "launch", "-n", "2", "script.py"],
        cwd=tmp_path,
        env=clean_environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "rank 0 heard of everything" in done.stdout, done.stdout + done.stderr
    assert done.returncode == 0, done.stdout + done.stderr
