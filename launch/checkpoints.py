"""Checkpoints of a training run: when they are saved, where it goes on from, and how a signal ends it."""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.nn as nn

import fsdp
from collectives import Communicator
from launch.entry import InputError

FOLDER = "checkpoints"
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)  # what Slurm sends before the time is over, and what --signal asks it for


@dataclass(frozen=True)
class Saves:
    """Save after every so many steps, 0: never but when a signal ends the run; keep so many, None: all; resume."""

    every: int = 0
    keep: int | None = None
    resume: bool = False

    def __post_init__(self) -> None:
        if self.every < 0:
            raise ValueError(f"save-every: expected at least 0, found {self.every}")
        if self.keep is not None and self.keep < 1:
            raise ValueError(f"keep: expected at least 1, found {self.keep}")


class StopSignal:
    """``seen`` says whether this process was asked to end, while the block runs. For the main thread."""

    def __init__(self) -> None:
        self.seen = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignal:
        for number in SIGNALS:
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.seen = True


class Checkpoints:
    """Those of one run, in a folder of its own.

    Args:
        folder: the run's. None: there are none.
        facts: what a run that goes on must have in common with the one that saved.
    """

    def __init__(self, comm: Communicator, folder: Path | None, saves: Saves, facts: Mapping[str, Any]) -> None:
        self.say: Callable[[str], None] = partial(print, flush=True)  # shows a line to the user
        self._comm, self._saves, self._facts = comm, saves, dict(facts)
        self._folder = None if folder is None else folder / FOLDER

    def due(self, step: int) -> bool:
        """Whether to save after ``step``."""
        return self._folder is not None and self._saves.every > 0 and step % self._saves.every == 0

    def save(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, extra: Mapping[str, Any]) -> bool:
        """Save; without success say so and return False, as training may go on. Collective."""
        if self._folder is None:
            return False
        all_of_it = {**extra, "facts": self._facts}
        try:
            fsdp.save(self._folder, model, optimizer, step=step, extra=all_of_it, keep=self._saves.keep)
        except fsdp.CheckpointError as error:
            self.tell(f"step {step} could not be saved: {error}")
            return False
        return True

    def resume(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Mapping[str, Any] | None:
        """What the newest checkpoint that is not damaged was saved with, once it is loaded; None without any.

        Collective.

        Raises:
            InputError: on every rank; all there are cannot be loaded, or are of a run with other settings.
        """
        if self._folder is None or not self._saves.resume:
            return None
        folder = self._folder
        found = self._comm.broadcast_object(fsdp.checkpoint.complete(folder) if self._comm.rank == 0 else None, 0)
        trouble: fsdp.CheckpointError | None = None
        for path in found:
            try:
                extra = fsdp.load(path, model, optimizer)
            except fsdp.CheckpointError as error:
                self.tell(f"{path} cannot be loaded: {error}")
                trouble = error
                continue
            self._check(path, extra)
            self.tell(f"going on after step {extra.step} of {path}")
            return extra
        if trouble is not None:
            raise InputError(f"--resume auto: expected a checkpoint that can be loaded in {folder}; found {trouble}")
        return None

    def tell(self, text: str) -> None:
        """Show a line, once."""
        if self._comm.rank == 0:
            self.say(text)

    def _check(self, path: Path, extra: Mapping[str, Any]) -> None:
        before = extra.get("facts", {})
        other = [f"{k} {before.get(k)!r}, not {v!r}" for k, v in self._facts.items() if before.get(k) != v]
        if other:
            raise InputError(
                f"--resume auto: expected the settings of this run in {path}; found {'; '.join(other)}; give the same "
                "ones, or another --name"
            )


def facts_of(config: Any, sha256: str) -> dict[str, Any]:
    """What the losses of a run depend on, besides how far it goes."""
    names = ("batch_size", "lr", "clip", "weight_decay", "seed")
    return {**{n: getattr(config, n) for n in names}, **dataclasses.asdict(config.model), "data": sha256}
