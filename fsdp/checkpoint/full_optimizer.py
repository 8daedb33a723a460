"""Optimizer state as one process has it: a plain ``torch.optim`` state dict, of whole tensors."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fsdp.checkpoint.errors import CheckpointError
from fsdp.checkpoint.holdings import Holding, Holdings, plain_name
from fsdp.checkpoint.optimizer_state import STEP, NamedState, install, parameter_names
from fsdp.checkpoint.ranks import Ranks
from fsdp.checkpoint.saving import wait_for_pending
from fsdp.checkpoint.sources import OptimizerState, Stored, open_source, torch_load

_NESTED = ("optimizer", "optimizer_state_dict", "optim")  # where training scripts keep it


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
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    source: str | os.PathLike[str] | Mapping[str, Any],
    *,
    trust_pickle: bool = False,
) -> None:
    """Give each rank its part of whole optimizer state. Collective.

    Args:
        source: on every rank a ``torch.optim`` state dict, as ``optimizer.state_dict()`` of one process is, or
            ``full_optimizer_state_dict``; with parameters by number, or by name, as torch's
            ``get_optimizer_state_dict`` has them. Or the path of such a dict that torch.save wrote, of a torch
            distributed checkpoint, or of a checkpoint; of these each rank reads its slices. Numbers count the
            parameters in the order of ``optimizer``, or as ``param_names`` says. Parameters without state start fresh.
        trust_pickle: see ``load_full_state_dict``.

    Raises:
        CheckpointError: on every rank; groups hold other parameters, or a tensor has another shape. The optimizer is
            as it was.
    """
    holdings = Holdings(model)
    ranks = Ranks(holdings.comm)
    wait_for_pending(model, ranks)
    alike: dict[str, dict[str, torch.Tensor]] = {}
    beside: dict[str, dict[str, Any]] = {}

    def cut() -> list[dict[str, Any]]:
        found = _open(source, trust_pickle)
        own_names = iter(parameter_names(optimizer, holdings).values())
        own_groups = [[next(own_names) for _ in group["params"]] for group in optimizer.param_groups]
        names = _names(found.groups, own_groups, holdings)
        for parameter, values in found.state.items():
            if parameter not in names:
                raise CheckpointError(f"optimizer state: expected that of parameters in its groups, found {parameter}")
            holding = holdings.tensors[names[parameter]]
            own = beside.setdefault(holding.name, {})
            for key, value in values.items():
                shape = value.shape if isinstance(value, (Stored, torch.Tensor)) else None
                if key == STEP or shape is None or (math.prod(shape) == 1 and tuple(shape) != holding.shape):
                    own[key] = value.whole() if isinstance(value, Stored) else value
                elif tuple(shape) != holding.shape:
                    raise CheckpointError(
                        f"optimizer state {key!r} of {holding.name!r}: expected shape {holding.shape}, found "
                        f"{tuple(shape)}"
                    )
                else:
                    part = _part(value, holding.start, holding.tensor.numel())
                    alike.setdefault(key, {})[holding.name] = part.view(holding.tensor.shape)
        # How the parameters are called is the optimizer's own.
        options = [{key: value for key, value in group.items() if key != "param_names"} for group in found.groups]
        return [{**group, "params": [names[p] for p in group["params"]]} for group in options]

    groups = ranks.together(cut)
    known = {name for group in groups for name in group["params"]}
    install(optimizer, holdings, alike, beside, groups, lambda name: name if name in known else None)


def _open(source: str | os.PathLike[str] | Mapping[str, Any], trust_pickle: bool) -> OptimizerState:
    if not isinstance(source, Mapping):
        path = Path(source)
        if not path.is_file():
            return open_source(path, trust_pickle).optimizer()
        source = torch_load(path, trust_pickle)
        for name in _NESTED:
            if isinstance(source, Mapping) and "param_groups" not in source:
                source = source.get(name, source)
    if not isinstance(source, Mapping) or not {"state", "param_groups"}.issubset(source):
        raise CheckpointError("optimizer state: expected a dict with 'state' and 'param_groups', found another")
    return OptimizerState(source["param_groups"], source["state"])


def _part(value: Stored | torch.Tensor, start: int, numel: int) -> torch.Tensor:
    if isinstance(value, Stored):
        return value.read(start, numel)
    return value.detach().reshape(-1)[start : start + numel].to("cpu", copy=True)


def _names(
    groups: Sequence[Mapping[str, Any]], own: Sequence[Sequence[str]], holdings: Holdings
) -> dict[str | int, str]:
    """The model's name of every parameter in ``groups``. ``own``: those in the optimizer's groups, in order."""
    listed = [parameter for group in groups for parameter in group["params"]]
    ordered = [name for group in own for name in group]
    if any(isinstance(parameter, str) for parameter in listed) or all("param_names" in group for group in groups):
        called = [plain_name(str(name)) for group in groups for name in group.get("param_names", group["params"])]
        names = [holdings.tied.get(name, name) for name in called]
        if unknown := sorted({*names}.difference(ordered)):
            raise CheckpointError(
                f"optimizer state: expected parameters of this optimizer, found others: {', '.join(unknown)}"
            )
        return dict(zip(listed, names, strict=True))
    sizes, found = [len(group) for group in own], [len(group["params"]) for group in groups]
    if sizes != found:
        raise CheckpointError(f"optimizer state: expected groups of {sizes} parameters, found {found}")
    return dict(zip(listed, ordered, strict=True))
