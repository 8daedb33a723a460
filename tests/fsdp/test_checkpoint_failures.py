"""Saves that fail, or take long, on one of several processes: all of them hear the same, and training goes on."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fsdp
from collectives import Communicator
from fsdp.checkpoint import tensor_file
from tests.fsdp.models import OddBlock, OddNet, adamw, filled, full_state, loss_of, same_bits, words, wrapped
from tests.ranks import run_ranks

NOBODY = 65534


def build(comm: Communicator, seed: int = 0) -> tuple[Any, Any]:
    model = wrapped(filled(OddNet(1), seed), comm, 3, [OddBlock])
    return model, adamw(model.parameters())


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer, comm: Communicator, step: int) -> None:
    optimizer.zero_grad()
    loss_of(model, words(comm.rank, step)).backward()
    optimizer.step()


@contextlib.contextmanager
def quota(folder: Path) -> Iterator[None]:
    """Files of this process end after 1,000 bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextlib.contextmanager
def no_access(folder: Path) -> Iterator[None]:
    """This process may write nothing in ``folder``; root is another user meanwhile, as modes do not keep it out."""
    mode = stat.S_IMODE(folder.stat().st_mode)
    root = os.geteuid() == 0
    os.chmod(folder, 0o500)
    if root:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)
        os.chmod(folder, mode)


def failing(
    comm: Communicator, path: str, fault: Callable[[Path], AbstractContextManager[None]], faulty: int, behind: bool
) -> tuple[list[str], dict[str, torch.Tensor]]:
    """A save that fails between two that do not: what this rank hears, and the state that was saved last."""
    model, optimizer = build(comm)
    step_of(model, optimizer, comm, 1)
    fsdp.save(path, model, optimizer, step=1)
    messages = []
    for step in (2, 3):
        step_of(model, optimizer, comm, step)
        with fault(Path(path)) if comm.rank == faulty else contextlib.nullcontext():
            with pytest.raises(fsdp.CheckpointError) as caught:
                fsdp.save(path, model, optimizer, step=step, async_save=behind).wait()
            comm.barrier()
        messages.append(str(caught.value).splitlines()[0])
        assert fsdp.latest(path) == Path(path) / "step-0000000001"
    step_of(model, optimizer, comm, 4)
    fsdp.save(path, model, optimizer, step=4)
    return messages, full_state(model)


def loaded(comm: Communicator, path: str) -> tuple[int, dict[str, torch.Tensor]]:
    model, optimizer = build(comm, seed=4)
    return fsdp.load(path, model, optimizer).step, full_state(model)


@pytest.mark.full
@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize(
    ("fault", "faulty", "number", "place"),
    [
        (quota, 1, errno.EFBIG, "rank-00001.safetensors"),
        (no_access, 0, errno.EACCES, ".partial-step-"),
    ],
)
def test_what_one_process_cannot_write(
    fault: Any, faulty: int, number: int, place: str, behind: bool, tmp_path: Path
) -> None:
    rows = run_ranks(failing, str(tmp_path), fault, faulty, behind, world_size=2, backend="gloo")
    assert rows[0][0] == rows[1][0]
    for message in rows[0][0]:
        assert message.startswith(f"rank {faulty}: ")
        assert os.strerror(number) in message
        assert f"{tmp_path}/" in message
        assert place in message
    assert [entry.name for entry in tmp_path.iterdir() if entry.name.startswith(".")] == []
    for step, state in run_ranks(loaded, str(tmp_path), world_size=3):
        assert step == 4
        assert same_bits(state, rows[0][1])


def delayed(comm: Communicator, path: str, behind: bool, seconds: float) -> dict[str, torch.Tensor]:
    """The last rank writes late: behind training, when the first has seen that the older checkpoint is the newest."""
    last, sign, write = comm.world_size - 1, Path(path) / "sign", tensor_file.write
    model, optimizer = build(comm)
    step_of(model, optimizer, comm, 1)
    fsdp.save(path, model, optimizer, step=1)
    step_of(model, optimizer, comm, 2)
    state = full_state(model)

    def late(file: Path, *args: Any) -> Any:
        if file.name == f"rank-{last:05d}.safetensors":
            time.sleep(seconds)
            while behind and not sign.exists():
                time.sleep(0.01)
        return write(file, *args)

    tensor_file.write = late
    try:
        comm.barrier()  # ranks that are threads share it
        saving = fsdp.save(path, model, optimizer, step=2, async_save=behind)
        if behind:
            step_of(model, optimizer, comm, 3)
            if comm.rank == 0:
                assert fsdp.latest(path) == Path(path) / "step-0000000001"
                sign.touch()
        assert saving.wait() == fsdp.latest(path) == Path(path) / "step-0000000002"
        comm.barrier()
    finally:
        tensor_file.write = write
    return state


@pytest.mark.parametrize(
    ("behind", "backend", "seconds"),
    [
        (True, "threads", 0.0),
        pytest.param(False, "gloo", 2.0, marks=pytest.mark.full),
        pytest.param(True, "gloo", 2.0, marks=pytest.mark.full),
    ],
)
def test_a_rank_that_is_late_is_waited_for(behind: bool, backend: str, seconds: float, tmp_path: Path) -> None:
    state = run_ranks(delayed, str(tmp_path), behind, seconds, world_size=2, backend=backend)[0]
    for step, found in run_ranks(loaded, str(tmp_path), world_size=1):
        assert step == 2
        assert same_bits(found, state)
