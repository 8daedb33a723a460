"""When units are gathered and freed: the order of everything that the ranks of one model do together.

[Note: recomputation]
Activation checkpointing runs forwards again inside backward. They only make sure that the parameters are there: they do
not count as a forward, and free nothing, as the unit's own backward comes next.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn

from collectives import Communicator
from collectives.errors import UnsupportedError
from fsdp.param_group import ParamGroup
from fsdp.post_forward import PostForwardShard
from fsdp.prefetch import Prefetch
from fsdp.reducer import Reducer
from fsdp.strategy import Trigger
from fsdp.subset import subset
from fsdp.sync import broadcast_tensors
from fsdp.together import Together
from fsdp.use import Progress, Use

if TYPE_CHECKING:
    from fsdp.unit import Unit


class Phase(enum.Enum):
    """Where the model is."""

    IDLE = "callers may edit parameters"  # -> FORWARD by the outermost unit; -> BACKWARD by the first gradient
    FORWARD = "inside the outermost unit"  # -> IDLE when it returns
    BACKWARD = "gradients come"  # -> IDLE at the end of backward; -> FORWARD if it failed and the next step begins


def _tied_outside(unit: Unit) -> str:
    _, module, name = unit.unresolved[0]
    return (
        f"{type(module).__name__}.{name} is tied to a parameter that a unit outside of {type(unit.module).__name__} "
        "manages; expected fully_shard of the module that holds both, last, before the first forward"
    )


class Runtime:
    """What the units of one model share. Wrapping an outer module moves the units inside it into its runtime.

    Args:
        comm: the ranks.
        static_graph: see ``Reducer``.
    """

    def __init__(self, comm: Communicator, *, static_graph: bool = False) -> None:
        self.comm = comm
        self.reducer = Reducer(comm, static_graph)
        self.phase = Phase.IDLE
        self.units: list[Unit] = []  # inner before outer
        self.groups: list[ParamGroup] = []  # in the order in which forward gathers them
        self.buffer_owners: list[tuple[nn.Module, str]] = []
        self.on_root_forward: Callable[[], None] | None = None  # called before each, by synced_forwards
        self.exports_state = False  # True while full_state_dict reads the shards
        self._epoch = 0  # root forwards so far
        self._depth = 0
        self.prefetch = Prefetch()
        self.broadcasts_buffers = True  # at training forwards
        self._together: list[Together] = []
        self._unsplit: list[PostForwardShard] = []
        self._begun: list[Use] = []

    def add(self, unit: Unit) -> None:
        """Take in a unit. It is the root until another one is added."""
        self.units.append(unit)
        self._arrange()

    def absorb(self, other: Runtime) -> None:
        """Take over the units of the runtime of an inner module."""
        if other.comm is not self.comm:
            raise ValueError("expected one communicator for all units of a model, found two")
        self.units += other.units
        self._arrange()

    def _arrange(self) -> None:
        """Fix the orders of gathers and reductions. The root's parameters are used first and often last too."""
        *inner, root = self.units
        self.groups = [group for unit in (root, *inner) for group in unit.own_groups]
        self.prefetch.groups = self.groups
        for unit in self.units:
            unit.runtime = self
        for group in self.groups:
            group.gradients.on_backward = self.begin_backward
        backward = [group for unit in (*reversed(inner), root) for group in reversed(unit.own_groups)]
        self.reducer.manage(backward)
        self.buffer_owners = [owner for unit in self.units for owner in unit.buffer_owners]
        self._together = list(dict.fromkeys(unit.together for unit in self.units if unit.together is not None))
        self._unsplit = [g.post_forward for g in self.groups if g.post_forward is not None]

    def reduce_over(self, comm: Communicator) -> None:
        """Use ``comm``, which has the same ranks, for reductions from now on."""
        for group in self.groups:
            group.gradients.comm = comm

    @property
    def next_epoch(self) -> int:
        """The root forward that gathers of now are for."""
        return self._epoch if self._depth else self._epoch + 1

    @property
    def root(self) -> Unit:
        """The unit that was wrapped last, and holds all others."""
        return self.units[-1]

    # Forward

    def begin_forward(self, unit: Unit) -> None:
        """A forward of ``unit`` starts, outside of backward."""
        self._depth += 1
        if self._depth > 1:
            return
        if self.phase is Phase.BACKWARD:
            self._recover()
        for other in self.units:
            if other.unresolved:
                self._depth -= 1
                raise UnsupportedError(_tied_outside(other))
        if self._unsplit:
            self._split()
        if self.on_root_forward is not None:
            self.on_root_forward()
        self.phase = Phase.FORWARD
        self._start_forward()
        syncs = self.broadcasts_buffers and self.reducer.requires_sync
        if syncs and unit.module.training and torch.is_grad_enabled():
            self._broadcast_buffers()

    def _split(self) -> None:
        """Have the smaller communicators of units that lie on fewer ranks between forward and backward."""
        for shard in self._unsplit:
            shard.comm = subset(self.comm, shard.size, "parameters")
        self._unsplit = []

    def _start_forward(self) -> None:
        self._epoch += 1
        self.prefetch.start_forward()
        for group in self.groups:
            if not group.strategy.shards:
                group.check_parameters()
            elif not group.strategy.frees_after_forward:
                group.unshard(self._epoch)

    def replay_forward(self) -> None:
        """Take part in the gathers of a forward of other ranks that is like this rank's last one; compute nothing."""
        order = self.prefetch.order
        if not order:
            raise RuntimeError(f"rank {self.comm.rank} has run no forward that it could repeat for other ranks")
        self._start_forward()
        inside: list[Unit] = []
        for unit in order:
            while inside and unit.module not in set(inside[-1].module.modules()):
                self._pass(inside.pop())
            self.gather(unit)
            inside.append(unit)
            if unit.together is not None:
                unit.together.begin()
            for group in unit.groups:
                group.users += 1
        while inside:
            self._pass(inside.pop())
        self._depth = 1
        self.end_forward(differentiable=False)

    def _pass(self, unit: Unit) -> None:
        """What the end of a forward of ``unit`` frees."""
        last = unit.together is None or unit.together.end(unit)
        for group in unit.groups:
            group.users -= 1
            if not group.users and last and unit.frees(group):
                group.reshard()

    def cancel_forward(self) -> None:
        """The forward that began last could not be started."""
        self._depth -= 1

    def _broadcast_buffers(self) -> None:
        """Rank 0's buffers to everybody. Looked up every time, as a forward may put a new tensor in place of one."""
        buffers = [module._buffers.get(name) for module, name in self.buffer_owners]
        broadcast_tensors(self.comm, [buffer for buffer in buffers if buffer is not None])

    def gather(self, unit: Unit) -> Use:
        """Have the parameters of ``unit``, and start to gather those of the unit that came next last time."""
        for group in unit.groups:
            group.unshard(self._epoch)
        for group in unit.groups:
            group.wait_for_unshard()
        self.prefetch.came(unit)
        use = Use(unit, self.prefetch.run(unit))
        self.prefetch.in_forward(unit, self._epoch)
        self.poll()
        return use

    def gather_again(self, unit: Unit) -> Use:
        """The same inside of backward. See [Note: recomputation]."""
        for group in unit.groups:
            group.unshard()
        for group in unit.groups:
            group.wait_for_unshard()
        self.prefetch.came(unit)
        return Use(unit, None)

    def end_forward(self, differentiable: bool) -> None:
        """A forward ends, outside of backward. Without anything to differentiate nothing stays gathered."""
        self._depth -= 1
        if self._depth:
            return
        self.phase = Phase.IDLE
        self.prefetch.free()
        for together in self._together:
            if together.give_up() and together.units[-1].frees_after_forward:
                for group in together.units[-1].own_groups:
                    group.reshard(after_forward=differentiable)
        if not differentiable:
            for group in self.groups:
                group.reshard()
            self._settle()

    def _settle(self) -> None:
        """Return when shards may be edited. See [Note: one copy a host] in unsharded.py."""
        for group in self.groups:
            group.settle()

    # Backward

    def begin_backward(self) -> None:
        """The first gradient of a backward is there. Later calls do nothing."""
        if self.phase is Phase.BACKWARD:
            return
        self.phase = Phase.BACKWARD
        self.reducer.begin()
        torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def before_backward(self, use: Use) -> None:
        """The gradient of an output of ``use.unit`` is there: have its parameters, and fetch those of the next unit."""
        self.begin_backward()
        if use.progress is Progress.BEGUN:
            return
        use.progress = Progress.BEGUN
        self._begun.append(use)
        for group in use.groups:
            group.touched = True
            if use.unit.gathers_for_backward:
                group.unshard()
        for group in use.groups:
            group.wait_for_unshard()
            group.enter()
        self.prefetch.came(use.unit)
        self.prefetch.in_backward(use)
        self.poll()

    def after_backward(self, use: Use) -> None:
        """Backward has passed the inputs of ``use.unit``: reduce and free, unless another use of it is to come."""
        if use.progress is Progress.DONE:
            return
        self.begin_backward()
        if use.progress is Progress.BEGUN:
            self._begun.remove(use)
            for group in use.groups:
                group.leave()
        use.progress = Progress.DONE
        for group in use.groups:
            if group.strategy.trigger is Trigger.INPUTS:
                open_uses = group.open_uses()
                if not open_uses and self.reducer.reduces(group):
                    self.reducer.start(group)
                waiting = group.spans_modules or any(other.progress is Progress.BEGUN for other in open_uses)
                if group.frees_after_backward and not (open_uses and waiting):
                    group.reshard()
        self.poll()

    def _end_backward(self) -> None:
        """Autograd is done: reduce what is left, wait for everything, and leave the model at rest."""
        self._leave_units()
        self.reducer.end()
        self._rest(keep=not self.reducer.requires_sync)
        self._settle()
        self.phase = Phase.IDLE

    def _leave_units(self) -> None:
        for use in self._begun:
            use.progress = Progress.DONE
            for group in use.groups:
                group.leave()
        self._begun.clear()

    def _rest(self, keep: bool) -> None:
        """Free what is gathered. ``keep``: what is gathered once a step stays for the next micro-step."""
        self.prefetch.forget()
        for group in self.groups:
            if keep and (group.strategy.trigger is not Trigger.INPUTS or not group.frees_after_backward):
                group.retain()
            else:
                group.reshard()

    def reset(self) -> None:
        """Drop a forward and backward that were left half-way, and be at rest."""
        self._recover()
        self._depth = 0
        for unit in self.units:
            unit.reset()
        for group in self.groups:
            group.reset()
        self._settle()

    def _recover(self) -> None:
        """The last backward ended in an exception, before the end of backward: drop what it left."""
        self._leave_units()
        self.reducer.abandon()
        self._rest(keep=False)
        self.phase = Phase.IDLE

    def poll(self) -> None:
        """Some transports only move when they are asked: called at every border of a unit."""
        self.prefetch.poll()
        self.reducer.poll()
