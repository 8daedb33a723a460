"""SIGKILL at any moment of saving: the newest complete checkpoint is there, bit by bit, and the next job goes on.

The weights of step n are n everywhere, and the moments 2 n, so whoever loads a checkpoint knows what must be in it.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import random
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import collectives
import fsdp
from collectives import CommError, Communicator
from tests.ranks import Call, Pool

LAYERS, WIDTH = 4, 96
LOOKS = 3000  # of 20 ms: who has not come to an end by then hangs. Counted, as all of us may be stopped meanwhile


class Net(nn.Module):
    """Large enough that saving takes some time."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def build(comm: Communicator | None) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Net() if comm is None else fsdp.fully_shard(Net(), comm, units=[nn.Linear])
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def fill(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(step)
            optimizer.state[p]["momentum_buffer"] = torch.full_like(p, 2.0 * step)


def go_on_saving(comm: Communicator | None, folder: str, behind: bool) -> None:
    """Save one step after another, from the newest that is there on, until killed; or until a peer is lost."""
    model, optimizer = build(comm)
    found = fsdp.latest(folder)
    step = 0 if found is None else fsdp.load(found, model, optimizer).step
    try:
        while True:
            step += 1
            fill(model, optimizer, step)
            fsdp.save(folder, model, optimizer, step=step, keep=2, async_save=behind)
    except CommError:
        for thread in threading.enumerate():
            if thread.name == "fsdp-save":
                thread.join(30.0)
                assert not thread.is_alive(), "the thread that saves waits for a rank that is lost"
        raise


def verify(comm: Communicator, folder: str) -> int:
    model, optimizer = build(comm)
    step = fsdp.load(folder, model, optimizer).step
    for p in model.parameters():
        assert torch.equal(p.detach(), torch.full_like(p, step))
        assert torch.equal(optimizer.state[p]["momentum_buffer"], torch.full_like(p, 2.0 * step))
    return step


def number(checkpoint: Path | None) -> int:
    return 0 if checkpoint is None else int(checkpoint.name.removeprefix("step-"))


def wait_for_more(folder: Path, than: int) -> None:
    for _ in range(LOOKS):
        if number(fsdp.latest(folder)) > than:
            return
        time.sleep(0.02)
    raise AssertionError(f"nothing after step {than}")


def kill_some(folder: Path, behind: bool, world_size: int, newest: int, chance: random.Random) -> None:
    """Start a job that saves, and kill one rank of it or all at a random moment. The others raise, and end."""
    pool = Pool("plain", world_size)
    try:
        for connection in pool.connections:
            connection.send_bytes(pickle.dumps(Call(go_on_saving, (str(folder), behind), {}, "gloo")))
        wait_for_more(folder, newest)
        time.sleep(chance.random() * 0.1)
        ranks = range(world_size)
        victims = set(ranks) if chance.random() < 0.5 else {chance.choice(ranks)}
        for victim in victims:
            os.kill(pool.pids[victim], signal.SIGKILL)
        for survivor in set(ranks) - victims:
            answered = any(pool.connections[survivor].poll(0.02) for _ in range(LOOKS))
            assert answered, f"rank {survivor} hangs after {victims} died"
            _, error, trace = pickle.loads(pool.connections[survivor].recv_bytes())
            assert isinstance(error, CommError), trace
    finally:
        pool.kill()


def kill_and_verify(folder: Path, behind: bool, kills: int, seed: int) -> None:
    chance = random.Random(seed)
    newest = 0
    for turn in range(kills):
        kill_some(folder, behind, 2 + turn % 2, newest, chance)
        found = fsdp.latest(folder)
        assert found is not None
        step = collectives.run(verify, str(folder), n=1 + turn % 3)[0]
        assert step > newest, f"after kill {turn} of seed {seed}"
        newest = step
    # Who is killed before it has deleted old ones leaves that to the next.
    collectives.run(save_once, str(folder), newest + 1, n=2)
    assert sorted(path.name for path in folder.iterdir()) == [f"step-{newest + i:010d}" for i in (0, 1)]


def save_once(comm: Communicator, folder: str, step: int) -> None:
    model, optimizer = build(comm)
    fsdp.save(folder, model, optimizer, step=step, keep=2)


@pytest.mark.exhaustive
def test_a_process_alone_is_killed(tmp_path: Path) -> None:
    chance = random.Random(3)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.worker"])  # as the other tests that start processes do
    newest = 0
    for _ in range(4):
        process = context.Process(target=go_on_saving, args=(None, str(tmp_path), False))
        process.start()
        try:
            wait_for_more(tmp_path, newest)
            time.sleep(chance.random() * 0.03)
        finally:
            process.kill()
            process.join()
        step = collectives.run(verify, str(tmp_path), n=2)[0]
        assert step > newest
        newest = step


@pytest.mark.full
@pytest.mark.parametrize("behind", [pytest.param(False, marks=pytest.mark.exhaustive), True])
def test_killed_a_few_times(behind: bool, tmp_path: Path) -> None:
    kill_and_verify(tmp_path, behind, 4, seed=1)


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("behind", [False, True])
def test_killed_a_hundred_times(behind: bool, tmp_path: Path) -> None:
    kill_and_verify(tmp_path, behind, 100, seed=2)
