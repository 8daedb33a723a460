"""``python -m launch``: what ranks are told, what is printed, and how jobs end."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

import pytest

from launch import output, processes
from tests.ranks import clean_environment

PROGRAM = str(Path(__file__).with_name("rank_program.py"))
LIMIT = 60.0


def command(*arguments: str, n: int = 2) -> list[str]:
    return [sys.executable, "-m", "launch", "-n", str(n), *arguments]


def run(*arguments: str, n: int = 2, **variables: str) -> subprocess.CompletedProcess[str]:
    env = {**clean_environment(), **variables}
    if variables.get("OMP_NUM_THREADS") == "":
        del env["OMP_NUM_THREADS"]
    return subprocess.run(
        command(*arguments, n=n), env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT
    )


def start(*arguments: str, n: int = 2) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command(*arguments, n=n),
        env=clean_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def processes_with(mark: str) -> list[str]:
    """Command lines of living processes that carry ``mark``."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if mark in line:
                found.append(line)
    return found


def nothing_left(mark: str) -> bool:
    """Whether all processes that carry ``mark`` are gone within a moment."""
    deadline = time.monotonic() + 5
    while processes_with(mark) and time.monotonic() < deadline:
        time.sleep(0.05)
    return processes_with(mark) == []


@pytest.fixture
def mark() -> str:
    return uuid.uuid4().hex


@pytest.mark.parametrize("n", [1, 3])
def test_what_ranks_are_told(n: int) -> None:
    done = run(PROGRAM, "environment", "--flag", "-n", "7", n=n, OMP_NUM_THREADS="")
    assert done.returncode == 0, done.stderr
    told = {}
    for line in done.stdout.splitlines():
        prefix, _, text = line.partition(" ")
        told[prefix] = json.loads(text)
    assert sorted(told) == [f"[{rank}]" for rank in range(n)]
    for rank in range(n):
        assert told[f"[{rank}]"] == {
            "RANK": str(rank),
            "WORLD_SIZE": str(n),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(n),
            "MASTER_ADDR": "127.0.0.1",
            "OMP_NUM_THREADS": str(max(1, processes.allowed_cores() // n)),
            "listens": rank == 0,
            "args": ["--flag", "-n", "7"],
        }


def test_threads_are_left_to_the_user() -> None:
    done = run(PROGRAM, "environment", n=1, OMP_NUM_THREADS="17")
    assert json.loads(done.stdout.partition(" ")[2])["OMP_NUM_THREADS"] == "17"


def test_variables_of_an_outer_torchrun_do_not_reach_the_ranks() -> None:
    with processes.listener() as store:
        outer = {"TORCHELASTIC_RUN_ID": "x", "RANK": "7", "PATH": "/bin", "COLLECTIVES_STORE_FD": "9"}
        env = processes.environment(outer, 1, 2, store, threads=3)
    assert {"TORCHELASTIC_RUN_ID", "COLLECTIVES_STORE_FD"}.isdisjoint(env)
    assert (env["RANK"], env["PATH"], env["OMP_NUM_THREADS"]) == ("1", "/bin", "3")


def test_auto_is_the_allowed_cores() -> None:
    one_core = min(os.sched_getaffinity(0))
    done = subprocess.run(
        [sys.executable, "-m", "launch", PROGRAM, "environment"],
        env=clean_environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        preexec_fn=lambda: os.sched_setaffinity(0, [one_core]),
    )
    assert [line.partition(" ")[0] for line in done.stdout.splitlines()] == ["[0]"]


def test_modules_and_scripts(tmp_path: Path) -> None:
    assert "Python Module Of" not in run("-m", "this", n=1).stderr
    assert "[0] Beautiful is better than ugly." in run("-m", "this", n=1).stdout
    (tmp_path / "script.py").write_text("import beside; print(beside.NAME)")
    (tmp_path / "beside.py").write_text("NAME = 'found'")
    assert run(str(tmp_path / "script.py"), n=1).stdout == "[0] found\n"


def test_every_line_has_its_rank() -> None:
    done = run(PROGRAM, "say")
    for rank in range(2):
        mine = [line for line in done.stdout.splitlines() if line.startswith(f"[{rank}] ")]
        words = [f"one from {rank}", f"two from {rank}", "no newline at the end"]
        assert mine == [f"[{rank}] {word}" for word in words]
    assert sorted(done.stderr.splitlines()) == ["[0] error from 0", "[1] error from 1"]


def test_a_rank_may_end_early() -> None:
    done = run(PROGRAM, "early", n=3)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[0] the last word\n", "")


FAILURES = {
    "exit": (3, "rank 1 of 3 failed: it exited with code 3"),
    "raise": (1, "rank 1 of 3 failed: it exited with code 1"),
    "kill": (128 + 9, "rank 1 of 3 failed: it was killed by SIGKILL (signal 9)"),
    "segfault": (128 + 11, "rank 1 of 3 failed: it was killed by SIGSEGV (signal 11)"),
}


@pytest.mark.parametrize("how", FAILURES)
def test_one_failure_ends_all(how: str, mark: str) -> None:
    code, message = FAILURES[how]
    started = time.monotonic()
    done = run(PROGRAM, "fail", how, mark, n=3)
    assert time.monotonic() - started < 30  # the ranks would take 100
    assert done.returncode == code
    assert done.stderr.splitlines()[-1] == f"launch: {message}"
    for rank in (0, 2):
        assert f"launch: rank {rank} was ended, after rank 1" in done.stderr
    if how == "raise":
        assert "[1] Traceback (most recent call last):" in done.stderr
        assert "[1] ValueError: the reason\n[1] with a second line\n" in done.stderr
    assert nothing_left(mark)


def test_survivors_get_one_line() -> None:
    done = run(PROGRAM, "echo", n=3)
    lines = done.stderr.splitlines()
    assert done.returncode == 1
    assert lines[-1] == "launch: rank 1 of 3 failed: it exited with code 1"
    assert sum("Traceback" in line for line in lines) == 1
    for rank in (0, 2):
        [line] = [line for line in lines if line.startswith(f"[{rank}]")]
        assert line.endswith("PeerLostError: rank 1 is lost")
    assert "[1] ValueError: the reason" in lines


def test_a_traceback_that_is_only_printed_is_printed() -> None:
    done = run(PROGRAM, "logged", n=2)
    assert done.returncode == 0
    for rank in range(2):
        assert f"[{rank}] ValueError: handled" in done.stderr
        assert f"[{rank}] all is well" in done.stdout


@pytest.mark.full
def test_no_process_outlives_a_failure(mark: str) -> None:
    done = run(PROGRAM, "stubborn", mark)
    assert done.returncode == 4
    assert nothing_left(mark)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_the_job(number: signal.Signals, mark: str) -> None:
    process = start(PROGRAM, "wait", mark)
    assert process.stdout is not None
    assert {process.stdout.readline() for _ in range(2)} == {"[0] ready\n", "[1] ready\n"}
    process.send_signal(number)
    _, errors = process.communicate(timeout=LIMIT)
    assert process.returncode == 128 + number
    assert f"launch: stopped by {number.name}" in errors
    assert nothing_left(mark)


@pytest.mark.full
def test_ranks_may_save_when_they_are_told_to_stop() -> None:
    process = start(PROGRAM, "checkpoint")
    assert process.stdout is not None
    assert {process.stdout.readline() for _ in range(2)} == {"[0] ready\n", "[1] ready\n"}
    process.send_signal(signal.SIGUSR1)
    assert {process.stdout.readline() for _ in range(2)} == {"[0] usr1\n", "[1] usr1\n"}
    process.send_signal(signal.SIGTERM)
    rest, _ = process.communicate(timeout=LIMIT)
    assert rest.splitlines() == ["[0] saved after SIGTERM", "[1] saved after SIGTERM"]
    assert process.returncode == 128 + signal.SIGTERM


def test_no_rank_outlives_a_killed_launcher(mark: str) -> None:
    process = start(PROGRAM, "wait", mark, n=3)
    assert process.stdout is not None
    for _ in range(3):
        process.stdout.readline()
    process.kill()
    process.communicate(timeout=LIMIT)
    assert nothing_left(mark)


def test_a_reader_that_leaves_ends_the_job(mark: str) -> None:
    process = start(PROGRAM, "checkpoint", mark)
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    process.send_signal(signal.SIGUSR1)  # makes the ranks print
    assert process.wait(timeout=LIMIT) == 128 + signal.SIGPIPE
    assert process.stderr is not None
    assert "nobody reads" in process.stderr.read()
    process.stderr.close()
    assert nothing_left(mark)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-n", "0", PROGRAM], "from 1 on, found '0'"),
        (["-n", "two", PROGRAM], "found 'two'"),
        (["-n", "2", "missing.py"], "there is no script 'missing.py'"),
        (["-n", "2", "-m", "missing_module"], "there is no module 'missing_module'"),
        (["-n", "2"], "program"),
    ],
)
def test_bad_command_lines(arguments: Sequence[str], message: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "launch", *arguments],
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 2
    assert message in done.stderr


