"""The state of a ``torch.optim`` optimizer by the names of parameters, and back.

What has a parameter's shape (moments, momentum) lies as the parameter does, and is cut and joined with it. The rest
(``step``, None, what an optimizer keeps beside) belongs to the parameter as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fsdp.checkpoint.errors import CheckpointError
from fsdp.checkpoint.holdings import Holding, Holdings
from fsdp.checkpoint.values import encode

STEP = "step"  # has no dimensions, as some parameters; never one of their elements


class NamedState:
    """An optimizer's state on this rank.

    ``alike``: by key and parameter's name, tensors that lie as the parameter does. ``beside``: by name and key, the
    rest. ``groups``: options, and the names under "params".
    """

    def __init__(self, optimizer: torch.optim.Optimizer, holdings: Holdings) -> None:
        state = optimizer.state_dict()
        names = parameter_names(optimizer, holdings)
        self.alike: dict[str, dict[str, torch.Tensor]] = {}
        self.beside: dict[str, dict[str, Any]] = {}
        self.groups: list[dict[str, Any]] = []
        for index, values in state["state"].items():
            holding = holdings.tensors[names[index]]
            beside = self.beside.setdefault(holding.name, {})
            for key, value in values.items():
                if key != STEP and isinstance(value, torch.Tensor) and value.shape == holding.tensor.shape:
                    self.alike.setdefault(key, {})[holding.name] = value
                else:
                    _check_whole(holding, key, value)
                    beside[key] = value
        for group in state["param_groups"]:
            options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
            self.groups.append({**options, "params": [names[index] for index in group["params"]]})

    def encoded(self, aside: dict[str, torch.Tensor]) -> dict[str, Any]:
        """What goes to the manifest."""
        groups = []
        for i, group in enumerate(self.groups):
            options = {key: value for key, value in group.items() if key != "params"}
            where = f"optimizer.param_groups.{i}"
            groups.append({"options": encode(options, where, aside), "params": group["params"]})
        state = {
            name: encode(values, f"optimizer.state.{name}", aside) for name, values in self.beside.items()
        }  # a name without any is listed too: it has been stepped
        return {"groups": groups, "state": state}


def _check_whole(holding: Holding, key: str, value: Any) -> None:
    if holding.cut and isinstance(value, torch.Tensor) and value.numel() > 1:
        raise CheckpointError(
            f"optimizer state {key!r} of {holding.name!r}: expected its shape {tuple(holding.tensor.shape)} or "
            f"one element, found {tuple(value.shape)}, which cannot be joined from shards; use stage 0"
        )


def parameter_names(optimizer: torch.optim.Optimizer, holdings: Holdings) -> dict[int, str]:
    """The name of each parameter, by its number in the optimizer's ``state_dict()``."""
    names: dict[int, str] = {}
    for i, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            name = holdings.names.get(id(parameter))
            if name is None:
                raise CheckpointError(
                    f"optimizer: expected parameters of the model, found another of shape {tuple(parameter.shape)} in "
                    f"group {i}; save one model that holds all of them"
                )
            names[len(names)] = name
    return names


def install(
    optimizer: torch.optim.Optimizer,
    holdings: Holdings,
    alike: Mapping[str, Mapping[str, torch.Tensor]],
    beside: Mapping[str, Mapping[str, Any]],
    groups: Sequence[Mapping[str, Any]],
    find: Callable[[str], str | None],
) -> None:
    """Put state into ``optimizer``: by its own ``load_state_dict``, so dtypes and devices are as torch has them.

    Parameters that the state does not know start fresh, and a group takes the options that its first known parameter
    was saved with.

    Args:
        alike, beside, groups: as in ``NamedState``. Tensors are the optimizer's afterwards.
        find: the name that the state has for a parameter of the model, or None.
    """
    names = parameter_names(optimizer, holdings)
    own = optimizer.state_dict()["param_groups"]
    options_of = {name: group for group in groups for name in group["params"]}
    state: dict[int, dict[str, Any]] = {}
    for index, name in names.items():
        known = find(name)
        if known is None:
            continue
        values: dict[str, Any] = dict(beside.get(known, {}))
        values.update({key: tensors[known] for key, tensors in alike.items() if known in tensors})
        if values or known in beside:
            state[index] = values
    packed = []
    for group in own:
        saved = next((options_of[n] for i in group["params"] if (n := find(names[i])) in options_of), {})
        packed.append({**group, **{key: value for key, value in saved.items() if key != "params"}})
    optimizer.load_state_dict({"state": state, "param_groups": packed})
