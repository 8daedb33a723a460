"""What a module can do once ``fully_shard`` has wrapped it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from types import FunctionType
from typing import Any, cast

from torch import nn

from collectives.errors import UnsupportedError
from fsdp.runtime import Runtime
from fsdp.subset import subset
from fsdp.unit import Unit, find_unit, unit_of

_NO_COPY = (
    "a module wrapped by fully_shard holds a part of its state and cannot be copied or pickled; expected its whole "
    "state: fsdp.full_state_dict(model), loaded into a module that is not wrapped"
)


class UnshardHandle:
    """An ``unshard`` under way."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit

    def wait(self) -> None:
        """Return when the parameters are there."""
        for group in self._unit.groups:
            group.wait_for_unshard()


class FSDPModule(nn.Module):
    """What ``fully_shard`` adds to the class of a module. Its type is a subclass of both.

    Setters with ``recurse`` reach the units inside too. Settings are alike on all ranks.
    """

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

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """``no_sync`` as a switch: False before the micro-steps that are not the last one of a step. For the model."""
        if not recurse:
            raise UnsupportedError(
                "set_requires_gradient_sync(..., recurse=False): expected recurse=True, a model is reduced as a whole"
            )
        unit_of(self).runtime.reducer.requires_sync = requires_gradient_sync

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Of replicas of sharded models, which there are not yet. True is accepted."""
        if not requires_all_reduce:
            raise UnsupportedError(
                "set_requires_all_reduce(False) is of replicate_comm, which is not supported; for micro-steps without "
                "communication expected no_sync()"
            )

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Accepted: every backward returns with its reductions done, and drops what was gathered ahead."""

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether to free parameters between forward and backward (stage 3; elsewhere they are never freed there)."""
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(f"reshard_after_forward: expected True or False, got {reshard_after_forward!r}")
        for unit in self._units(recurse):
            unit.reshard_after_forward = reshard_after_forward
            for group in unit.own_groups:
                group.post_forward = None

    def set_reshard_after_backward(self, reshard_after_backward: bool, recurse: bool = True) -> None:
        """Whether to free parameters after backward. What stays is gathered anew by the next forward, as an optimizer
        step may have come between; under ``no_sync`` none does, and the gather is saved (stage 3)."""
        for unit in self._units(recurse):
            for group in unit.own_groups:
                group.frees_after_backward = reshard_after_backward

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """False for a unit whose backward reads no parameters, such as an embedding: saves a gather (stage 3)."""
        unit_of(self).gathers_for_backward = unshard_in_backward

    def set_modules_to_forward_prefetch(self, modules: Sequence[nn.Module]) -> None:
        """Units to gather while this one computes in forward, in this order, in place of what came next last time."""
        unit_of(self).forward_prefetch = [unit_of(module).leader for module in modules]

    def set_modules_to_backward_prefetch(self, modules: Sequence[nn.Module]) -> None:
        """The same in backward, in place of the unit that ran before this one."""
        unit_of(self).backward_prefetch = [unit_of(module).leader for module in modules]

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide summed gradients of this unit, and not of units inside, by ``factor`` and not the number of ranks."""
        if not factor > 0:
            raise ValueError(f"factor: expected a positive number, got {factor}")
        for group in unit_of(self).leader.own_groups:
            group.divide_factor = float(factor)

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """How many reductions may be under way, each with an input buffer: more overlap for more memory."""
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int) or max_input_buffers < 1:
            raise ValueError(f"max_input_buffers: expected a positive whole number, got {max_input_buffers!r}")
        for unit in self._units(recurse):
            for group in unit.own_groups:
                group.reduce_buffers = max_input_buffers

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Reduce over a communicator of its own, so that gathers need not wait for reductions. Collective. For the
        model: ``recurse`` is accepted."""
        runtime = unit_of(self).runtime
        comm = runtime.comm
        runtime.reduce_over(subset(comm, comm.world_size, "reductions") if enable else comm)

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this unit's parameters now, for its next forward. Collective. No optimizer step may come between.

        Returns a handle to wait by with ``async_op``, else None when the parameters are there. The module itself shows
        them from its forward on; ``summon_full_params`` shows them outside.
        """
        unit = unit_of(self)
        for group in unit.groups:
            group.unshard(unit.runtime.next_epoch)
        handle = UnshardHandle(unit)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Free this unit's gathered parameters."""
        for group in unit_of(self).groups:
            if not group.users:
                group.reshard()
        for group in unit_of(self).groups:
            group.settle()

    def reset_iter_state(self) -> None:
        """Drop a forward or backward that an exception left half-way, with its gradients, and free everything.

        Waits for collectives under way, so every rank calls it, or none. Gradients that were reduced before stay.
        """
        unit_of(self).runtime.reset()

    def _units(self, recurse: bool) -> list[Unit]:
        modules = self.modules() if recurse else iter([self])
        return [unit.leader for module in modules if (unit := find_unit(module)) is not None]


@contextlib.contextmanager
def no_sync(runtime: Runtime) -> Iterator[None]:
    """Backward does not reduce what its strategy can keep."""
    before = runtime.reducer.requires_sync
    runtime.reducer.requires_sync = False
    try:
        yield
    finally:
        runtime.reducer.requires_sync = before


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Make ``module.<method_name>`` gather, free and reduce as the forward of ``module`` does.

    Does nothing to a module that is not wrapped. Source: the function of this name in PyTorch.
    """
    unit = find_unit(module)
    if unit is None:
        return
    method = getattr(module, method_name, None)
    if not callable(method):
        raise ValueError(f"{type(module).__name__} has no method {method_name!r}")
    method = cast("Callable[..., Any]", method)

    @functools.wraps(method)
    def gathered(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = unit.pre_forward(module, args, kwargs)
        output = None
        try:
            output = method(*args, **kwargs)
        finally:
            output = unit.post_forward(module, args, output)
        return output

    gathered.__fsdp_forward__ = True  # type: ignore[attr-defined]
    module.__dict__[method_name] = gathered


def adopt(module: nn.Module, shards: bool) -> None:
    """Make a wrapped module, whose parameters are sharded or not, an ``FSDPModule`` as well.

    Methods that read its own parameters (by what their code names) raise outside of forward: they would see this
    rank's shards, on some ranks with a fitting shape.
    """
    cls = type(module)
    body: dict[str, Any] = {"__module__": cls.__module__, "__qualname__": f"FSDP{cls.__qualname__}"}
    if shards:
        body |= _guarded_methods(cls, set(module._parameters))
    module.__class__ = type(f"FSDP{cls.__name__}", (FSDPModule, cls), body)


def _guarded_methods(cls: type[nn.Module], names: set[str]) -> dict[str, Any]:
    guarded: dict[str, Any] = {}
    for base in cls.__mro__[: cls.__mro__.index(nn.Module)]:
        for name, method in vars(base).items():
            if name in guarded or name == "forward" or name.startswith("__"):
                continue
            if isinstance(method, FunctionType) and not names.isdisjoint(method.__code__.co_names):
                guarded[name] = _guarded(method)
    return guarded


def _guarded(method: FunctionType) -> Callable[..., Any]:
    @functools.wraps(method)
    def checked(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        unit = find_unit(self)
        if unit is not None and not all(group.users or group.summoned for group in unit.groups):
            raise UnsupportedError(
                f"{method.__qualname__} reads parameters of a unit at rest, which are sharded. Expected a call of the "
                f"unit itself; or fsdp.register_fsdp_forward_method(unit, {method.__name__!r}) once, after wrapping; "
                "or fsdp.summon_full_params around this call"
            )
        return method(self, *args, **kwargs)

    return checked