def on_a_terminal(*arguments: str) -> str:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        command(*arguments), env=clean_environment(), stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    shown = b""
    while True:
        try:
            data = os.read(ours, 4096)
        except OSError:  # the last writer has closed the terminal
            break
        shown += data
    os.close(ours)
    assert process.wait(timeout=LIMIT) == 0
    return shown.decode()


def test_a_progress_line_on_a_terminal() -> None:
    shown = on_a_terminal(PROGRAM, "progress")
    assert "[0] terminal True\r\n" in shown
    assert "[1] terminal False\r\n" in shown
    assert all(f"\rstep {step}" in shown for step in range(3))
    # The line of rank 1 takes the place of the progress, which is drawn again below it.
    assert "\rstep 1\r\x1b[K[1] in between\r\n\rstep 1" in shown
    assert shown.endswith("step 2\r\n")


def test_a_progress_line_in_a_file() -> None:
    done = run(PROGRAM, "progress")
    assert "\x1b" not in done.stdout
    assert "[1] in between\n" in done.stdout
    assert "[0] terminal False\n" in done.stdout


def test_the_line_that_names_an_exception() -> None:
    def line(text: str) -> str:
        return output.exception_line(text.encode().splitlines())

    chained = "Traceback (most recent call last):\n  File 1\nKeyError: 1\n\nDuring handling ...\n\n"
    last = "Traceback (most recent call last):\n  File 2\n    code\n    ^^^\npkg.OwnError: what\nmore: text\n"
    assert line(chained + last) == "pkg.OwnError: what"
    assert line(chained) == "KeyError: 1"
    assert line("pkg.OwnError: never raised") == "pkg.OwnError: never raised"
    assert line("") == ""


def test_cgroup_quota(tmp_path: Path) -> None:
    cores = len(os.sched_getaffinity(0))
    assert processes.allowed_cores(tmp_path) == cores
    for text, expected in (("max 100000", cores), ("100000 100000", 1), ("50000 100000", 1), ("9900000 100000", cores)):
        (tmp_path / "cpu.max").write_text(text)
        assert processes.allowed_cores(tmp_path) == expected
