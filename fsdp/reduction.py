"""A reduction of a group's gradients, from its start until they are in ``.grad``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from collectives import Work
from fsdp.shard_gradient import ShardGradient

if TYPE_CHECKING:
    from fsdp.param_group import ParamGroup


@dataclass
class Reduction:
    """Averaged gradients on their way.

    Args:
        group: whose gradients they are.
        work: the collective.
        buffer: its input, which lives as long as it runs.
        output: 1-D, this rank's part of the average (replicated: all of it).
        parameters: the users' parameters that receive it, in the order of the layout.
        used: for each, whether this rank contributed a gradient. Others had zeros sent for them.
    """

    group: ParamGroup
    work: Work
    buffer: torch.Tensor | None
    output: torch.Tensor
    parameters: Sequence[nn.Parameter]
    used: Sequence[bool]
    landed: bool = False

    def land(self) -> None:
        """Wait, then give every parameter that this rank used its gradient. Others wait for ``finish``.

        [Note: unused parameters] A parameter that no rank used must keep ``.grad`` None, as in one process: a zero
        would let momentum and weight decay move it. A rank that did not use one learns from the flags that all ranks
        exchange at the end of backward; for a rank that did, there is nothing to learn.
        """
        if self.landed:
            return
        self.landed = True
        self.work.wait()
        self.buffer = None
        if self.output.dtype != self.group.dtype:
            self.output = self.output.to(self.group.dtype)
        self._give(self.used)

    def finish(self, used_somewhere: Sequence[bool]) -> None:
        """Give the parameters that only other ranks used their gradients."""
        if not all(self.used):
            self._give([there and not here for here, there in zip(self.used, used_somewhere, strict=True)])

    def _give(self, chosen: Sequence[bool]) -> None:
        group = self.group
        views = torch.split(self.output, group.grad_spans)[::2]
        for parameter, view, shape, give in zip(self.parameters, views, group.grad_shapes, chosen, strict=True):
            if not give:
                continue
            gradient = view.view(shape)
            if not group.strategy.shards:
                if parameter.grad is not None:
                    parameter.grad.add_(gradient)
                else:
                    parameter.grad = gradient if group.grad_views else gradient.clone()
                continue
            if parameter._backward_hooks:
                gradient = _hooked(parameter._backward_hooks, gradient)
            if parameter.grad is None:
                parameter.grad = ShardGradient.of(gradient, group.comm)
            else:
                parameter.grad.as_subclass(torch.Tensor).add_(gradient)
            if parameter._post_accumulate_grad_hooks:
                for hook in tuple(parameter._post_accumulate_grad_hooks.values()):
                    hook(parameter)


def _hooked(hooks: Mapping[int, Callable[[torch.Tensor], torch.Tensor | None]], gradient: torch.Tensor) -> torch.Tensor:
    """What users' gradient hooks on a sharded parameter make of the gradient of the shard."""
    for hook in tuple(hooks.values()):
        changed = hook(gradient)
        gradient = gradient if changed is None else changed
    return gradient
