"""Make a unit of a module: find what it manages, agree on it between ranks, and group it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from collectives import Communicator
from fsdp.gradient_hooks import replicated_in
from fsdp.meta_device import Initialise, materialise
from fsdp.offload import CPUOffloadPolicy
from fsdp.param_group import ParamGroup
from fsdp.places import ManagedParameter
from fsdp.post_forward import post_forward_shard
from fsdp.precision import MixedPrecisionPolicy
from fsdp.runtime import Runtime
from fsdp.state_dict import refuse_plain_state_dict
from fsdp.strategy import RESIDENT, Strategy
from fsdp.sync import broadcast_tensors, check_same
from fsdp.together import Together
from fsdp.unit import Unit, find_unit
from fsdp.unsharded import HostShared

Parts = Sequence[tuple[str, nn.Module]]
FIRST_BUCKET_MB = 1.0  # the first bucket to be reduced is small, so that communication starts early


@dataclass(frozen=True)
class Options:
    """How the parameters of a unit are kept.

    Args:
        bucket_mb: cut the unit's parameters into groups of this many MiB, the last parameters first; None makes one
            group a dtype.
        grad_views: replicated gradients are views of their bucket.
        ignored: ids of parameters to leave alone.
        initialise: fills a module that was on the meta device; None: its ``reset_parameters``.
        offload: shards and gradients are in host memory.
        host_shared: see ``fully_shard``.
        post_forward_size: how many ranks hold a copy between forward and backward; None: all, or nobody.
    """

    strategy: Strategy
    policy: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    reshard_after_forward: bool | None = None
    bucket_mb: float | None = None
    grad_views: bool = True
    ignored: frozenset[int] = frozenset()
    initialise: Initialise | None = None
    offload: CPUOffloadPolicy | None = None
    host_shared: HostShared = True
    post_forward_size: int | None = None


@dataclass
class Resident:
    """Parameters so small that they stay gathered. Those of all units of one call are a group of its last unit.

    Args:
        threshold: the most elements that such a parameter has.
        found: what units have left for the last one, by id.
    """

    threshold: int
    found: dict[int, ManagedParameter] = field(default_factory=dict)


def agree(parts: Parts, comm: Communicator, ignored: frozenset[int]) -> None:
    """Make sure that all ranks were given the same modules, and give their buffers rank 0's values. Collective.

    Raises:
        ValueError: they were not; alike on all ranks, naming the first parameter or buffer that differs.
    """
    named = [
        ("parameter", path + name, p) for path, m in parts for name, p in m.named_parameters() if id(p) not in ignored
    ]
    buffers = [(path + name, buffer) for path, module in parts for name, buffer in module.named_buffers()]
    check_same(comm, [*named, *(("buffer", name, buffer) for name, buffer in buffers)])
    broadcast_tensors(comm, (buffer for _, buffer in buffers if not buffer.is_meta))


def wrap(
    hooked: Sequence[nn.Module],
    parts: Parts,
    runtime: Runtime,
    options: Options,
    resident: Resident | None = None,
    last: bool = True,
) -> Unit:
    """Make a unit of what modules hold and no inner unit took. Collective, after ``agree``.

    Args:
        hooked: whose forwards the unit follows: the modules themselves, or what calls them.
        parts: the modules, and what the names of their parameters start with in messages.
        runtime: takes in the unit, and the units of inner runtimes.
        resident: small parameters are left to the last unit of a call.
        last: this is it.

    Returns:
        The unit that owns the parameters. Of several modules it is the last one's; each has a unit.

    Raises:
        ValueError: the module is wrapped already, or has no forward.
    """
    for caller, (_, module) in zip(hooked, parts, strict=True):
        if find_unit(caller) is not None:
            raise ValueError(f"{type(module).__name__} is wrapped already; expected every module to be wrapped once")
        if type(module).forward is nn.Module.forward:
            raise ValueError(
                f"{type(module).__name__} has no forward that a unit could follow; expected its children, one by one"
            )
    comm = runtime.comm
    taken = {id(m.parameter) for unit in runtime.units for group in unit.own_groups for m in group.managed}
    walk = _Walk(options.ignored, taken, resident)
    for path, module in parts:
        walk.visit(module, path)
    materialise(walk.modules, comm.device, options.initialise)
    if walk.on_meta:
        broadcast_tensors(comm, (owner._buffers[name] for owner, name in walk.on_meta))  # type: ignore[misc]
    options.policy.cast_buffers(walk.buffers)
    kinds = [(options.strategy, options.bucket_mb, list(walk.owned.values()))]
    if resident is not None and last:
        kinds.append((RESIDENT, None, list(resident.found.values())))
    groups = [
        ParamGroup(
            parameters,
            comm,
            strategy,
            options.policy,
            options.grad_views,
            options.offload,
            options.host_shared,
            post_forward_shard(options.post_forward_size if strategy.frees_after_forward else None),
        )
        for strategy, bucket_mb, managed in kinds
        for parameters in _group(managed, bucket_mb)
    ]
    units = [Unit(caller, groups, options.policy, options.reshard_after_forward, []) for caller in hooked]
    unit = units[-1]
    unit.buffer_owners = walk.buffers
    if len(units) > 1:
        _join(units)
    for prefix, inner in walk.inner:
        if inner.runtime is not runtime:
            for managed in (m for other in inner.runtime.units for group in other.own_groups for m in group.managed):
                managed.name = prefix + managed.name
            runtime.absorb(inner.runtime)
    for each in units:
        runtime.add(each)
    for each, caller in zip(units, hooked, strict=True):
        caller.__dict__["_fsdp_unit"] = each
    unit.unresolved = walk.borrowed
    for other in runtime.units:
        _borrow(other)
    if options.strategy.shards:
        for each, (_, module) in zip(units, parts, strict=True):
            refuse_plain_state_dict(each, module)
    for group in unit.groups:
        group.places.find()
    return unit


def _join(units: list[Unit]) -> None:
    """Make one unit of several: the last one owns the groups, all compute with them."""
    *others, leader = units
    together = Together(units)
    for unit in units:
        unit.together, unit.leader, unit.groups = together, leader, leader.groups
    for unit in others:
        unit.own_groups = []
    for group in leader.own_groups:
        group.spans_modules = True


@dataclass
class _Walk:
    """A walk from a module down to inner units, and what it finds on the way."""

    ignored: frozenset[int]
    taken: set[int]  # ids of parameters that units of this model manage
    resident: Resident | None = None
    inner: list[tuple[str, Unit]] = field(default_factory=list)
    owned: dict[int, ManagedParameter] = field(default_factory=dict)
    borrowed: list[tuple[nn.Parameter, nn.Module, str]] = field(default_factory=list)
    modules: list[tuple[str, nn.Module]] = field(default_factory=list)
    buffers: list[tuple[nn.Module, str]] = field(default_factory=list)
    on_meta: list[tuple[nn.Module, str]] = field(default_factory=list)  # those of the buffers
    seen: set[nn.Module] = field(default_factory=set)

    def visit(self, module: nn.Module, prefix: str) -> None:
        if module in self.seen:
            return
        self.seen.add(module)
        self.modules.append((prefix.removesuffix("."), module))
        for name, parameter in module._parameters.items():
            if parameter is None or id(parameter) in self.ignored:
                continue
            other = replicated_in(parameter)
            if other is not None and other.replaceable:
                other.retire()
                other = None
            if id(parameter) in self.taken or hasattr(parameter, "full_shape") or other is not None:
                self.borrowed.append((parameter, module, name))
            elif self.resident is not None and parameter.numel() <= self.resident.threshold:
                self.resident.found.setdefault(id(parameter), ManagedParameter(prefix + name, parameter))
                self.borrowed.append((parameter, module, name))
            else:
                managed = self.owned.setdefault(id(parameter), ManagedParameter(prefix + name, parameter))
                managed.owners.append((module, name))
        for name, buffer in module._buffers.items():
            if buffer is not None:
                self.buffers.append((module, name))
                if buffer.is_meta:
                    self.on_meta.append((module, name))
        for name, child in module._modules.items():
            if child is None:
                continue
            unit = find_unit(child)
            if unit is not None:
                self.inner.append((f"{prefix}{name}.", unit))
            else:
                self.visit(child, f"{prefix}{name}.")


def walk_and_group(
    module: nn.Module, taken: set[int], bucket_mb: float | None, resident: Resident | None = None
) -> list[list[nn.Parameter]]:
    """The groups that ``wrap`` would make of ``module``; adds what they hold to ``taken``."""
    walk = _Walk(frozenset(), taken, resident)
    walk.visit(module, "")
    taken.update(walk.owned)
    return [[m.parameter for m in group] for group in _group(list(walk.owned.values()), bucket_mb)]


def resident_groups(resident: Resident) -> list[list[nn.Parameter]]:
    """The groups that the last unit of a call would make of small parameters."""
    return [[m.parameter for m in group] for group in _group(list(resident.found.values()), None)]


def _group(parameters: Sequence[ManagedParameter], bucket_mb: float | None) -> list[list[ManagedParameter]]:
    """One list a dtype; with ``bucket_mb``, filled from the last parameter and returned first to last."""
    if bucket_mb is None:
        by_dtype: dict[torch.dtype, list[ManagedParameter]] = {}
        for managed in parameters:
            by_dtype.setdefault(managed.parameter.dtype, []).append(managed)
        return list(by_dtype.values())
    full: list[list[ManagedParameter]] = []
    filling: dict[torch.dtype, tuple[list[ManagedParameter], float]] = {}
    limit = min(FIRST_BUCKET_MB, bucket_mb)
    for managed in reversed(parameters):
        dtype = managed.parameter.dtype
        bucket, size = filling.pop(dtype, ([], 0.0))
        bucket.insert(0, managed)
        size += managed.parameter.numel() * managed.parameter.element_size() / 2**20
        if size >= limit:
            full.append(bucket)
            limit = bucket_mb
        else:
            filling[dtype] = (bucket, size)
    return [*full, *(bucket for bucket, _ in filling.values())][::-1]


def _borrow(unit: Unit) -> None:
    """Parameters that another unit of the model manages: use its group, and let its leaves be seen here too.

    That unit may not be of the model yet; a later call, of what holds both, then finds it.
    """
    unresolved = []
    for parameter, module, name in unit.unresolved:
        for group in unit.runtime.groups:
            managed = next((m for m in group.managed if m.parameter is parameter), None)
            if managed is not None:
                managed.owners.append((module, name))
                if group not in unit.groups:
                    unit.groups.append(group)
                group.places.find()
                break
        else:
            unresolved.append((parameter, module, name))
    unit.unresolved = unresolved
