"""SIGKILL at any moment of saving: the newest complete checkpoint is there, bit by bit, and the next job goes on."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import collectives
import fsdp
from collectives import Communicator
from tests.fsdp.checkpoint_program import Net, build, fill
from tests.ranks import ROOT, clean_environment

PROGRAM = Path(__file__).with_name("checkpoint_program.py")


def start(folder: Path, how: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "launch", "-n", "2", str(PROGRAM), str(folder), how]
    return subprocess.Popen(
        command, env=clean_environment(), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def verify(comm: Communicator, folder: str) -> int:
    model, optimizer = build(comm)
    step = fsdp.load(folder, model, optimizer).step
    for p in model.parameters():
        assert torch.equal(p.detach(), torch.full_like(p, step))
        assert torch.equal(optimizer.state[p]["momentum_buffer"], torch.full_like(p, 2.0 * step))
    return step


def kill_and_verify(folder: Path, how: str, kills: int, seed: int) -> None:
    """Kill one rank or all of a saving job, at random moments; after each, load what is there."""
    chance = random.Random(seed)
    newest = 0
    for turn in range(kills):
        process = start(folder, how)
        try:
            assert process.stdout is not None
            while not process.stdout.readline():  # the first save of this job is done
                assert process.poll() is None, process.communicate()
            time.sleep(chance.random() * 0.1)
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            victims = [int(child) for child in children]
            for victim in victims if chance.random() < 0.5 else [chance.choice(victims)]:
                os.kill(victim, signal.SIGKILL)
            process.communicate(timeout=60)  # nobody hangs
        finally:
            process.kill()
            process.wait()
        found = fsdp.latest(folder)
        assert found is not None
        step = collectives.run(verify, str(folder), n=1 + turn % 3)[0]
        assert step > newest, f"after kill {turn} of seed {seed}"
        newest = step
        left = [path.name for path in folder.iterdir() if path.name.startswith("step-")]
        assert 1 <= len(left) <= 3, left


def save_alone(folder: str) -> None:
    """Save until killed, in a process without other ranks."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    found = fsdp.latest(folder)
    step = 0 if found is None else fsdp.load(found, model, optimizer).step
    while True:
        step += 1
        fill(model, optimizer, step)
        fsdp.save(folder, model, optimizer, step=step, keep=1)


def number(checkpoint: Path | None) -> int:
    return 0 if checkpoint is None else int(checkpoint.name.removeprefix("step-"))


@pytest.mark.full
def test_a_process_alone_is_killed(tmp_path: Path) -> None:
    chance = random.Random(3)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.worker"])  # as the other tests that start processes do
    newest = 0
    for _ in range(4):
        process = context.Process(target=save_alone, args=(str(tmp_path),))
        process.start()
        try:
            deadline = time.monotonic() + 60
            while number(fsdp.latest(tmp_path)) <= newest:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            time.sleep(chance.random() * 0.03)
        finally:
            process.kill()
            process.join()
        step = collectives.run(verify, str(tmp_path), n=2)[0]
        assert step > newest
        newest = step


@pytest.mark.full
@pytest.mark.parametrize("how", ["at-once", "behind"])
def test_killed_a_few_times(how: str, tmp_path: Path) -> None:
    kill_and_verify(tmp_path, how, 4, seed=1)


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
def test_killed_a_hundred_times(tmp_path: Path) -> None:
    kill_and_verify(tmp_path, "at-once", 100, seed=2)
