"""A module whose parameters are gathered together: the hooks that turn its forward and backward into calls.

[Note: hooks]
    pre-forward       gather, let the modules hold the full leaves, pass the inputs through an identity
    forward           computes
    post-forward      hook the outputs, give the modules their shards back, free
    output's hook     the first gradient of an output: gather, let the modules hold the full leaves
    backward          computes
    identity          all gradients of the inputs: reduce, free
The identity was made before everything else in the unit, and autograd runs what was made last first, and accumulation
into leaves before everything: so when it runs, the unit's gradients are there. Units whose inputs need no gradient are
reduced at the end of backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import nn

from collectives.errors import UnsupportedError
from fsdp.param_group import ParamGroup
from fsdp.precision import MixedPrecisionPolicy
from fsdp.runtime import Runtime
from fsdp.strategy import Trigger
from fsdp.together import Together
from fsdp.tree import map_tensors, tensors
from fsdp.use import Use

_Function = TypeVar("_Function", bound=Callable[..., Any])


def _eagerly(function: _Function) -> _Function:
    """torch.compile of a module would trace into its hooks: a border of a unit is a border of a graph."""
    return cast("_Function", torch._disable_dynamo(function))  # type: ignore[attr-defined]


class _Inputs(torch.autograd.Function):
    """The identity, whose backward says that all gradients of the inputs are there."""

    @staticmethod
    def forward(ctx: Any, runtime: Runtime, use: Use, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.runtime, ctx.use = runtime, use
        ctx.set_materialize_grads(False)
        # Detached, and not the inputs themselves: those would come out as views that forbid changes in place.
        return tuple([tensor.detach() for tensor in inputs])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        ctx.runtime.after_backward(ctx.use)
        return (None, None, *gradients)


class Unit:
    """A wrapped module.

    Args:
        module: whose forward and backward need the groups.
        groups: its own groups. ``groups`` also has those of inner or earlier units whose parameters it shares.
        policy: dtypes of inputs and outputs.
        reshard_after_forward: free after forward; None leaves it to whether the unit turns out to be the root.
        buffer_owners: the modules and names of its buffers.
    """

    def __init__(
        self,
        module: nn.Module,
        groups: list[ParamGroup],
        policy: MixedPrecisionPolicy,
        reshard_after_forward: bool | None,
        buffer_owners: list[tuple[nn.Module, str]],
    ) -> None:
        self.module = module
        self.own_groups = groups
        self.groups = list(groups)
        self.policy = policy
        self.buffer_owners = buffer_owners
        self.runtime: Runtime
        self.unresolved: list[tuple[nn.Parameter, nn.Module, str]] = []  # tied to a unit that is not of the model
        self.reshard_after_forward = reshard_after_forward
        # Forwards under way, innermost last, and whether they recompute; None for one on summoned parameters.
        self._uses: list[tuple[Use, bool] | None] = []
        self.gathers_for_backward = True  # otherwise backward does not read the parameters
        self.forward_prefetch: list[Unit] | None = None  # what to gather ahead; None: what came next last time
        self.backward_prefetch: list[Unit] | None = None
        self.leader: Unit = self  # of several modules that are one unit: who owns the groups
        self.together: Together | None = None
        self._cast = policy.param_dtype if policy.cast_forward_inputs else None
        module.register_forward_pre_hook(self.pre_forward, prepend=True, with_kwargs=True)
        module.register_forward_hook(self.post_forward, always_call=True)

    @property
    def frees_after_forward(self) -> bool:
        """Whether its parameters are freed between forward and backward."""
        if not self.own_groups:
            return self.leader is not self and self.leader.frees_after_forward
        if not self.own_groups[0].strategy.frees_after_forward:
            return False
        if self.reshard_after_forward is None:
            return self is not self.runtime.root
        return self.reshard_after_forward

    def frees(self, group: ParamGroup) -> bool:
        """Whether a forward of it frees ``group``, which may be another unit's, when nobody else computes with it."""
        return group.strategy.frees_after_forward and (self.frees_after_forward or group not in self.leader.own_groups)

    @_eagerly
    def pre_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Gather, and let the modules hold the full leaves. Returns the inputs to compute with."""
        if any(group.summoned for group in self.groups):
            self._check_summoned()
            self._uses.append(None)
            return args, kwargs
        recomputes = torch._C._current_graph_task_id() != -1
        if recomputes:
            use = self.runtime.gather_again(self)
        else:
            self.runtime.begin_forward(self)
            try:
                use = self.runtime.gather(self)
            except BaseException:
                self.runtime.cancel_forward()
                raise
        self._uses.append((use, recomputes))
        if self.together is not None and not recomputes:
            self.together.begin()
        for group in self.groups:
            group.enter()
        if self._cast is not None:
            args, kwargs = map_tensors(self._to_param_dtype, (args, kwargs))
        if torch.is_grad_enabled():
            args, kwargs = self._watch_inputs(use, args, kwargs)
        return args, kwargs

    def _to_param_dtype(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._cast) if tensor.is_floating_point() else tensor

    def _to_output_dtype(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.policy.output_dtype) if tensor.is_floating_point() else tensor

    def _watch_inputs(
        self, use: Use, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Pass the inputs that need gradients through the identity, all at once: its backward waits for all."""
        watches = False
        for group in self.groups:
            if group.strategy.trigger is Trigger.INPUTS:
                group.remember(use)
                watches = True
        if not watches:
            return args, kwargs
        if not kwargs and all(type(value) is torch.Tensor for value in args):  # nothing nested, as usual
            found = [value for value in args if value.requires_grad]
            if not found:
                return args, kwargs
            watched = iter(_Inputs.apply(self.runtime, use, *found))  # type: ignore[no-untyped-call]
            return tuple([next(watched) if value.requires_grad else value for value in args]), kwargs
        found = []
        map_tensors(lambda t: found.append(t) or t if t.requires_grad else t, (args, kwargs))  # type: ignore[func-returns-value]
        if not found:
            return args, kwargs
        watched = iter(_Inputs.apply(self.runtime, use, *found))  # type: ignore[no-untyped-call]
        return map_tensors(lambda t: next(watched) if t.requires_grad else t, (args, kwargs))  # type: ignore[no-any-return]

    def _check_summoned(self) -> None:
        if torch.is_grad_enabled() or not all(group.summoned for group in self.groups):
            raise UnsupportedError(
                f"a forward of {type(self.module).__name__} inside summon_full_params; expected one under "
                "torch.no_grad(), of a module all of whose parameters are whole"
            )

    @_eagerly
    def post_forward(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Give the shards back and free. Also called after an exception, with no output."""
        under_way = self._uses.pop() if self._uses else None
        if under_way is None:
            return output  # the pre-forward hook itself failed, or had nothing to do
        use, recomputes = under_way
        if self.policy.output_dtype is not None:
            output = map_tensors(self._to_output_dtype, output)
        differentiable = torch.is_grad_enabled() and self._watch_outputs(use, output)
        last = self.together is None or recomputes or self.together.end(self)
        for group in self.groups:
            if group.leave() and last and self._frees(group, differentiable, recomputes):
                group.reshard(after_forward=differentiable)
        if not recomputes:
            self.runtime.prefetch.ran(use)
            self.runtime.end_forward(differentiable)
        return output

    def _frees(self, group: ParamGroup, differentiable: bool, recomputes: bool) -> bool:
        if recomputes and (differentiable or group.touched):
            return False
        return self.frees(group)

    def _watch_outputs(self, use: Use, output: Any) -> bool:
        """Have the parameters gathered when the gradient of any output is there. Whether any output can have one."""
        runtime = self.runtime
        shards = any(group.strategy.shards for group in use.groups)

        def before_backward(_: torch.Tensor) -> None:
            if shards and torch.is_grad_enabled():
                raise UnsupportedError(
                    "backward with create_graph=True through sharded parameters, which are freed before the second "
                    "backward; expected stage 0 or DistributedDataParallel"
                )
            runtime.before_backward(use)

        found = False
        for tensor in tensors(output):
            if tensor.requires_grad:
                found = True
                tensor.register_hook(before_backward)  # type: ignore[no-untyped-call]
        return found

    def reset(self) -> None:
        """Forget the forwards under way."""
        self._uses.clear()


def unit_of(module: nn.Module) -> Unit:
    """The unit of a wrapped module. Raises ``ValueError`` for any other."""
    unit = find_unit(module)
    if unit is None:
        raise ValueError(f"expected a module wrapped by fully_shard or DistributedDataParallel, got {type(module)}")
    return unit


def find_unit(module: nn.Module) -> Unit | None:
    """The unit of a wrapped module, or None."""
    return cast("Unit | None", module.__dict__.get("_fsdp_unit"))
