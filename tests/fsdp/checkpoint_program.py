"""A rank that saves one checkpoint after another, until it is killed. Started by the tests of checkpoints.

The weights of step n are n everywhere, and the moments 2 n, so whoever loads a checkpoint knows what must be in it.
"""

from __future__ import annotations

import sys

import torch
from torch import nn

import collectives
import fsdp

LAYERS, WIDTH = 4, 96


class Net(nn.Module):
    """Large enough that saving takes some time."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def build(comm: collectives.Communicator) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = fsdp.fully_shard(Net(), comm, units=[nn.Linear])
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def fill(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(step)
            optimizer.state[p]["momentum_buffer"] = torch.full_like(p, 2.0 * step)


def main() -> None:
    """Arguments: the folder, and whether to save in the background."""
    with collectives.init("gloo", timeout=30.0) as comm:
        model, optimizer = build(comm)
        found = fsdp.latest(sys.argv[1])
        step = 0 if found is None else fsdp.load(found, model, optimizer).step
        while True:
            step += 1
            fill(model, optimizer, step)
            fsdp.save(sys.argv[1], model, optimizer, step=step, keep=2, async_save=sys.argv[2] == "behind")
            if comm.rank == 0:
                print(step, flush=True)


if __name__ == "__main__":
    main()
