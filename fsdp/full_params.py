"""Whole parameters to read and edit between steps."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import nn

from collectives import Communicator
from fsdp.param_group import ParamGroup
from fsdp.runtime import Phase, Runtime
from fsdp.shard_gradient import ShardGradient
from fsdp.unit import Unit, find_unit


@contextlib.contextmanager
def summon_full_params(
    module: nn.Module,
    *,
    recurse: bool = True,
    writeback: bool = True,
    rank0_only: bool = False,
    with_grads: bool = False,
) -> Iterator[None]:
    """Inside, the parameters of ``module`` are whole: full shapes, their own dtype, the same objects.

    Edits count when the block ends, in place or by ``parameter.data = ...``; with ``rank0_only`` those of rank 0, else
    each rank keeps its part of its own edits, so ranks make the same ones. An exception inside drops edits. Forwards
    without gradients run on the whole parameters, in their own dtype and without any communication, so every rank may
    run its own number of them; ``state_dict()`` works too. Collective at both ends. Costs the memory of all
    parameters that are whole. Replicated parameters are whole anyway, and are left alone.

    Args:
        module: the wrapped model, or a part of it that holds units.
        recurse: inner units too.
        writeback: keep edits.
        rank0_only: only rank 0 sees whole parameters; the others keep their shards.
        with_grads: ``.grad`` is whole too, and edits of it count.

    Raises:
        ValueError: something other than a tensor of the parameter's shape and dtype was put in its place; the shards
            are unchanged then.
        RuntimeError: a forward or backward is under way; or rank 0 failed, whose edits the others were to take.
    """
    units = [unit for part in (module.modules() if recurse else [module]) if (unit := find_unit(part)) is not None]
    groups = list(dict.fromkeys(g for unit in units for g in unit.groups if g.strategy.shards and not g.summoned))
    for unit in units:
        if unit.runtime.phase is not Phase.IDLE:
            raise RuntimeError("summon_full_params inside of a forward or backward; expected it between steps")
    views = [_View(group, rank0_only, with_grads) for group in groups]
    exporters = _exporters(units, rank0_only) if recurse else []
    for runtime in exporters:
        runtime.exports_state = True
    edited: list[_Values] = []
    trouble: BaseException | None = None
    try:
        yield
        if writeback:
            edited = [view.values() for view in views]
    except BaseException as error:
        trouble = error
        raise
    finally:
        for view in views:
            view.close()
        for runtime in exporters:
            runtime.exports_state = False
        if rank0_only and writeback:
            _agree_on_edits({view.comm: None for view in views}, trouble)
    if writeback:
        for view, values in zip(views, edited, strict=True):
            view.write_back(values)


def _agree_on_edits(comms: Iterable[Communicator], trouble: BaseException | None) -> None:
    """Nobody waits for the edits of a rank 0 that failed."""
    for comm in comms:
        found = comm.broadcast_object(None if trouble is None else repr(trouble), 0)
        if found is not None and comm.rank != 0 and trouble is None:
            raise RuntimeError(f"rank {comm.rank}: rank 0's edits in summon_full_params are dropped, it raised {found}")


def _exporters(units: list[Unit], rank0_only: bool) -> list[Runtime]:
    """The models whose ``state_dict()`` is whole meanwhile."""
    runtimes = dict.fromkeys(unit.runtime for unit in units)
    return [r for r in runtimes if not r.exports_state and (not rank0_only or r.comm.rank == 0)]


_Values = list[tuple[torch.Tensor, "torch.Tensor | None"]]


class _View:
    """The whole parameters of one group, from its construction to ``close``."""

    def __init__(self, group: ParamGroup, rank0_only: bool, with_grads: bool) -> None:
        self.group = group
        self.rank0_only = rank0_only
        self.with_grads = with_grads
        self.comm: Communicator = group.comm
        self.sees = not rank0_only or self.comm.rank == 0
        self.parameters = [m.parameter for m in group.managed]
        self.grads = [p.grad for p in self.parameters]
        whole_grads = self._gather_grads() if with_grads else [None] * len(self.parameters)
        group.reshard()
        whole = [value for _, value in group.gather_values()]
        if not self.sees:
            return
        group.summoned = True
        group.places.allow_forward(True)
        for parameter, value, grad in zip(self.parameters, whole, whole_grads, strict=True):
            parameter.grad = None
            parameter.data = value
            parameter.grad = grad

    def _gather_grads(self) -> list[torch.Tensor | None]:
        group = self.group
        part = torch.zeros_like(group.shard, device=self.comm.device)
        for grad, piece in zip(self.grads, group.shards.pieces, strict=True):
            if grad is not None:
                part[piece.offset : piece.offset + piece.numel] = grad.as_subclass(torch.Tensor).reshape(-1)
        whole = part.new_empty(group.layout.numel)
        self.comm.all_gather(whole, part)
        spans = torch.split(whole, group.layout.spans())[::2]
        return [
            None if grad is None else span.view(shape)
            for grad, span, shape in zip(self.grads, spans, group.shapes, strict=True)
        ]

    def values(self) -> _Values:
        """What the parameters, and their gradients, hold now. Empty where this rank did not see them."""
        if not self.sees:
            return []
        found = []
        for managed, shape in zip(self.group.managed, self.group.shapes, strict=True):
            for module, name in managed.owners:
                held = module._parameters.get(name)
                if held is None or held.shape != shape or held.dtype != self.group.dtype:
                    raise ValueError(self._replaced(managed.name, shape, held))
                if held is not managed.parameter:
                    managed.parameter.data = held.data
                    module._parameters[name] = managed.parameter
            found.append((managed.parameter.data, managed.parameter.grad))
        return found

    def _replaced(self, name: str, shape: torch.Size, held: torch.Tensor | None) -> str:
        what = "nothing" if held is None else f"a tensor of {tuple(held.shape)}, {held.dtype}"
        return (
            f"rank {self.comm.rank}: inside summon_full_params parameter {name!r} was replaced by {what}; expected "
            f"{tuple(shape)} of {self.group.dtype}. Change its values in place"
        )

    def close(self) -> None:
        """The parameters are shards again, with the values that they had."""
        if not self.sees or not self.group.summoned:
            return
        group = self.group
        group.summoned = False
        group.places.allow_forward(False)
        for managed, local, grad in zip(group.managed, group.shards.views, self.grads, strict=True):
            parameter = managed.parameter
            parameter.grad = None
            parameter.data = local.data
            parameter.grad = grad
            for module, name in managed.owners:
                module._parameters[name] = parameter

    def write_back(self, values: _Values) -> None:
        """Put this rank's part of edited values into its shards."""
        group = self.group
        if self.rank0_only:
            whole = torch.zeros(group.layout.numel if self.sees else 0, dtype=group.dtype, device=self.comm.device)
            spans = torch.split(whole, group.layout.spans())[::2] if self.sees else ()
            for span, (value, _) in zip(spans, values, strict=True):
                span.copy_(value.reshape(-1))  # edits may be tensors of their own, and one scatter sends them
            mine = group.shard.to(self.comm.device)
            self.comm.scatter(mine, whole if self.sees else None, 0)
            group.shard.copy_(mine)
            return
        shards = group.shards
        rows = zip(group.managed, shards.views, shards.pieces, values, strict=True)
        for managed, local, piece, (value, grad) in rows:
            # The shard is what is gathered, and the whole values are about to be dropped.
            part = slice(piece.start, piece.start + piece.numel)
            local.copy_(value.reshape(-1)[part].view(local.shape))
            if self.with_grads:
                own = None if grad is None else grad.reshape(-1)[part].clone().view(local.shape)
                managed.parameter.grad = None if own is None else ShardGradient.of(own, self.comm)
