"""Where the gathered parameters of a group are: in memory of this rank's own, or once on a host for all its ranks.

[Note: one copy a host]
Ranks of one host compute with the same values, so one buffer serves them all, if nobody writes while another reads.
What is gathered is mapped for reading only, so a forward that writes into a parameter ends there and then. A shard that
is its part of the buffer needs no gathering: an all_gather is a meeting, after which everybody sees what the optimizers
wrote. Shards may be edited between calls, because a backward, and a forward without gradients, return only when every
rank has read what it needs; between a forward and its backward nobody may edit them.

Where a shard cannot be its part of the buffer (parameters are gathered in another dtype, the job has several hosts, or
the caller says so), it is private and copied in whenever a forward gathers. Backward gathers what that forward wrote:
it only meets. Nothing is asked of tensors, as version counters do not see every write.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal

import torch

from collectives import Communicator, SharedBuffer

HostShared = bool | Literal["copy", "debug"]


class Unsharded(ABC):
    """The gathered buffer of a group: ``tensor``, 1-D, one storage for life. ``keeps_shard``: the shard is in it."""

    tensor: torch.Tensor
    keeps_shard = False

    @abstractmethod
    def open(self) -> None:
        """An all_gather into it comes."""

    @abstractmethod
    def contribution(self, shard: torch.Tensor, again: bool) -> torch.Tensor:
        """What this rank puts in. ``again``: the same as last time."""

    @abstractmethod
    def close(self) -> None:
        """This rank reads it no more."""

    def settle(self) -> None:
        """Return when no rank reads it any more."""
        return


class PrivateBuffer(Unsharded):
    """Memory of this rank, freed between uses. It starts out open."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self._storage = tensor.untyped_storage()
        self._nbytes = tensor.nbytes

    def open(self) -> None:
        self._storage.resize_(self._nbytes)

    def contribution(self, shard: torch.Tensor, again: bool) -> torch.Tensor:
        tensor = self.tensor
        if shard.dtype == tensor.dtype and shard.device == tensor.device:
            return shard  # sent as it is
        return shard.to(tensor.device, tensor.dtype)

    def close(self) -> None:
        self._storage.resize_(0)


class HostBuffer(Unsharded):
    """Memory of a host. See [Note: one copy a host].

    Args:
        buffer: of the layout's numel, in the dtype of computation.
        part: start and end of this rank's part.
        keeps_shard: that part is the shard.
        guards: a write to the shard while others may read it ends the process, and names the writer.
    """

    def __init__(
        self, comm: Communicator, buffer: SharedBuffer, part: tuple[int, int], keeps_shard: bool, guards: bool
    ) -> None:
        self.tensor = buffer.tensor
        self.keeps_shard = keeps_shard
        self._comm = comm
        self._buffer = buffer
        self._part = part
        self._mine = buffer.part(*part)
        self._guards = guards and keeps_shard

    def open(self) -> None:
        if not self._buffer.retired:
            self._buffer.retire()
        if self._guards:
            self._buffer.guard(*self._part, True)

    def contribution(self, shard: torch.Tensor, again: bool) -> torch.Tensor:
        if self.keeps_shard or again:
            return self._mine
        return shard.to(self.tensor.device, self.tensor.dtype)  # the gather itself writes it to its slot

    def close(self) -> None:
        self._buffer.retire()

    def settle(self) -> None:
        self._buffer.wait_retired(self._comm.timeout)
        if self._guards:
            self._buffer.guard(*self._part, False)


def unsharded(
    comm: Communicator,
    values: torch.Tensor,
    dtype: torch.dtype,
    part: tuple[int, int],
    home: torch.device,
    host_shared: HostShared,
) -> Unsharded:
    """A buffer for ``values`` in ``dtype``, of a group whose shards are on ``home``. Collective.

    Where it keeps the shard, that has its values already.
    """
    buffer = comm.allocate_shared(values.numel(), dtype) if host_shared else None
    if buffer is None:
        return PrivateBuffer(values if values.dtype == dtype else torch.empty_like(values, dtype=dtype))
    keeps_shard = buffer.one_host and dtype == values.dtype and home == comm.device and host_shared != "copy"
    shared = HostBuffer(comm, buffer, part, keeps_shard, guards=host_shared == "debug")
    if keeps_shard:  # the values move in once, and are the shard from now on
        buffer.part(*part).copy_(values[part[0] : part[1]])
    return shared
