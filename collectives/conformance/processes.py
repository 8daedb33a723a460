"""Ranks as processes of this program."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from collectives.conformance.rank import LEAVE, Connect, Outcomes, Places, Watch, run_rank
from collectives.conformance.table import Trial


def run_processes(
    connect: Connect, world_size: int, wanted: Sequence[Trial], timeout: float, call_timeout: float
) -> tuple[Outcomes, Places, str]:
    """What each rank answered, where each was, and what there is to read about those that hung or died."""
    context = multiprocessing.get_context("spawn")
    places: Any = context.RawArray("i", [-1] * world_size)
    with tempfile.TemporaryDirectory(prefix="conformance-") as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(world_size)]
        processes: list[Any] = []
        for rank, (_, theirs) in enumerate(pipes):
            args = (connect, rank, world_size, wanted, call_timeout, theirs, places, folder)
            processes.append(context.Process(target=_serve, args=args, daemon=True))
            processes[-1].start()
            theirs.close()
        outcomes, silent = _collect([ours for ours, _ in pipes], places, timeout)
        well = not silent and all(outcome.failure is None for outcome in outcomes.values())
        _end(processes, LEAVE if well else 0.1)
        codes = [process.exitcode for process in processes]
        if well:  # ranks that answered well, but did not end well
            outcomes = {rank: outcome for rank, outcome in outcomes.items() if codes[rank] == 0}
        said = [f"rank {rank} left with exit code {code}" for rank, code in enumerate(codes) if code]
        logs = [(path.name, path.read_text(errors="replace")) for path in sorted(Path(folder).glob("*.log"))]
        said += [f"--- {name}\n{text}" for name, text in logs if text]
    return outcomes, dict(enumerate(places)), "\n".join(said)


def _end(processes: Sequence[Any], seconds: float) -> None:
    """Wait until all have left by themselves; what has not then shows its stack and is killed."""
    deadline = time.monotonic() + seconds
    for process in processes:
        process.join(max(0.01, deadline - time.monotonic()))
    stuck = [process for process in processes if process.is_alive()]
    for process in stuck:
        os.kill(process.pid, signal.SIGUSR1)
    time.sleep(0.5 if stuck else 0)
    for process in stuck:
        process.kill()
        process.join()


def _collect(pipes: Sequence[Connection], places: Any, timeout: float) -> tuple[Outcomes, list[int]]:
    """The answers that come in time, and who gave none."""
    outcomes: Outcomes = {}
    pending = dict(enumerate(pipes))
    died: list[int] = []
    watch = Watch(timeout)
    while pending and (left := watch.left(places)) > 0:
        ready = set(wait(list(pending.values()), min(left, 1.0)))
        for rank in [rank for rank, pipe in pending.items() if pipe in ready]:
            try:
                outcomes[rank] = pending.pop(rank).recv()
            except EOFError:
                died.append(rank)
        if died or any(outcome.failure for outcome in outcomes.values()):
            watch.hurry()
    return outcomes, sorted([*died, *pending])


def _serve(
    connect: Connect,
    rank: int,
    world_size: int,
    wanted: Sequence[Trial],
    timeout: float,
    pipe: Connection,
    places: Any,
    folder: str,
) -> None:
    def began(number: int) -> None:
        places[rank] = number

    log = os.open(Path(folder) / f"rank{rank}.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.enable(2)
    faulthandler.register(signal.SIGUSR1, 2, all_threads=True)
    pipe.send(run_rank(connect, rank, world_size, wanted, timeout, began))
