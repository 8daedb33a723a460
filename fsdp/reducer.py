"""Reductions in order: which group starts when, where its input buffer comes from, and how backward ends.

[Note: reduction triggers]
All ranks must start the same reductions in the same order, whatever their data made them use. Counting gradients does
not give that: a parameter that one rank leaves unused would hold back its group there and nowhere else, and under
reentrant checkpointing the count is reached too early. So a sharded unit reduces when backward passes its inputs, which
happens at the same place on all ranks (they gathered the unit together just before). Groups that lie gathered anyway
may count, since they start strictly in one fixed order, and what is left starts at the end of backward.

Missing gradients travel as zeros. Gradients that arrive after their group has started are reduced in a second round,
which the flags that ranks exchange at the end of backward make everybody join.
"""

from __future__ import annotations

import time
from collections import deque

import torch

from collectives import Communicator, ReduceOp
from fsdp.param_group import ParamGroup
from fsdp.reduction import Reduction
from fsdp.strategy import Trigger

_USED, _LATE = 1, 2  # flags of a parameter; of several, the larger wins


class Reducer:
    """The reductions of one model.

    Args:
        comm: where flags are exchanged.
        static_graph: every backward uses the parameters that the first one used, so flags are exchanged once.
    """

    def __init__(self, comm: Communicator, static_graph: bool) -> None:
        self.comm = comm
        self.static_graph = static_graph
        self.requires_sync = True  # False under no_sync
        self._groups: list[ParamGroup] = []
        self._order: list[ParamGroup] = []  # those of Trigger.ORDER, as they start
        self._next = 0
        self._running: deque[tuple[ParamGroup, Reduction]] = deque()
        self._landed: list[tuple[ParamGroup, Reduction]] = []
        self._free: list[torch.Tensor] = []
        self._known_flags: bytearray | None = None

    def manage(self, groups: list[ParamGroup]) -> None:
        """Set the groups, in the order in which backward is expected to be done with them."""
        self._groups = groups
        self._order = [group for group in groups if group.strategy.trigger is Trigger.ORDER]
        self._flags = 0
        for group in groups:
            group.flag_offset = self._flags
            group.gradients.on_ready = self.group_ready
            self._flags += len(group.managed)

    def reduces(self, group: ParamGroup) -> bool:
        """Whether this backward reduces ``group``."""
        return bool(group.gradients.indices) and (self.requires_sync or not group.strategy.keeps_full_gradients)

    def begin(self) -> None:
        """A backward begins."""
        self._next = 0
        for group in self._order:
            group.gradients.begin_backward()

    def group_ready(self) -> None:
        """A group has all its gradients: start the reductions whose turn it is."""
        while self._next < len(self._order):
            group = self._order[self._next]
            if not self.reduces(group) or not group.gradients.ready:
                break
            self.start(group)
            self._next += 1
        self.poll()

    def start(self, group: ParamGroup) -> None:
        """Start to reduce ``group``, after as many earlier reductions have landed as its strategy has buffers for."""
        while len(self._running) >= group.reduce_buffers:
            self._land_first()
        first = group not in [other for other, _ in self._running]
        group.touched = False
        group.statistics.reductions += 1
        group.statistics.reduced_nbytes += group.gradients.layout.numel * group.gradients.dtype.itemsize
        reduction = group.gradients.start_reduction(self._buffer, first)
        if group.divide_factor is not None:
            reduction.scale = self.comm.world_size / group.divide_factor
        self._running.append((group, reduction))

    def poll(self) -> None:
        """Some transports only move when they are asked."""
        if self._running:
            self._running[-1][1].work.is_completed()

    def _land_first(self) -> None:
        group, reduction = self._running.popleft()
        started = time.perf_counter()
        reduction.work.wait()
        group.statistics.reduction_wait += time.perf_counter() - started
        reduction.land()
        self._landed.append((group, reduction))
        buffer, reduction.buffer = reduction.buffer, None
        if buffer is not None:
            self._free.append(buffer)

    def _buffer(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A free input buffer; as large as the largest group needs, so that every group can use it."""
        for i, buffer in enumerate(self._free):
            if buffer.dtype == dtype and buffer.numel() >= numel:
                return self._free.pop(i)
        largest = max(
            g.gradients.layout.numel for g in self._groups if g.gradients.dtype == dtype and g.strategy.shards
        )
        return self.comm.allocate(largest, dtype)

    def end(self) -> None:
        """Autograd is done: reduce what is left, wait, and hand out all gradients."""
        for group in self._order[self._next :]:
            if self.reduces(group):
                self.start(group)
        self._next = len(self._order)
        for group in self._groups:
            if group.strategy.trigger is not Trigger.ORDER and group.touched and self.reduces(group):
                self.start(group)
        if any(self.reduces(group) for group in self._groups):
            flags = self._exchange_flags()
            while self._running:
                self._land_first()
            for group, reduction in self._landed:
                if not reduction.complete:
                    reduction.finish([flags[group.flag_offset + i] > 0 for i in group.gradients.indices])
        self.clear()

    def _exchange_flags(self) -> bytearray:
        """Which parameters some rank used. Starts the second round for gradients that came late somewhere."""
        if self.static_graph and self._known_flags is not None:
            return self._known_flags
        flags = bytearray(max(self._flags, 1))
        for group, reduction in (*self._landed, *self._running):
            for i, used in zip(group.gradients.indices, reduction.used, strict=True):
                flags[group.flag_offset + i] |= used
        for group in self._groups:
            if self.reduces(group):
                for i in group.gradients.late():
                    flags[group.flag_offset + i] = _LATE
        if self.comm.world_size > 1:
            self._all_reduce(flags)
        if _LATE in flags:
            for group in self._groups:
                if any(flags[group.flag_offset + i] == _LATE for i in group.gradients.indices):
                    self.start(group)
        if self.static_graph:
            self._known_flags = bytearray(min(flag, _USED) for flag in flags)
        return flags

    def _all_reduce(self, flags: bytearray) -> None:
        shared = torch.frombuffer(flags, dtype=torch.uint8)
        if self.comm.device.type == "cpu":
            self.comm.all_reduce(shared, ReduceOp.MAX)
        else:
            moved = shared.to(self.comm.device)
            self.comm.all_reduce(moved, ReduceOp.MAX)
            shared.copy_(moved)

    def abandon(self) -> None:
        """A backward failed: wait for what is under way, and drop all gradients of it."""
        for _, reduction in self._running:
            reduction.work.wait()
        self.clear()
        for group in self._groups:
            group.gradients.drop()

    def clear(self) -> None:
        """Release buffers and forget this backward."""
        self._running.clear()
        self._landed.clear()
        self._free.clear()
        for group in self._groups:
            group.touched = False
        for group in self._order:
            group.gradients.end_backward()
