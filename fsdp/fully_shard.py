"""``fully_shard``: a module trains as before, with its parameters, gradients and optimizer state spread over ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn

from collectives import Communicator
from collectives.errors import UnsupportedError
from fsdp.offload import CPUOffloadPolicy
from fsdp.param_group import ManagedParameter, ParamGroup
from fsdp.precision import MixedPrecisionPolicy
from fsdp.runtime import Runtime
from fsdp.state_dict import refuse_plain_state_dict
from fsdp.strategy import STAGES, Strategy
from fsdp.sync import broadcast_tensors, check_same
from fsdp.unit import Unit

BUCKET_MB = 25.0
FIRST_BUCKET_MB = 1.0  # the first one to be reduced is small, so that communication starts early
_NO_COPY = (
    "a module wrapped by fully_shard holds a part of its state and cannot be copied or pickled; expected its whole "
    "state: fsdp.full_state_dict(model), loaded into a module that is not wrapped"
)
Units = Sequence[type[nn.Module]] | Callable[[nn.Module], bool]


class FSDPModule(nn.Module):
    """What ``fully_shard`` adds to the class of a module. Its type is a subclass of both."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise UnsupportedError(_NO_COPY)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UnsupportedError(_NO_COPY)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Micro-steps before the last one of a step: no optimizer step may come between them and the next backward.

        Stages 0 and 1 keep full gradients and reduce in the first backward outside; stages 2 and 3 reduce every
        backward into the shards, as their memory promises. Forward and backward both belong inside.
        """
        with no_sync(unit_of(self).runtime):
            yield

    def set_requires_gradient_sync(self, requires_gradient_sync: bool) -> None:
        """``no_sync`` as a switch: False before the micro-steps that are not the last one of a step."""
        unit_of(self).runtime.reducer.requires_sync = requires_gradient_sync

    def unshard(self) -> None:
        """Gather this unit's parameters now, ahead of its forward. Collective."""
        for group in unit_of(self).groups:
            group.unshard()

    def reshard(self) -> None:
        """Free this unit's gathered parameters."""
        for group in unit_of(self).groups:
            if not group.users:
                group.reshard()


@contextlib.contextmanager
def no_sync(runtime: Runtime) -> Iterator[None]:
    """Backward does not reduce what its strategy can keep."""
    before = runtime.reducer.requires_sync
    runtime.reducer.requires_sync = False
    try:
        yield
    finally:
        runtime.reducer.requires_sync = before


def unit_of(module: nn.Module) -> Unit:
    """The unit of a wrapped module. Raises ``ValueError`` for any other."""
    unit = module.__dict__.get("_fsdp_unit")
    if unit is None:
        raise ValueError(f"expected a module wrapped by fully_shard or DistributedDataParallel, got {type(module)}")
    return cast(Unit, unit)


