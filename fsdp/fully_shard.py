"""``fully_shard``: a module trains as before, with its parameters, gradients and optimizer state spread over ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from torch import nn

from collectives import Communicator
from collectives.errors import UnsupportedError
from fsdp.fsdp_module import adopt
from fsdp.offload import CPUOffloadPolicy
from fsdp.precision import MixedPrecisionPolicy
from fsdp.runtime import Runtime
from fsdp.strategy import STAGES
from fsdp.unit import find_unit
from fsdp.unsharded import HostShared
from fsdp.wrap import Options, Resident, agree, wrap

BUCKET_MB = 25.0
Units = Sequence[type[nn.Module]] | Callable[[nn.Module], bool | dict[str, Any]]
_OWN = ("reshard_after_forward", "mp_policy", "offload_policy")  # what a unit may have for itself


_Modules = TypeVar("_Modules", nn.Module, list[nn.Module], Sequence[nn.Module])


def fully_shard(
    module: _Modules,
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
    host_shared: HostShared = True,
    param_init_fn: Callable[[nn.Module], object] | None = None,
    persistence_threshold: int = 0,
    max_live_parameters: int | None = None,
) -> _Modules:
    """Spread a module over the ranks of ``comm``, in place; call it bottom-up, the whole model last.

    A unit is what one call wraps: its parameters that no inner call took. They are gathered by one all_gather before
    its forward and reduced by one reduce_scatter in its backward. Parameters keep their identity and names; each holds
    this rank's shard, shape (n, 1, ..., 1) with n >= 0 elements, dtype and device as before (on ``comm.device``), and
    its whole shape as ``full_shape``; ``.grad`` is the averaged gradient of the shard. Parameters and buffers start as
    rank 0's; buffers are rank 0's again at every training forward.

    Args:
        module: a module with a forward of its own; or a list of modules that run one after another, to be one unit:
            gathered when the first of them runs, freed when the last one has. It becomes an ``FSDPModule`` too.
        comm: the ranks. Collective: all call it alike.
        stage: 0 replicates (as DistributedDataParallel does, in place); 1 and 2 gather once a step (ZeRO-1, ZeRO-2);
            3 frees parameters between uses (ZeRO-3, FSDP).
        units: classes, or a function of a module, to wrap first. The function says yes, no, or yes with a dict of this
            unit's own reshard_after_forward, mp_policy or offload_policy. None: at stage 3 the module is one unit, at
            stages 0 to 2 buckets of 25 MiB.
        reshard_after_forward: free after forward (stage 3); None means True, but False for the outermost unit. A
            number n that divides the world size means that afterwards every n ranks in a row hold a copy in n parts,
            from which backward gathers: more memory than True, nearer partners. Such units share no memory.
        mp_policy: dtypes of computation and reduction.
        offload_policy: keep shards, their gradients and so the optimizer state in host memory. On CPU they are.
        replicate_comm: not supported yet.
        ignored_params: parameters to leave alone: not spread, not reduced, not broadcast.
        owner: not supported yet.
        host_shared: where the backend shares memory, the ranks of a host have one copy of the gathered parameters,
            which nobody can write, and a shard is its part of it. So shards may be edited between calls, but not
            between a forward and its backward. "copy" keeps shards private, "debug" ends a process that edits a shard
            at the wrong time with a traceback of the edit, False keeps everything private. Alike on all ranks.
        param_init_fn: fills the own parameters and buffers of a module that was on the meta device; None: its
            ``reset_parameters()``. Modules on the meta device get memory unit by unit, and are filled once each.
        persistence_threshold: parameters of at most so many elements stay gathered from a step's first forward to the
            end of its backward (stage 3), as one group for all units of this call: a gather and a reduction a step.
        max_live_parameters: units are gathered ahead of their turn only while no more elements than these are gathered,
            kept ones included (stage 3). None: at most one unit ahead; 0: none ever. That of the outermost call counts.

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
    for name, value in (("replicate_comm", replicate_comm), ("owner", owner)):
        if value is not None:
            raise UnsupportedError(f"fully_shard(..., {name}=...) is not supported; expected None, got {value!r}")
    reshard, post_forward_size = resharding(reshard_after_forward, comm.world_size)
    if max_live_parameters is not None and max_live_parameters < 0:
        raise ValueError(f"max_live_parameters: expected at least 0, got {max_live_parameters}")
    policy = mp_policy or MixedPrecisionPolicy()
    if stage == 0 and offload_policy is not None and comm.device.type != "cpu":
        raise UnsupportedError("offload_policy needs shards: stage 1, 2 or 3, got stage 0")
    options = _with(
        Options(
            STAGES[stage],
            policy,
            reshard,
            bucket_mb=BUCKET_MB if stage < 3 and units is None else None,
            ignored=frozenset(id(p) for p in ignored_params or ()),
            initialise=param_init_fn,
            offload=offload_policy,
            host_shared=host_shared if post_forward_size is None else False,
            post_forward_size=post_forward_size,
        ),
        {},
        comm,
    )
    parts = _parts(module)
    if len(parts) > 1 and units is not None:
        raise ValueError("units: expected None with a list of modules, which is one unit")
    chosen = inner_units(parts[0][1], units)
    targets = [([(path, inner)], _with(options, own, comm)) for path, inner, own in chosen] + [(parts, options)]
    agree(parts, comm, options.ignored)
    runtime = Runtime(comm)
    runtime.prefetch.max_live_parameters = max_live_parameters
    resident = Resident(persistence_threshold) if persistence_threshold > 0 and stage == 3 else None
    for target, its_options in targets:
        modules = [part for _, part in target]
        wrap(modules, target, runtime, its_options, resident, last=target is parts)
        for part in modules:
            adopt(part, options.strategy.shards)
    return module


