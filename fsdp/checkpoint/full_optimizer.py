"""Optimizer state as one process has it: a plain ``torch.optim`` state dict, of whole tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from fsdp.checkpoint.errors import CheckpointError
from fsdp.checkpoint.holdings import Holding, Holdings
from fsdp.checkpoint.optimizer_state import STEP, NamedState, install, parameter_names
from fsdp.checkpoint.ranks import Ranks


def full_optimizer_state_dict(
    model: nn.Module, optimizer: torch.optim.Optimizer, rank0_only: bool = True
) -> dict[str, Any]:
    """What ``optimizer.state_dict()`` would be on one process. Collective. One tensor at a time is joined.

    Args:
        model: which holds the parameters of ``optimizer``.
        rank0_only: the other ranks get an empty dict.

    Returns:
        ``{"state": {number: {key: value}}, "param_groups": [...]}``, with tensors in host memory that share nothing.
    """
    holdings = Holdings(model)
    ranks = Ranks(holdings.comm)
    own = NamedState(optimizer, holdings)
    keeps = ranks.rank == 0 or not rank0_only
    known = ranks.gather((own.beside, {key: sorted(tensors) for key, tensors in own.alike.items()}))
    beside: dict[str, dict[str, Any]] = {}
    keys: dict[str, set[str]] = {}
    for values, alike in known:
        for name, value in values.items():
            beside.setdefault(name, value)
        for key, names in alike.items():
            keys.setdefault(key, set()).update(names)
    state: dict[int, dict[str, Any]] = {}
    for index, name in parameter_names(optimizer, holdings).items():
        whole = dict(beside.get(name, {}))
        for key in sorted(keys):
            if name in keys[key]:
                joined = _join(holdings.tensors[name], own.alike.get(key, {}).get(name), ranks, keeps)
                if joined is not None:
                    whole[key] = joined
        if whole:
            state[index] = whole
    if not keeps:
        return {}
    return {"state": state, "param_groups": optimizer.state_dict()["param_groups"]}


def _join(holding: Holding, part: torch.Tensor | None, ranks: Ranks, keeps: bool) -> torch.Tensor | None:
    """The whole of what lies as a parameter does."""
    if not holding.cut or ranks.comm is None:
        assert part is not None
        return part.detach().to("cpu", copy=True).view(holding.shape) if keeps else None
    flat = torch.empty(0) if part is None else part.detach().reshape(-1)
    rows = ranks.gather((holding.start, flat.cpu()))
    if not keeps:
        return None
    pieces = [piece for _, piece in sorted(rows, key=lambda row: row[0]) if piece.numel()]
    return torch.cat(pieces).view(holding.shape) if pieces else flat.cpu().view(holding.shape)


def load_full_optimizer_state_dict(
    model: nn.Module, optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]
) -> None:
    """Give each rank its part of a plain ``torch.optim`` state dict of whole tensors, of the same parameters in order.

    Args:
        state_dict: on every rank, as ``optimizer.state_dict()`` of one process is, or ``full_optimizer_state_dict``.

    Raises:
        CheckpointError: on every rank; the groups hold another number of parameters, or a tensor another shape.
            The optimizer is as it was.
    """
    holdings = Holdings(model)
    ranks = Ranks(holdings.comm)
    alike: dict[str, dict[str, torch.Tensor]] = {}
    beside: dict[str, dict[str, Any]] = {}

    def cut() -> list[dict[str, Any]]:
        names = parameter_names(optimizer, holdings)
        sizes = [len(group["params"]) for group in optimizer.param_groups]
        found = [len(group["params"]) for group in state_dict["param_groups"]]
        if sizes != found:
            raise CheckpointError(f"optimizer state: expected groups of {sizes} parameters, found {found}")
        by_number = dict(zip((i for g in state_dict["param_groups"] for i in g["params"]), names.values(), strict=True))
        for number, values in state_dict["state"].items():
            holding = holdings.tensors[by_number[number]]
            beside[holding.name] = {}
            for key, value in values.items():
                if (
                    key != STEP
                    and isinstance(value, torch.Tensor)
                    and (value.numel() > 1 or value.shape == holding.shape)
                ):
                    if tuple(value.shape) != holding.shape:
                        raise CheckpointError(
                            f"optimizer state {key!r} of {holding.name!r}: expected shape {holding.shape}, found "
                            f"{tuple(value.shape)}"
                        )
                    part = value.reshape(-1)[holding.start : holding.start + holding.tensor.numel()]
                    alike.setdefault(key, {})[holding.name] = part.clone().view(holding.tensor.shape)
                else:
                    beside[holding.name][key] = value
        return [{**g, "params": [by_number[i] for i in g["params"]]} for g in state_dict["param_groups"]]

    groups = ranks.together(cut)
    known = set(beside)
    install(optimizer, holdings, alike, beside, groups, lambda name: name if name in known else None)