def fully_shard(
    module: nn.Module,
    comm: Communicator,
    *,
    stage: int = 3,
    units: Units | None = None,
    reshard_after_forward: bool | int | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: CPUOffloadPolicy | None = None,
    replicate_comm: Communicator | None = None,
    ignored_params: Iterable[nn.Parameter] | None = None,
    owner: Any = None,
    host_shared: bool = True,
) -> nn.Module:
    """Spread a module over the ranks of ``comm``, in place; call it bottom-up, the whole model last.

    A unit is what one call wraps: its parameters that no inner call took. They are gathered by one all_gather before
    its forward and reduced by one reduce_scatter in its backward. Parameters keep their identity and names; each holds
    this rank's shard, shape (n, 1, ..., 1) with n >= 0 elements, dtype and device as before (on ``comm.device``), and
    its whole shape as ``full_shape``; ``.grad`` is the averaged gradient of the shard. Parameters and buffers start as
    rank 0's; buffers are rank 0's again at every training forward.

    Args:
        module: a module with a forward of its own. It becomes an ``FSDPModule`` too.
        comm: the ranks. Collective: all call it alike.
        stage: 0 replicates (as DistributedDataParallel does, in place); 1 and 2 gather once a step (ZeRO-1, ZeRO-2);
            3 frees parameters between uses (ZeRO-3, FSDP).
        units: classes, or a function of a module, to wrap first. None: at stage 3 the module is one unit, at stages 0
            to 2 buckets of 25 MiB.
        reshard_after_forward: free after forward (stage 3); None means True, but False for the outermost unit.
        mp_policy: dtypes of computation and reduction.
        offload_policy: not supported yet.
        replicate_comm: not supported yet.
        ignored_params: parameters to leave alone: not spread, not reduced, not broadcast.
        owner: not supported yet.
        host_shared: ranks of one host may share gathered parameters where the backend can. Has no effect elsewhere.

    Returns:
        ``module`` itself.

    Raises:
        ValueError: modules differ between ranks (naming the first parameter that does), are wrapped already, or hold
            nothing that could be called.
        UnsupportedError: an option of a later version.

    Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020); Zhao et
    al., "PyTorch FSDP" (2023).
    """
    if not isinstance(comm, Communicator):
        raise TypeError(f"comm: expected a collectives.Communicator, got {type(comm)}")
    if stage not in range(len(STAGES)):
        raise ValueError(f"stage: expected 0, 1, 2 or 3, got {stage!r}")
    for name, value in (("offload_policy", offload_policy), ("replicate_comm", replicate_comm), ("owner", owner)):
        if value is not None:
            raise UnsupportedError(f"fully_shard(..., {name}=...) is not supported; expected None, got {value!r}")
    if reshard_after_forward is not None and not isinstance(reshard_after_forward, bool):
        raise UnsupportedError(
            f"reshard_after_forward={reshard_after_forward!r} is not supported; expected True, False or None"
        )
    policy = mp_policy or MixedPrecisionPolicy()
    if stage == 0 and policy.param_dtype is not None:
        raise UnsupportedError(
            "mp_policy.param_dtype needs shards to keep the master copy: stage 1, 2 or 3, got stage 0"
        )
    strategy = STAGES[stage]
    ignored = {id(p) for p in ignored_params or ()}
    runtime = Runtime(comm)
    for target in [*_inner_units(module, units), module]:
        wrap(target, target, runtime, strategy, policy, ignored, reshard_after_forward,
             bucket_mb=BUCKET_MB if stage < 3 and units is None else None)  # fmt: skip
        cls = type(target)
        target.__class__ = type(f"FSDP{cls.__name__}", (FSDPModule, cls), {"__module__": cls.__module__})
    return module


def _inner_units(module: nn.Module, units: Units | None) -> list[nn.Module]:
    """The modules inside of ``module`` that ``units`` chooses, inner before outer, in the order of registration."""
    if units is None:
        return []
    chosen: Callable[[nn.Module], bool]
    if callable(units) and not isinstance(units, Sequence):
        chosen = units
    else:
        classes = tuple(units)
        chosen = lambda m: isinstance(m, classes)  # noqa: E731
    seen: set[nn.Module] = set()
    found: list[nn.Module] = []

    def visit(parent: nn.Module) -> None:
        for child in parent.children():
            if child not in seen:
                seen.add(child)
                visit(child)
                if chosen(child) and "_fsdp_unit" not in child.__dict__:
                    found.append(child)

    visit(module)
    if not found:
        raise ValueError(
            f"units={units!r} chose nothing inside of {type(module).__name__}; expected at least one module"
        )
    return found


def wrap(
    hooked: nn.Module,
    module: nn.Module,
    runtime: Runtime,
    strategy: Strategy,
    policy: MixedPrecisionPolicy,
    ignored: set[int],
    reshard_after_forward: bool | None = None,
    bucket_mb: float | None = None,
    grad_views: bool = True,
) -> Unit:
    """Make a unit of what ``module`` holds and no inner unit took.

    Args:
        hooked: whose forward the unit follows.
        module: whose parameters it manages.
        runtime: takes in the unit and the runtimes of inner units.
        bucket_mb: cut the parameters into groups of this many MiB, the last parameters first; None makes one group.
    """
    if "_fsdp_unit" in hooked.__dict__:
        raise ValueError(f"{type(module).__name__} is wrapped already; expected every module to be wrapped once")
    if type(module).forward is nn.Module.forward:
        raise ValueError(
            f"{type(module).__name__} has no forward to follow; expected to be given its children one by one"
        )
    comm = runtime.comm
    inner: list[Unit] = []
    owned: dict[int, ManagedParameter] = {}
    borrowed: list[tuple[nn.Parameter, nn.Module, str]] = []
    buffers: list[tuple[str, nn.Module, str]] = []
    taken = {id(m.parameter) for unit in runtime.units for group in unit.own_groups for m in group.managed}
    _Walk(ignored, taken, inner, owned, borrowed, buffers).visit(module, "")
    for managed in owned.values():
        if managed.parameter.is_meta:
            raise UnsupportedError(
                f"parameter {managed.name!r} is on the meta device; expected values. Call to_empty and initialise first"
            )
    check_same(comm, [(m.name, m.parameter) for m in owned.values()], "parameter")
    named_buffers = [(path, buffer) for path, owner, name in buffers if (buffer := owner._buffers[name]) is not None]
    check_same(comm, named_buffers, "buffer")
    broadcast_tensors(comm, (buffer for _, buffer in named_buffers))
    groups = [
        ParamGroup(parameters, comm, strategy, policy, grad_views)
        for parameters in _group(list(owned.values()), bucket_mb)
    ]
    unit = Unit(hooked, groups, policy, reshard_after_forward, [(owner, name) for _, owner, name in buffers])
    for other in dict.fromkeys(u.runtime for u in inner):
        if other is not runtime:
            runtime.absorb(other)
    runtime.add(unit)
    if strategy.shards:
        refuse_plain_state_dict(unit, module)
    _borrow(unit, borrowed)
    hooked.__dict__["_fsdp_unit"] = unit
    return unit


