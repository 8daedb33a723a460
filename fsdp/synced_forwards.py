"""Forwards without gradients whose number differs between ranks, as in generation."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from collectives import ReduceOp
from fsdp.runtime import Runtime
from fsdp.unit import unit_of


@contextlib.contextmanager
def synced_forwards(model: nn.Module) -> Iterator[None]:
    """Inside, ranks may run different numbers of forwards of ``model``; all leave when the last one is done.

    A rank that is done goes on gathering parameters for the others, in the order of its own last forward, without
    computing. So every forward uses the same units in the same order, each rank runs at least one, and gradients are
    off. Collective at every forward: one small all_reduce more.
    """
    runtime = unit_of(model).runtime
    if runtime.on_root_forward is not None:
        raise RuntimeError("synced_forwards inside of synced_forwards")
    runtime.on_root_forward = lambda: _announce(runtime)
    try:
        yield
    finally:
        runtime.on_root_forward = None
    while _any_active(runtime, False):
        runtime.replay_forward()


def _announce(runtime: Runtime) -> None:
    if torch.is_grad_enabled():
        raise RuntimeError("a forward inside synced_forwards with gradients enabled; expected torch.no_grad()")
    _any_active(runtime, True)


def _any_active(runtime: Runtime, active: bool) -> bool:
    flag = torch.tensor([active], dtype=torch.uint8, device=runtime.comm.device)
    runtime.comm.all_reduce(flag, ReduceOp.MAX)
    return bool(flag.item())
