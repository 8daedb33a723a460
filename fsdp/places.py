"""Where modules hold the parameters of a group: the users' own at rest, other tensors while the unit computes.

Assigning ``module._parameters[name]`` keeps the order of parameters; deleting would not.

[Note: modules at rest]
Between forwards the modules of a unit hold shards. One rank may happen to hold a whole small parameter, compute with it
and go on, while another computes with an empty one. So while a unit is at rest, the modules inside of it have a
``forward`` that says so; the unit's own forward is behind hooks and needs none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

import torch
from torch import nn

from collectives.errors import UnsupportedError


@dataclass
class ManagedParameter:
    """A parameter, the name that messages use, and every (module, attribute) that holds it: several if it is tied."""

    name: str
    parameter: nn.Parameter
    owners: list[tuple[nn.Module, str]] = field(default_factory=list)


class _Place(NamedTuple):
    """Where a module holds parameter number ``i`` of a group, or its full leaf."""

    parameters: dict[str, nn.Parameter | None]
    name: str
    parameter: nn.Parameter
    leaf: nn.Parameter
    i: int


class Places:
    """Every attribute of a module that holds a parameter of a group.

    Args:
        managed: the parameters.
        leaves: the tensors of full shape that autograd differentiates, one a parameter; replicated parameters are their
            own.
        guards: modules inside of the unit refuse to run at rest. See [Note: modules at rest].
    """

    def __init__(self, managed: Sequence[ManagedParameter], leaves: Sequence[nn.Parameter], guards: bool) -> None:
        self._managed = managed
        self._leaves = leaves
        self._guards = guards
        self._places: list[_Place] = []
        self._refusals: list[tuple[dict[str, Any], Callable[..., NoReturn], Any]] = []
        self._inner: dict[nn.Module, Any] = {}  # modules inside of the unit, and their own ``forward`` if they have one

    def find(self) -> None:
        """Look the places up, again if there are more. From now on modules are guarded.

        A module whose parameters are of several groups is guarded by the first: its unit enters and leaves all.
        """
        self._places = [
            _Place(module._parameters, name, managed.parameter, self._leaves[i], i)
            for i, managed in enumerate(self._managed)
            for module, name in managed.owners
        ]
        if not self._guards:
            return
        for managed in self._managed:
            for module, name in managed.owners:
                own = module.__dict__.get("forward")
                if "_fsdp_unit" not in module.__dict__ and not hasattr(own, "__fsdp_guard__"):
                    self._inner[module] = own
                    module.__dict__["forward"] = _refusal(f"{type(module).__name__}.{name} ({managed.name!r})")
        self._refusals = [(module.__dict__, module.__dict__["forward"], own) for module, own in self._inner.items()]

    def hold(self, tensors: Sequence[torch.Tensor]) -> None:
        """Have the modules hold these, one a parameter, and run."""
        for parameters, name, _, _, i in self._places:
            parameters[name] = tensors[i]  # type: ignore[assignment]
        self.allow_forward(True)

    def rest(self) -> None:
        """Have the modules hold the users' parameters, and refuse to run."""
        for parameters, name, parameter, _, _ in self._places:
            parameters[name] = parameter
        self.allow_forward(False)

    def allow_forward(self, allow: bool) -> None:
        """Whether guarded modules may run."""
        for attributes, refusal, own in self._refusals:
            if not allow:
                attributes["forward"] = refusal
            elif own is None:
                attributes.pop("forward", None)
            else:
                attributes["forward"] = own

    def mend(self, take: Callable[[int, nn.Parameter | None], None]) -> None:
        """Put the users' parameters back where a module holds something else.

        Args:
            take: is given the number of the parameter and what was in its place; it raises if that is not to be had.
        """
        for parameters, name, parameter, leaf, i in self._places:
            held = parameters.get(name)
            if held is not parameter and held is not leaf:
                take(i, held)
                parameters[name] = parameter


def replaced(rank: int, managed: ManagedParameter, expected: torch.Tensor, held: torch.Tensor | None) -> ValueError:
    """The error for a parameter in whose place ``held`` was put."""
    found = "nothing" if held is None else f"another tensor of {tuple(held.shape)}, {held.dtype}"
    return ValueError(
        f"rank {rank}: parameter {managed.name!r} was replaced after wrapping: expected the one that was wrapped, "
        f"{tuple(expected.shape)} of {expected.dtype}, found {found}. Change values in place under torch.no_grad(), or "
        "change the module before wrapping it"
    )


def _refusal(what: str) -> Callable[..., NoReturn]:
    def forward(*args: Any, **kwargs: Any) -> NoReturn:
        raise UnsupportedError(
            f"{what} is sharded: its unit is at rest. Expected a call of the unit itself, of a method registered by "
            "fsdp.register_fsdp_forward_method, or fsdp.summon_full_params around this one"
        )

    forward.__fsdp_guard__ = True  # type: ignore[attr-defined]
    return forward