@dataclass
class _Walk:
    """A walk down to inner units, and what it found on the way."""

    ignored: set[int]
    taken: set[int]  # ids of parameters that units of this model manage
    inner: list[Unit]
    owned: dict[int, ManagedParameter]
    borrowed: list[tuple[nn.Parameter, nn.Module, str]]
    buffers: list[tuple[str, nn.Module, str]]
    seen: set[nn.Module] = field(default_factory=set)

    def visit(self, module: nn.Module, prefix: str) -> None:
        if module in self.seen:
            return
        self.seen.add(module)
        for name, parameter in module._parameters.items():
            if parameter is None or id(parameter) in self.ignored:
                continue
            if id(parameter) in self.taken or hasattr(parameter, "full_shape"):
                self.borrowed.append((parameter, module, name))
            else:
                managed = self.owned.setdefault(id(parameter), ManagedParameter(prefix + name, parameter))
                managed.owners.append((module, name))
        self.buffers += [
            (prefix + name, module, name) for name, buffer in module._buffers.items() if buffer is not None
        ]
        for name, child in module._modules.items():
            if child is None:
                continue
            if "_fsdp_unit" in child.__dict__:
                self.inner.append(child.__dict__["_fsdp_unit"])
            else:
                self.visit(child, f"{prefix}{name}.")


def _group(parameters: list[ManagedParameter], bucket_mb: float | None) -> list[list[ManagedParameter]]:
    """One list a dtype; with ``bucket_mb``, filled from the last parameter and returned first to last."""
    if bucket_mb is None:
        by_dtype: dict[torch.dtype, list[ManagedParameter]] = {}
        for managed in parameters:
            by_dtype.setdefault(managed.parameter.dtype, []).append(managed)
        return list(by_dtype.values())
    done: list[list[ManagedParameter]] = []
    open_buckets: dict[torch.dtype, tuple[list[ManagedParameter], float]] = {}
    limit = min(FIRST_BUCKET_MB, bucket_mb)
    for managed in reversed(parameters):
        dtype = managed.parameter.dtype
        bucket, size = open_buckets.pop(dtype, ([], 0.0))
        bucket.insert(0, managed)
        size += managed.parameter.numel() * managed.parameter.element_size() / 2**20
        if size >= limit:
            done.append(bucket)
            limit = bucket_mb
        else:
            open_buckets[dtype] = (bucket, size)
    return [*done, *(bucket for bucket, _ in open_buckets.values())][::-1]


def _borrow(unit: Unit, borrowed: list[tuple[nn.Parameter, nn.Module, str]]) -> None:
    """Parameters that an earlier unit of the model manages: use its group, and let its leaves be seen here too."""
    for parameter, module, name in borrowed:
        for group in unit.runtime.groups:
            managed = next((m for m in group.managed if m.parameter is parameter), None)
            if managed is not None:
                managed.owners.append((module, name))
                if group not in unit.groups:
                    unit.groups.append(group)
                break
        else:
            raise UnsupportedError(
                f"{type(unit.module).__name__}.{name} is tied to a parameter of a unit outside of it that was wrapped "
                "first; expected both to be wrapped by one call: fully_shard(model, comm, units=[...])"
            )
