"""Shared memory and the system around it: crashes, forks, namespaces, machines that refuse."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.ranks import ROOT, clean_environment

USER_NAMESPACE = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc"]


def permitted(*command: str) -> bool:
    """Whether this machine lets us do that."""
    if shutil.which(command[0]) is None:
        return False
    return subprocess.run(command, capture_output=True, timeout=20).returncode == 0


def run(
    *arguments: str,
    world_size: int = 2,
    prefixes: Sequence[Sequence[str]] = (),
    address: str = "127.0.0.1",
    **variables: str,
) -> list[tuple[int, str]]:
    """Start ranks as a launcher would, each behind its prefix; exit codes and what they printed, by rank."""
    command = [sys.executable, "-m", "tests.collectives.shm_program", *arguments]
    processes = []
    with socket.create_server((address, 0), backlog=32) as store:
        place = {"MASTER_ADDR": address, "MASTER_PORT": str(store.getsockname()[1]), "COLLECTIVES_LAUNCH": "tests"}
        given = {} if prefixes and prefixes[0][:2] == ["ip", "netns"] else {"COLLECTIVES_STORE_FD": str(store.fileno())}
        if not given:
            store.close()
        for rank in range(world_size):
            identity = {"RANK": str(rank), "WORLD_SIZE": str(world_size)}
            identity |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world_size)}
            environment = {**clean_environment(), **place, **given, **identity, **variables}
            processes.append(
                subprocess.Popen(
                    [*(prefixes[rank] if prefixes else ()), *command],
                    cwd=ROOT,
                    env=environment,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    pass_fds=(store.fileno(),) if given and rank == 0 else (),
                )
            )
    results = []
    try:
        for process in processes:
            output, _ = process.communicate(timeout=90)
            results.append((process.returncode, output))
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
    return results


def assert_fine(results: Sequence[tuple[int, str]], *texts: str) -> None:
    for code, output in results:
        assert code == 0, output
        for text in texts:
            assert text in output, output


def test_many_communicators_leave_nothing() -> None:
    """No descriptor, no mapping, no file."""
    assert_fine(run("open_and_close", "6"), "flat")
    assert not [name for name in os.listdir("/dev/shm") if "collectives" in name]


@pytest.mark.exhaustive
def test_two_hundred_communicators_leave_nothing() -> None:
    assert_fine(run("open_and_close", "200"), "flat")


@pytest.mark.parametrize(
    ("how", "world_size"),
    [
        ("inside", 3),
        *(pytest.param(*case, marks=pytest.mark.full) for case in (("inside", 2), ("between", 2), ("between", 3))),
    ],
)
def test_a_killed_rank_is_named_and_leaves_nothing(how: str, world_size: int, tmp_path: Path) -> None:
    *survivors, victim = run("killed", how, world_size=world_size, SEEN=str(tmp_path))
    assert victim[0] == -9
    assert_fine(survivors, f"rank {world_size - 1}")
    seen = [float((tmp_path / str(rank)).read_text()) for rank in range(world_size - 1)]
    assert max(seen) - float((tmp_path / "killed").read_text()) < 2.0
    assert not [name for name in os.listdir("/dev/shm") if "collectives" in name]


@pytest.mark.parametrize("what", ["tensor", pytest.param("part", marks=pytest.mark.full)])
def test_who_writes_into_a_shared_buffer_is_named(what: str) -> None:
    """Into the gathered tensor always; into a part of one's own while it is guarded."""
    reader, offender = run("overwrites", what)
    assert_fine([reader], "rank 0 reads on")
    assert offender[0] == -11
    assert "in the_offender" in offender[1]


@pytest.mark.full
def test_a_fork_is_refused_and_harmless() -> None:
    assert_fine(run("forked"), "forked")


@pytest.mark.skipif(not permitted(*USER_NAMESPACE, "true"), reason="user namespaces are not permitted here")
def test_each_rank_in_namespaces_of_its_own() -> None:
    """Other users, other process ids: memory and the end of processes are passed as descriptors."""
    assert_fine(run("shm+gloo", prefixes=[USER_NAMESPACE] * 2), "shm+gloo with 2 here")


@pytest.mark.parametrize(
    ("why", "text"), [("memfd", "Operation not permitted"), pytest.param("aarch64", "aarch64", marks=pytest.mark.full)]
)
def test_where_memory_cannot_be_shared_the_transport_serves_alone(why: str, text: str) -> None:
    results = run("refused", why)
    assert_fine(results, "gloo with 1 here")
    assert "shm+gloo with" not in results[0][1]
    lines = [line for line in results[0][1].splitlines() if line.startswith("LOG") and "shared memory" in line]
    assert len(lines) == 1
    assert "rank 1" in lines[0]
    assert text in lines[0]


@pytest.mark.full
@pytest.mark.skipif(not permitted("ip", "netns", "list"), reason="network namespaces are not permitted here")
def test_two_network_namespaces_are_two_hosts() -> None:
    """Two ranks in each: memory is shared in a namespace, and messages go between them."""
    names = [f"shm-test-{os.getpid()}-{i}" for i in range(2)]
    addresses = ["10.231.7.1", "10.231.7.2"]
    ip = lambda *words: subprocess.run(["ip", *words], check=True, capture_output=True, timeout=20)  # noqa: E731
    try:
        for name in names:
            ip("netns", "add", name)
        ip(
            "link",
            "add",
            f"shm{os.getpid()}a",
            "netns",
            names[0],
            "type",
            "veth",
            "peer",
            "name",
            "shmb",
            "netns",
            names[1],
        )
        for name, link, address in zip(names, (f"shm{os.getpid()}a", "shmb"), addresses, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", link)
            ip("-n", name, "link", "set", link, "up")
            ip("-n", name, "link", "set", "lo", "up")
    except subprocess.CalledProcessError as error:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=20)
        pytest.skip(f"virtual links are not permitted here: {error.stderr.decode().strip()}")
    try:
        command = [sys.executable, "-m", "tests.collectives.shm_program", "shm+gloo"]
        processes = []
        for rank in range(4):
            host, local = divmod(rank, 2)
            identity = {"RANK": str(rank), "WORLD_SIZE": "4", "LOCAL_RANK": str(local), "LOCAL_WORLD_SIZE": "2"}
            place = {"MASTER_ADDR": addresses[0], "MASTER_PORT": "29517"}
            processes.append(
                subprocess.Popen(
                    ["ip", "netns", "exec", names[host], *command],
                    cwd=ROOT,
                    env={**clean_environment(), **identity, **place},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
        for process in processes:
            output, _ = process.communicate(timeout=90)
            assert process.returncode == 0, output
            assert "shm+gloo with 2 here" in output, output
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=20)
