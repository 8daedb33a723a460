"""``python -m collectives.torch_backend.overhead``: what the adapter adds to a call of the communicator below it.

This rank is alone: nothing is sent, and all time is Python's.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from collectives.torch_backend.default_group import begin
from collectives.torch_backend.features import default_group
from collectives.torch_backend.process_group import CollectivesProcessGroup


class Cost(NamedTuple):
    """Microseconds of one call: of the communicator, of the process group over it, and of ``torch.distributed``."""

    communicator: float
    group: float
    torch: float

    @property
    def adapter(self) -> float:
        """What the process group adds to the communicator's call."""
        return self.group - self.communicator


def costs(repeats: int, rounds: int) -> Mapping[str, Cost]:
    """By operation. The default group must be one of ours, of this rank alone."""
    group = default_group()
    assert isinstance(group, CollectivesProcessGroup)
    comm, tensor, output = group.comm, torch.ones(16), torch.ones(16)
    distributed: Any = dist  # the type stubs leave out some public names
    reduce, gather, scatter = (
        dist.AllreduceOptions(),
        distributed.distributed_c10d.AllgatherOptions(),
        dist.ReduceScatterOptions(),
    )
    for options in (reduce, gather, scatter):
        options.asyncOp = False  # as torch.distributed has it for calls without async_op=True
    calls: Mapping[str, Sequence[Callable[[], object]]] = {
        "all_reduce": (
            lambda: comm.all_reduce(tensor),
            lambda: group.allreduce([tensor], reduce),
            lambda: dist.all_reduce(tensor),
        ),
        "all_reduce, async": (
            lambda: comm.all_reduce(tensor, async_op=True).wait(),
            lambda: group.allreduce([tensor]).wait(),
            lambda: distributed.all_reduce(tensor, async_op=True).wait(),
        ),
        "all_gather_single": (
            lambda: comm.all_gather(output, tensor),
            lambda: group.all_gather_single(output, tensor, gather),
            lambda: distributed.all_gather_single(output, tensor),
        ),
        "reduce_scatter_single": (
            lambda: comm.reduce_scatter(output, tensor),
            lambda: group.reduce_scatter_single(output, tensor, scatter),
            lambda: distributed.reduce_scatter_single(output, tensor),
        ),
    }
    return {name: _cost(bodies, repeats, rounds) for name, bodies in calls.items()}


def _cost(bodies: Sequence[Callable[[], object]], repeats: int, rounds: int) -> Cost:
    """Medians over rounds, in which the bodies take turns."""
    taken: list[list[float]] = [[] for _ in bodies]
    for _ in range(rounds):
        for body, times in zip(bodies, taken, strict=True):
            start = time.perf_counter()
            for _ in range(repeats):
                body()
            times.append((time.perf_counter() - start) / repeats * 1e6)
    return Cost(*map(statistics.median, taken))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m collectives.torch_backend.overhead", description=__doc__)
    parser.add_argument("--repeats", type=int, default=50, help="calls in a round (default 50)")
    parser.add_argument("--rounds", type=int, default=200, help="rounds, whose median counts (default 200)")
    options = parser.parse_args(arguments)
    begin("cgloo")
    sys.stdout.write("microseconds a call    communicator  process group  adapter adds  torch.distributed\n")
    for name, cost in costs(options.repeats, options.rounds).items():
        figures = f"{cost.communicator:>12.1f}{cost.group:>15.1f}{cost.adapter:>14.1f}{cost.torch:>19.1f}"
        sys.stdout.write(f"{name:<23}{figures}\n")
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
