"""Where a contender's tensors lie: a rank's own memory, or memory that a communicator gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

import torch

from collectives.communicator import Communicator
from collectives.errors import UnsupportedError
from collectives.types import SharedBuffer


@dataclass(frozen=True)
class Sample:
    """The tensors of one sample, n elements each: ``a[i]`` and ``b[i]`` are those of its i-th call.

    ``shared[i]``: the buffer that ``a[i]`` shows, where a host has it once. Nobody then writes to it but the call.
    """

    a: Sequence[torch.Tensor]
    b: Sequence[torch.Tensor]
    shared: Sequence[SharedBuffer] = ()


Memory: TypeAlias = Callable[[int, int, torch.dtype], Sample]  # of n, calls, dtype


def private(numel: int, calls: int, dtype: torch.dtype) -> Sample:
    """Tensors of the rank's own, as programs have them."""
    return Sample(*(list(torch.empty(calls, numel, dtype=dtype)) for _ in range(2)))


def symmetric(comm: Communicator, numel: int, calls: int, dtype: torch.dtype) -> Sample:
    """Tensors from ``allocate``, which peers reach. Collective."""
    return Sample(*(list(comm.allocate(calls * numel, dtype).view(calls, numel)) for _ in range(2)))


def shared(comm: Communicator, numel: int, calls: int, dtype: torch.dtype) -> Sample:
    """Results that a host has once, from ``allocate_shared``. Collective.

    Raises:
        UnsupportedError: these ranks share no memory, or messages are so small that samples have several calls, each of
            which would need a mapping of its own.
    """
    if calls > 1:
        raise UnsupportedError("a buffer that is shared is for longer messages")
    buffers = [buffer for _ in range(calls) if (buffer := comm.allocate_shared(numel, dtype)) is not None]
    if len(buffers) < calls:
        raise UnsupportedError(f"{comm.backend} shares no memory here")
    return Sample([buffer.tensor for buffer in buffers], private(numel, calls, dtype).b, buffers)


def shards(comm: Communicator, numel: int, calls: int, dtype: torch.dtype) -> Sample:
    """As ``shared``, each rank's input being its part of the result already, as shards of parameters are."""
    sample = shared(comm, numel, calls, dtype)
    start, end = comm.rank * numel // comm.world_size, (comm.rank + 1) * numel // comm.world_size
    return Sample(sample.a, [buffer.part(start, end) for buffer in sample.shared], sample.shared)


class Kind(NamedTuple):
    """Memory that a communicator gives, and the operations that can use it; None: all."""

    sample: Callable[..., Sample]
    operations: frozenset[str] | None


KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        "symmetric": Kind(symmetric, None),
        "shared": Kind(shared, frozenset({"all_gather"})),
        "shards": Kind(shards, frozenset({"all_gather"})),
    }
)
