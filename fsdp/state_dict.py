"""The whole state of a wrapped model under its original names."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from collectives.errors import UnsupportedError
from fsdp.param_group import ParamGroup
from fsdp.unit import Unit, find_unit


def full_state_dict(model: nn.Module, rank0_only: bool = True, cpu: bool = True) -> dict[str, torch.Tensor]:
    """What ``model.state_dict()`` would be on one process: whole tensors, original names, in the original order.

    Collective. One group of parameters is gathered at a time, so one unit is all the memory beside the result.

    Args:
        model: the wrapped model.
        rank0_only: only rank 0 of each communicator gets the tensors; the others get an empty dict.
        cpu: copy to host memory.

    Returns:
        A dict of tensors of the parameters' dtype and full shape, which share nothing with the model.
    """
    units = [unit for module in model.modules() if (unit := find_unit(module)) is not None]
    keeps = not rank0_only or all(unit.runtime.comm.rank == 0 for unit in units)
    runtimes = list(dict.fromkeys(unit.runtime for unit in units))
    for runtime in runtimes:
        runtime.exports_state = True
    try:
        entries = model.state_dict(keep_vars=True)
    finally:
        for runtime in runtimes:
            runtime.exports_state = False
    whole: dict[int, torch.Tensor] = {}
    for unit in units:
        for group in unit.own_groups:
            if group.strategy.shards:
                whole.update(_copies(group, keeps, cpu))
    if not keeps:
        return {}
    copies: dict[int, Any] = {}
    for value in entries.values():
        if not isinstance(value, torch.Tensor):  # what a module's get_extra_state gave
            copies[id(value)] = value
        elif id(value) not in copies:
            copies[id(value)] = (
                whole[id(value)] if id(value) in whole else value.detach().to("cpu" if cpu else value.device, copy=True)
            )
    return {name: copies[id(value)] for name, value in entries.items()}


def _copies(group: ParamGroup, keeps: bool, cpu: bool) -> dict[int, torch.Tensor]:
    """Whole values by their parameters' ids, if this rank ``keeps`` them. What was gathered is freed on return."""
    values = group.gather_values()
    return {id(p): value.to("cpu", copy=True) if cpu else value.clone() for p, value in values if keeps}


def refuse_plain_state_dict(unit: Unit, module: nn.Module) -> None:
    """Make ``state_dict()`` of ``module``, and of what it holds, raise: it would be the state of one rank's shards."""

    def refuse(_: nn.Module, prefix: str, keep_vars: bool) -> None:
        if not unit.runtime.exports_state:
            raise UnsupportedError(
                "state_dict() of a sharded module would hold this rank's shards under the names of whole parameters; "
                "expected fsdp.full_state_dict(model), called on every rank"
            )

    holders: dict[nn.Module, Any] = {module: None}
    holders.update((owner, None) for group in unit.groups for m in group.managed for owner, _ in m.owners)
    for holder in holders:
        holder.register_state_dict_pre_hook(refuse)  # type: ignore[no-untyped-call]
