"""collectives.torch_backend under torch.distributed's own calls. Ranks are threads, each with a default group."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.testing._internal.distributed.multi_threaded_pg import ThreadLocalWorld

import collectives.torch_backend
from collectives.errors import CommError, CommTimeoutError
from collectives.torch_backend.creation import NAMES, stack_name
from tests.collectives.torch_checks import CHECKS, in_backward

pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")  # names of torch's own


@pytest.fixture
def worlds(monkeypatch: pytest.MonkeyPatch) -> Generator[None]:
    """Every thread has process groups of its own, as processes have."""
    monkeypatch.setattr(distributed_c10d, "_world", ThreadLocalWorld())
    isolate: Any = torch._C._distributed_c10d
    isolate._set_thread_isolation_mode(True)
    yield
    isolate._set_thread_isolation_mode(False)


def on_threads(body: Callable[[], None], world_size: int, backend: str, timeout: float = 20.0) -> None:
    """``body()`` on ranks with a default group."""
    store = dist.HashStore()
    failures: list[BaseException] = []

    def main(rank: int) -> None:
        try:
            limit = timedelta(seconds=timeout)
            dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=limit)
            body()
            dist.destroy_process_group()
        except BaseException as error:  # it is raised again below
            failures.append(error)
            if dist.is_initialized():
                dist.group.WORLD.abort()

    threads = [threading.Thread(target=main, args=(rank,), daemon=True) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if failures:
        raise failures[0]


@pytest.mark.parametrize(
    ("backend", "world_size"),
    [
        ("cgloo", 2),
        pytest.param("cgloo", 1, marks=pytest.mark.full),
        pytest.param("cgloo", 3, marks=pytest.mark.exhaustive),
        pytest.param("cring", 3, marks=pytest.mark.full),
        pytest.param("cring", 4, marks=pytest.mark.exhaustive),
    ],
)
@pytest.mark.parametrize("check", CHECKS)
def test_operations(worlds: None, check: Callable[[], None], backend: str, world_size: int) -> None:
    on_threads(check, world_size, backend)


@pytest.mark.parametrize("way", ["call", "group", "wait"])
def test_time_outs_are_passed_through(worlds: None, way: str) -> None:
    gave_up, soon = threading.Event(), timedelta(seconds=0.2)

    def body() -> None:
        group: Any = dist.new_group(timeout=soon) if way == "group" else dist.group.WORLD
        if dist.get_rank():
            gave_up.wait(50)
            return
        calls: dict[str, Callable[[], object]] = {
            "call": lambda: group.barrier(timeout=soon).wait(),
            "group": lambda: group.barrier().wait(),
            "wait": lambda: group.barrier().wait(soon),
        }
        with pytest.raises(CommTimeoutError):
            calls[way]()
        gave_up.set()

    on_threads(body, 2, "cgloo", timeout=600.0)


def test_a_backward_raises_what_its_operations_failed_with(worlds: None) -> None:
    started = threading.Event()

    def backward() -> None:
        dist.all_reduce(torch.ones(2), async_op=True).get_future()  # type: ignore[union-attr]
        started.set()

    def body() -> None:
        group: Any = dist.group.WORLD
        if dist.get_rank():
            started.wait(20)
            group.abort()
        else:
            with pytest.raises(CommError, match="its process group was aborted"):
                in_backward(backward)

    on_threads(body, 2, "cgloo")


@pytest.mark.parametrize(
    ("name", "world_size", "asked_for", "mpi", "expected"),
    [
        ("cshm", 2, None, False, "shm+gloo"),
        ("cshm", 2, None, True, "shm+mpi"),
        ("cshm", 1, None, True, "mpi"),
        ("cshm", 2, "shm+gloo", True, "shm+gloo"),
        ("cshm", 2, "ring+gloo", True, "shm+mpi"),
        ("cmpi", 2, None, False, "mpi"),
        ("cmpi", 2, "shm+mpi", True, "shm+mpi"),
        ("cmpi", 2, "shm+gloo", True, "mpi"),
        ("cring", 3, None, False, "ring+gloo"),
        ("cring", 3, "ring+mpi", False, "ring+mpi"),
        ("cgloo", 2, "shm+mpi", True, "gloo"),
    ],
)
def test_names_are_refined(name: str, world_size: int, asked_for: str | None, mpi: bool, expected: str) -> None:
    assert stack_name(name, world_size, asked_for, mpi=mpi) == expected


def test_registered() -> None:
    assert all(dist.Backend(name) == name for name in NAMES)
    assert set(NAMES) <= set(collectives.torch_backend.NAMES)
