"""Bytes held equal the table: at rest 16P for DDP and 16P/N for the rest; during a step no more than promised."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from collectives import Communicator
from fsdp.flat_layout import ALIGNMENT
from tests.fsdp.models import OddBlock, OddNet, filled, loss_of, words, wrapped
from tests.ranks import PRIVATE, Run, world_sizes

ITEM = 4


class WideBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.zeros(width, 40))
        self.down = nn.Parameter(torch.zeros(40, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(x @ self.up) @ self.down


class WideNet(nn.Module):
    def __init__(self, blocks: int = 12, width: int = 300) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.zeros(11, width))
        self.blocks = nn.ModuleList(WideBlock(width) for _ in range(blocks))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        x = torch.nn.functional.embedding(batch, self.embedding)
        for block in self.blocks:
            x = block(x)
        return x @ self.embedding.t()


def live_bytes() -> int:
    """Bytes of all tensors of this process that Python can reach."""
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        real = issubclass(type(thing), torch.Tensor) and not isinstance(thing, FakeTensor)  # torch.compile leaves those
        if real and thing.device.type == "cpu":
            for tensor in (thing, thing.grad if thing.is_leaf else None):
                if tensor is not None:
                    storage = tensor.untyped_storage()
                    storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def two_steps(comm: Communicator, strategy: str | int, units: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = wrapped(filled(WideNet(), comm.rank, torch.float32), comm, strategy, units)
    optim = torch.optim.AdamW(model.parameters())
    for step in range(2):
        optim.zero_grad()
        loss_of(model, words(comm.rank, step)).backward()
        optim.step()
    return model, optim


def held_at_rest(comm: Communicator, strategy: str | int, units: Any, one_process: bool) -> int:
    """Bytes that two steps leave in this process. A first model warms up the communicator's scratch."""
    kept: Any = two_steps(comm, strategy, units)
    held = []
    looks = comm.rank == 0 or not one_process
    for _ in range(2):
        kept = None
        comm.barrier()
        held.append(live_bytes() if looks else 0)
        comm.barrier()
        kept = kept or two_steps(comm, strategy, units)
        comm.barrier()
        held.append(live_bytes() if looks else 0)
        comm.barrier()
    return held[3] - held[2]


PLAIN = {(1, "ddp", "whole"), (2, 3, "units")}
FULL = {
    (1, 3, "units"),
    (2, "ddp", "whole"),
    (2, 1, "units"),
    (2, 2, "units"),
    (2, 0, "units"),
    *((4, n, "units") for n in (0, 1, 2, 3)),
    (4, 3, "whole"),
}
CASES = [(n, strategy, kind) for n in (1, 2, 4) for strategy in ("ddp", 0, 1, 2, 3) for kind in ("whole", "units")]


@PRIVATE
@pytest.mark.parametrize(
    ("world_size", "strategy", "kind"),
    [
        pytest.param(*case, marks=() if case in PLAIN else pytest.mark.full if case in FULL else pytest.mark.exhaustive)
        for case in CASES
    ],
)
def test_bytes_at_rest(run: Run, backend: str, world_size: int, strategy: str | int, kind: str) -> None:
    units = [WideBlock] if kind == "units" else None
    held = sum(run(held_at_rest, strategy, units, backend == "threads", n=world_size))
    parameters = sum(p.numel() for p in WideNet().parameters())
    copies = world_size if strategy in ("ddp", 0) else 1
    padding = 25 * ALIGNMENT + 13 * world_size * ALIGNMENT
    expected = 4 * ITEM * parameters * copies  # weights, gradients, and two moments
    assert expected <= held <= 1.01 * expected + 4 * ITEM * padding * copies


def units_gathered(comm: Communicator) -> list[int]:
    """How many freed units are gathered, seen from inside of every block's forward and backward."""
    model = wrapped(filled(OddNet(5), comm.rank), comm, 3, [OddBlock])
    blocks = list(model.blocks)
    seen: list[int] = []

    def look(*_: Any) -> None:
        seen.append(sum(g.full.untyped_storage().nbytes() > 0 for b in blocks for g in b._fsdp_unit.own_groups))

    for block in blocks:
        block.register_forward_pre_hook(look)
        block.register_full_backward_pre_hook(look)
    for step in range(3):
        loss_of(model, words(comm.rank, step)).backward()
    assert all(g.full.untyped_storage().nbytes() == 0 for g in model._fsdp_unit.runtime.groups)
    return seen


@PRIVATE
@world_sizes(1, 2, 3)
def test_at_most_two_units_are_gathered(run: Run, world_size: int) -> None:
    for seen in run(units_gathered, n=world_size):
        assert len(seen) == 3 * 2 * 5
        assert max(seen) == 2  # so there is prefetch, and no more than that
