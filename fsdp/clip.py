"""Gradient clipping by the norm over all ranks."""

from __future__ import annotations

import torch
from torch import nn

from collectives import ReduceOp
from fsdp.param_group import ParamGroup
from fsdp.runtime import Runtime
from fsdp.unit import find_unit


def clip_grad_norm_(model: nn.Module, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
    """Scale all gradients of ``model`` in place, so that their joint norm is at most ``max_norm``.

    The norm is that of all gradients laid end to end, as in torch's function: shards are summed over ranks, gradients
    that every rank holds whole count once. Works on any mixture of wrapped and plain modules. Collective; every rank
    scales by the same number and returns the same norm.

    Args:
        model: the wrapped model.
        max_norm: what the norm shall not exceed.
        norm_type: p of the p-norm; ``inf`` for the largest magnitude.

    Returns:
        The norm before scaling: 0-dim, float32 (float64 for float64 gradients), on the gradients' device, the caller's.
        It is nan or inf, alike everywhere, where any gradient is.
    """
    norm_type = float(norm_type)
    largest = norm_type == float("inf")
    sharded = _sharded_parameters(model)
    whole = [p.grad for p in model.parameters() if p.grad is not None and id(p) not in sharded]
    every = list(whole)
    total: torch.Tensor | None = None
    for runtime in dict.fromkeys(runtime for runtime, _ in sharded.values()):
        grads = [p.grad.as_subclass(torch.Tensor) for r, p in sharded.values() if r is runtime and p.grad is not None]
        every += grads
        part = _accumulate(grads, norm_type).to(runtime.comm.device)
        runtime.comm.all_reduce(part, ReduceOp.MAX if largest else ReduceOp.SUM)
        total = part if total is None else _join(total, part, largest)
    part = _accumulate(whole, norm_type)
    total = part if total is None else _join(total, part.to(total.device), largest)
    norm = total if largest else total ** (1.0 / norm_type)
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for grad in every:
        grad.mul_(scale.to(grad.device, grad.dtype if grad.is_floating_point() else scale.dtype))
    wide = any(grad.dtype in (torch.float64, torch.complex128) for grad in every)
    return norm if wide else norm.float()


def _sharded_parameters(model: nn.Module) -> dict[int, tuple[Runtime, nn.Parameter]]:
    """The parameters that ranks hold in parts, each once."""
    found: dict[int, tuple[Runtime, nn.Parameter]] = {}
    for module in model.modules():
        unit = find_unit(module)
        if unit is None:
            continue
        groups: list[ParamGroup] = [group for group in unit.own_groups if group.strategy.shards]
        for group in groups:
            for managed in group.managed:
                found[id(managed.parameter)] = (unit.runtime, managed.parameter)
    return found


def _accumulate(grads: list[torch.Tensor], norm_type: float) -> torch.Tensor:
    """Sum of |g|^p, or the largest |g|, in float64: one number. An empty list gives 0."""
    zero = torch.zeros((), dtype=torch.float64)
    norms = [torch.linalg.vector_norm(g, norm_type, dtype=_wide(g)).to(zero) for g in grads if g.numel()]
    if not norms:
        return zero
    stacked = torch.stack(norms)
    return stacked.max() if norm_type == float("inf") else (stacked**norm_type).sum()


def _wide(grad: torch.Tensor) -> torch.dtype:
    return torch.complex128 if grad.is_complex() else torch.float64


def _join(a: torch.Tensor, b: torch.Tensor, largest: bool) -> torch.Tensor:
    return torch.maximum(a, b) if largest else a + b
