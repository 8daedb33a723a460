"""Hooks that autograd calls when it has accumulated into a replicated parameter: ours, and those of users.

A user's hook, such as one that steps an optimizer, expects the gradient that the optimizer shall see, and autograd
calls it with this rank's own. So it is put off until the average is there. It stays in its place in the parameter's
dict, so the handle that the user holds still removes it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from fsdp.gradients import Gradients


class Arrival:
    """Tells a group that the gradient of one of its parameters is there. Does not keep the group alive."""

    def __init__(self, gradients: Gradients, i: int) -> None:
        self._gradients = weakref.ref(gradients)
        self._i = i

    def __call__(self, _: torch.Tensor) -> None:
        gradients = self._gradients()
        if gradients is not None:
            gradients.arrived(self._i)

    @property
    def gradients(self) -> Gradients | None:
        """The gradients of the group; None if it is gone."""
        return self._gradients()


class _PutOff:
    """A user's hook, which autograd calls in vain."""

    def __init__(self, hook: Callable[[torch.Tensor], None]) -> None:
        self.hook = hook

    def __call__(self, _: torch.Tensor) -> None:
        return


def put_off(parameter: nn.Parameter) -> None:
    """Have users' hooks wait for ``run_put_off``."""
    hooks = parameter._post_accumulate_grad_hooks
    for key, hook in hooks.items():
        if not isinstance(hook, (Arrival, _PutOff)):
            hooks[key] = _PutOff(hook)


def run_put_off(parameter: nn.Parameter) -> None:
    """The average is in ``parameter.grad``: call the users' hooks."""
    for hook in tuple(parameter._post_accumulate_grad_hooks.values()):
        if isinstance(hook, _PutOff):
            hook.hook(parameter)


def replicated_in(parameter: nn.Parameter) -> Gradients | None:
    """The gradients of the living group that averages a parameter which every rank holds whole, or None."""
    for hook in (parameter._post_accumulate_grad_hooks or {}).values():
        if isinstance(hook, Arrival) and hook.gradients is not None:
            return hook.gradients
    return None
