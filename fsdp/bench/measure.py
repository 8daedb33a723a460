"""The measuring itself: contenders take turns, step by step, and every loss is compared."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from collectives import Communicator
from fsdp.bench.contenders import Contender, Field
from fsdp.bench.models import SHAPES, Shape

WARM_UP = 2  # steps of each contender that do not count
TOLERANCE = 1e-4  # relative, of losses
_SMAPS = Path("/proc/self/smaps_rollup")


class Result(NamedTuple):
    """One contender's.

    ``seconds``: of each step, on the slowest rank. ``waited``: the part of that time that ranks were blocked in
    collectives, on average; None where nobody counts. ``wrong``: steps whose loss was not the first communicating
    contender's, on some rank. ``first_loss`` and ``last_loss``: rank 0's.
    """

    contender: str
    seconds: list[float]
    waited: float | None
    wrong: int
    first_loss: float
    last_loss: float


def batch(shape: Shape, rank: int, step: int) -> torch.Tensor:
    """Word ids of one rank and step."""
    generator = torch.Generator().manual_seed(7919 * step + rank)
    return torch.randint(0, shape.words, (shape.rows, shape.length), generator=generator)


def run(contenders: Sequence[Contender], shape: Shape, sync: Communicator, steps: int) -> list[Result]:
    """``steps`` steps of each contender; the same results on every rank. Collective over ``sync``."""
    times: list[list[float]] = [[] for _ in contenders]
    losses: list[list[float]] = [[] for _ in contenders]
    waited = [0.0 for _ in contenders]
    gc.collect()  # what was built before is not theirs to clear
    for step in range(WARM_UP + steps):
        ids = batch(shape, sync.rank, step)
        for i, contender in enumerate(contenders):
            sync.barrier()
            before = _blocked(contender)
            started = time.perf_counter()
            loss = contender.step(ids)
            times[i].append(time.perf_counter() - started)
            if step >= WARM_UP:
                waited[i] += _blocked(contender) - before
            losses[i].append(float(loss.detach()))
    slowest = _everyone(sync, times).amax(0)[:, WARM_UP:]
    spent = _everyone(sync, times)[:, :, WARM_UP:].sum((0, 2)).tolist()
    blocked = _everyone(sync, [[seconds] for seconds in waited]).sum((0, 2)).tolist()
    wrong = _wrong(_everyone(sync, losses), contenders)
    rank_0 = _everyone(sync, losses)[0]
    return [
        Result(
            contender.name,
            slowest[i].tolist(),
            None if contender.comm is None else blocked[i] / spent[i],
            wrong[i],
            float(rank_0[i, 0]),
            float(rank_0[i, -1]),
        )
        for i, contender in enumerate(contenders)
    ]


def _blocked(contender: Contender) -> float:
    return 0.0 if contender.comm is None else contender.comm.stats().seconds


def _everyone(sync: Communicator, rows: Sequence[Sequence[float]]) -> torch.Tensor:
    """Every rank's rows: (world_size, contenders, steps)."""
    mine = torch.tensor(rows, dtype=torch.float64)
    everyone = torch.empty(sync.world_size, *mine.shape, dtype=torch.float64)
    sync.all_gather(everyone, mine)
    return everyone


def _wrong(losses: torch.Tensor, contenders: Sequence[Contender]) -> list[int]:
    """Steps of each contender whose loss differs on some rank. Who trains apart must agree in the first step only."""
    expected = next((losses[:, i] for i, c in enumerate(contenders) if c.communicates), losses[:, 0])
    found = []
    for i, contender in enumerate(contenders):
        compared = losses.shape[2] if contender.communicates else 1
        right = torch.isclose(losses[:, i, :compared], expected[:, :compared], rtol=TOLERANCE, atol=0.0)
        found.append(int((~right).any(0).sum()))
    return found


class Memory(NamedTuple):
    """Bytes, summed over ranks: what one contender held at its peak, and the processes before there was a model.

    Proportional set sizes: a page that n processes map counts as 1/n for each.
    """

    contender: str
    peak: int
    before: int


def memory(name: str, model: str, field: Field, sync: Communicator) -> Memory:
    """The memory of a contender that has this process set to itself: its peak is reached in the second step."""
    shape = SHAPES[model]
    before = proportional_set_size()
    contender = field.contender(name, shape, sync)
    with _Watch() as watch:
        for step in range(3):
            contender.step(batch(shape, sync.rank, step))
            watch.look()
    mine = torch.tensor([watch.peak, before], dtype=torch.float64)
    sync.all_reduce(mine)
    return Memory(name, int(mine[0]), int(mine[1]))


def proportional_set_size() -> int:
    """This process's, in bytes."""
    for line in _SMAPS.read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{_SMAPS} has no line Pss:")


class _Watch:
    """Looks at the proportional set size again and again, from a thread."""

    def __init__(self, interval: float = 0.02) -> None:
        self.peak = 0
        self._interval = interval
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> _Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def look(self) -> None:
        self.peak = max(self.peak, proportional_set_size())

    def _run(self) -> None:
        while not self._over.wait(self._interval):
            self.look()
