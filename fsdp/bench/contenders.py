"""Who takes part in training: two processes apart, torch's own, DeepSpeed, and this package by stage and backend."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import collectives
from collectives import Communicator
from fsdp import fully_shard
from fsdp.bench import deepspeed_parts, torch_parts
from fsdp.bench.models import GPT, Block, Shape

APART, FSDP2 = "apart", "torch-fsdp2"
TORCH = {"torch-ddp": torch_parts.ddp, "torch-fsdp1": torch_parts.fsdp1, FSDP2: torch_parts.fsdp2}
ON_OURS = "cshm"  # torch's own, on a backend of collectives.torch_backend
TORCH_ON_OURS = {f"torch-ddp-{ON_OURS}": torch_parts.ddp, f"{FSDP2}-{ON_OURS}": torch_parts.fsdp2}
DEEPSPEED = {"deepspeed-1": 1, "deepspeed-3": 3}
STAGES = range(4)

Step = Callable[[torch.Tensor], torch.Tensor]  # ids -> loss


@dataclass(frozen=True)
class Contender:
    """A name and a training step. ``comm``: what its communication is counted by, where it is ours."""

    name: str
    step: Step
    comm: Communicator | None = None

    @property
    def communicates(self) -> bool:
        return self.name != APART


def names_of(backends: Sequence[str]) -> list[str]:
    """All contenders, ours on these backends. ``shm+gloo:3`` is ours at stage 3 on that backend."""
    return [
        APART,
        *TORCH,
        *TORCH_ON_OURS,
        *DEEPSPEED,
        *(f"{backend}:{stage}" for backend in backends for stage in STAGES),
    ]


def check(name: str) -> None:
    """Raise ``ValueError`` for a name that means nothing."""
    backend, _, stage = name.rpartition(":")
    named = (APART, *TORCH, *TORCH_ON_OURS, *DEEPSPEED)
    if name not in named and not (backend and stage in map(str, STAGES)):
        known = ", ".join(named)
        raise ValueError(f"unknown contender {name!r}; expected {known}, or a backend and a stage such as shm+gloo:3")


class Field:
    """The communicators and process groups of this process set. All ranks ask for the same, in the same order."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._open: dict[str, Communicator] = {}
        self._exits = contextlib.ExitStack()
        self._grouped = False
        self._on_ours: Any = None  # torch's process group

    def __enter__(self) -> Field:
        return self

    def __exit__(self, *_: object) -> None:
        self._exits.close()

    def communicator(self, backend: str) -> Communicator:
        if backend not in self._open:
            comm = collectives.init(backend, timeout=self._timeout, setup_timeout=self._timeout)
            self._open[backend] = self._exits.enter_context(comm)
        return self._open[backend]

    def contender(self, name: str, shape: Shape, sync: Communicator) -> Contender:
        """Collective. ``sync`` tells all ranks where they meet for torch's process group."""
        torch.manual_seed(0)
        model = GPT(shape)
        if name == APART:
            return Contender(name, stepper(model))
        if name in TORCH or name in TORCH_ON_OURS or name in DEEPSPEED:
            self.group(sync)
        if name in TORCH:
            return Contender(name, stepper(TORCH[name](model, list(model.blocks))))
        if name in TORCH_ON_OURS:
            if self._on_ours is None:
                self._on_ours = torch_parts.group_on(ON_OURS)
            return Contender(name, stepper(TORCH_ON_OURS[name](model, list(model.blocks), self._on_ours)))
        if name in DEEPSPEED:
            return Contender(name, deepspeed_parts.engine(model, DEEPSPEED[name], shape.rows, sync.world_size).step)
        backend, _, stage = name.rpartition(":")
        comm = self.communicator(backend)
        fully_shard(model, comm, stage=int(stage), units=[Block] if stage == "3" else None)
        return Contender(name, stepper(model), comm)

    def group(self, sync: Communicator) -> None:
        """Have torch's default process group. Collective."""
        if not self._grouped:
            folder = self._exits.enter_context(_folder(sync))
            self._exits.enter_context(torch_parts.process_group(sync.rank, sync.world_size, f"{folder}/meeting"))
            self._grouped = True


@contextlib.contextmanager
def _folder(sync: Communicator) -> Iterator[Path]:
    """A temporary folder of rank 0's that all ranks know."""
    with tempfile.TemporaryDirectory() if sync.rank == 0 else contextlib.nullcontext() as mine:
        yield Path(sync.broadcast_object(mine, 0))


def stepper(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Step:
    """Forward, backward and AdamW, or the optimizer that is given."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), fused=True)

    def step(ids: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(ids)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss

    return step
