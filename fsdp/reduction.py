"""A reduction of a group's gradients, from its start until they are in ``.grad``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from collectives import Communicator, Work
from fsdp.gradient_hooks import run_put_off
from fsdp.shard_gradient import ShardGradient


@dataclass(frozen=True)
class Target:
    """Where reduced gradients go.

    Args:
        parameters: the users' parameters, in the order of the layout.
        spans: lengths that split the reduced tensor into gradient, gap, gradient, gap, ...
        shapes: of the gradients.
        sharded_over: the ranks that hold the other parts; None where every rank holds all.
        home: where gradients are kept.
        views: whole gradients may be views of the reduced tensor, which is kept; otherwise copies.
    """

    parameters: Sequence[nn.Parameter]
    spans: list[int]
    shapes: Sequence[Sequence[int]]
    sharded_over: Communicator | None
    views: bool
    home: torch.device


@dataclass
class Reduction:
    """Averaged gradients on their way.

    Args:
        target: where they go.
        work: the collective.
        buffer: its input, lent until it is done; None where it works in place.
        output: 1-D, this rank's part of the average.
        used: for each parameter, whether this rank contributed a gradient. For others zeros were sent.
        scale: what the average is multiplied by.

    [Note: unused parameters]
    A parameter that no rank used must keep ``.grad`` None, as in one process: a zero would let momentum and weight
    decay move it. For a parameter that this rank used there is nothing to find out, so its gradient is handed out as
    soon as it lands; for the others ``finish`` waits for the flags that ranks exchange at the end of backward.
    """

    target: Target
    work: Work
    buffer: torch.Tensor | None
    output: torch.Tensor
    used: Sequence[bool]
    scale: float = 1.0

    @property
    def complete(self) -> bool:
        """Whether this rank used all parameters, so that ``land`` hands out everything."""
        return False not in self.used

    def land(self) -> None:
        """Wait, then hand out the gradients of the parameters that this rank used."""
        self.work.wait()
        if self.scale != 1.0:
            self.output.mul_(self.scale)
        if self.output.device != self.target.home:  # one copy of a shard, where it is kept elsewhere
            self.output = self.output.to(self.target.home)
        self._give(self.used)

    def finish(self, used_somewhere: Sequence[bool]) -> None:
        """Hand out the gradients of the parameters that only other ranks used."""
        self._give([there and not here for here, there in zip(self.used, used_somewhere, strict=True)])

    def _give(self, chosen: Sequence[bool]) -> None:
        target = self.target
        views = self.output.split_with_sizes(target.spans)[::2]
        for parameter, view, shape, give in zip(target.parameters, views, target.shapes, chosen, strict=True):
            if not give:
                continue
            gradient = view if len(shape) == 1 else view.view(shape)
            if gradient.dtype != parameter.dtype:
                gradient = gradient.to(parameter.dtype)  # it was reduced in another; the optimizer wants its own
            if target.sharded_over is None:
                if parameter.grad is not None:
                    parameter.grad.add_(gradient)
                else:
                    parameter.grad = gradient if target.views else gradient.clone()  # asked for: not a view
                if len(parameter._post_accumulate_grad_hooks or ()) > 1:
                    run_put_off(parameter)
            else:
                _accumulate(parameter, gradient, target.sharded_over)


def _accumulate(parameter: nn.Parameter, gradient: torch.Tensor, comm: Communicator) -> None:
    """What autograd's accumulation does for a leaf, for the gradient of a shard: hooks, sum, hooks."""
    if parameter._backward_hooks:
        gradient = _hooked(parameter._backward_hooks, gradient)
    if parameter.grad is None:
        parameter.grad = ShardGradient.of(gradient, comm)
    else:
        parameter.grad.as_subclass(torch.Tensor).add_(gradient)
    if parameter._post_accumulate_grad_hooks:
        for hook in tuple(parameter._post_accumulate_grad_hooks.values()):
            hook(parameter)


def _hooked(hooks: Mapping[int, Callable[[torch.Tensor], torch.Tensor | None]], gradient: torch.Tensor) -> torch.Tensor:
    for hook in tuple(hooks.values()):
        changed = hook(gradient)
        gradient = gradient if changed is None else changed
    return gradient