def _with(options: Options, own: dict[str, Any], comm: Communicator) -> Options:
    """``options`` with what the function of units gave for one of them."""
    unknown = set(own) - set(_OWN)
    if unknown:
        raise ValueError(f"units: expected options of {', '.join(_OWN)} for a unit, got {', '.join(sorted(unknown))}")
    if "mp_policy" in own:
        options = replace(options, policy=own["mp_policy"] or MixedPrecisionPolicy())
    if "offload_policy" in own:
        options = replace(options, offload=own["offload_policy"])
    if "reshard_after_forward" in own:
        reshard, size = resharding(own["reshard_after_forward"], comm.world_size)
        options = replace(options, reshard_after_forward=reshard, post_forward_size=size)
        options = options if size is None else replace(options, host_shared=False)
    return options


def resharding(reshard_after_forward: bool | int | None, world_size: int) -> tuple[bool | None, int | None]:
    """Whether to free after forward, and how many ranks hold a copy together then, if not all."""
    if reshard_after_forward is None or isinstance(reshard_after_forward, bool):
        return reshard_after_forward, None
    if not 1 <= reshard_after_forward <= world_size or world_size % reshard_after_forward:
        raise ValueError(
            f"reshard_after_forward: expected True, False, None or a number that divides the world size {world_size}, "
            f"got {reshard_after_forward}"
        )
    if reshard_after_forward in (1, world_size):
        return reshard_after_forward == world_size > 1, None
    return True, reshard_after_forward


def _parts(module: nn.Module | Sequence[nn.Module]) -> list[tuple[str, nn.Module]]:
    """The modules of one unit, with the start of their names in messages."""
    if isinstance(module, nn.Module):
        return [("", module)]
    modules = list(module)
    if not modules:
        raise ValueError("module: expected a module or a list of them, got an empty list")
    for i, part in enumerate(modules):
        if any(part is inner for j, other in enumerate(modules) if j != i for inner in other.modules()):
            raise ValueError(f"module: expected modules of which none holds another, got {type(part).__name__} twice")
    return [(f"{type(part).__name__}." if len(modules) > 1 else "", part) for part in modules]


def inner_units(module: nn.Module, units: Units | None) -> list[tuple[str, nn.Module, dict[str, Any]]]:
    """The modules inside of ``module`` that ``units`` chooses, inner before outer.

    With the start of their names, and their own options.
    """
    if units is None:
        return []
    chosen: Callable[[nn.Module], bool | dict[str, Any]]
    if isinstance(units, Sequence):
        classes = tuple(units)
        chosen = lambda m: isinstance(m, classes)  # noqa: E731
    else:
        chosen = units
    found: list[tuple[str, nn.Module, dict[str, Any]]] = []
    seen: set[nn.Module] = {module}

    def visit(parent: nn.Module, prefix: str) -> None:
        for name, child in parent.named_children():
            if child not in seen and find_unit(child) is None:
                seen.add(child)
                visit(child, f"{prefix}{name}.")
                choice = chosen(child)
                if choice or isinstance(choice, dict):
                    found.append((f"{prefix}{name}.", child, choice if isinstance(choice, dict) else {}))

    visit(module, "")
    if not found:
        raise ValueError(f"units={units!r} chose nothing inside of {type(module).__name__}; expected some modules")
    return found
