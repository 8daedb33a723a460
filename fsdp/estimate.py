"""Will it fit? The bytes that a rank will hold, from shapes alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from fsdp.flat_layout import FlatLayout
from fsdp.fully_shard import BUCKET_MB, Units, inner_units
from fsdp.precision import MixedPrecisionPolicy
from fsdp.strategy import STAGES, Trigger
from fsdp.wrap import walk_and_group


@dataclass(frozen=True)
class Estimate:
    """Bytes on one rank. ``peak`` is during a step, without activations; the others are between steps."""

    parameters: int
    gradients: int
    optimizer: int
    buffers: int
    peak: int

    @property
    def at_rest(self) -> int:
        """Everything that is held between steps, gradients included."""
        return self.parameters + self.gradients + self.optimizer + self.buffers


@dataclass(frozen=True)
class _Group:
    """Bytes of one group: whole, as a shard, its gradients whole, and the buffer that reduces them."""

    full: int
    shard: int
    state: int  # of the optimizer, for one moment
    grads: int
    kept_grads: int
    buffer: int


def estimate(
    model: nn.Module,
    stage: int,
    world_size: int,
    *,
    units: Units | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    optimizer_moments: int = 2,
) -> Estimate:
    """What ``fully_shard(model, comm, stage=stage, units=units, ...)`` will hold on a rank of ``world_size``.

    Starts nothing and needs no communicator; ``model`` is not wrapped, and may be on the meta device.

    Args:
        optimizer_moments: tensors of a parameter's size and dtype that the optimizer keeps: 2 for Adam, 1 for SGD with
            momentum, 0 for SGD.
    """
    strategy = STAGES[stage]
    policy = mp_policy or MixedPrecisionPolicy()
    parts = world_size if strategy.shards else 1
    bucket_mb = BUCKET_MB if stage < 3 and units is None else None
    taken: set[int] = set()
    by_unit: list[list[_Group]] = []  # inner before outer
    for module in [*(inner for _, inner, _ in inner_units(model, units)), model]:
        groups = walk_and_group(module, taken, bucket_mb)
        by_unit.append([_sizes(group, parts, strategy.shards, policy) for group in groups])
    every = [group for unit in by_unit for group in unit]
    parameters = sum(group.shard for group in every)
    gradients = sum(group.kept_grads for group in every)
    optimizer = optimizer_moments * sum(group.state for group in every)
    buffers = sum(b.numel() * b.element_size() for b in model.buffers())
    steady = parameters + optimizer + buffers
    if strategy.trigger is Trigger.INPUTS:
        peak = steady + _peak_of_units([_merge(unit) for unit in by_unit])
    else:
        peak = steady + _peak_of_buckets(every, strategy.shards, strategy.reduce_buffers)
    return Estimate(parameters, gradients, optimizer, buffers, max(peak, steady + gradients))


def _sizes(parameters: Sequence[nn.Parameter], parts: int, shards: bool, policy: MixedPrecisionPolicy) -> _Group:
    dtype = parameters[0].dtype
    whole = FlatLayout.even([p.numel() for p in parameters], parts)
    wanted = whole.subset([p.requires_grad for p in parameters]) if any(p.requires_grad for p in parameters) else None
    trained = 0 if wanted is None else wanted.numel
    kept = trained // parts
    exact = sum(p.numel() for p in parameters)
    item, compute, reduce = dtype.itemsize, policy.param(dtype).itemsize, policy.reduce(dtype).itemsize
    return _Group(
        full=whole.numel * compute if shards else exact * compute * (policy.param(dtype) != dtype),
        shard=whole.numel // parts * item if shards else exact * item,
        state=kept * item,
        grads=trained * (compute if shards else item),
        kept_grads=kept * item,
        buffer=trained * reduce,
    )


def _merge(groups: Sequence[_Group]) -> _Group:
    names = ("full", "shard", "state", "grads", "kept_grads", "buffer")
    return _Group(**{name: sum(getattr(group, name) for group in groups) for name in names})


def _peak_of_units(units: Sequence[_Group]) -> int:
    """Backward through units that are freed, in a root that is not: just when a unit is reduced."""
    *inner, root = units
    buffer = max(unit.buffer for unit in units)
    kept, peak = 0, 0
    for i in reversed(range(len(inner))):
        kept += inner[i].kept_grads
        following = inner[i - 1].full if i else 0
        peak = max(peak, root.full + root.grads + inner[i].full + following + inner[i].grads + buffer + kept)
    return max(peak, root.full + root.grads + buffer + kept + root.kept_grads)


def _peak_of_buckets(groups: Sequence[_Group], shards: bool, buffers: int) -> int:
    """Backward through groups that all lie gathered, from the last: just when one is reduced."""
    full = sum(group.full for group in groups)
    largest = max(group.buffer for group in groups)
    kept, peak = 0, 0
    for i, group in enumerate(reversed(groups)):
        kept += group.kept_grads
        lent = largest * min(i + 1, buffers) if shards else 0
        peak = max(peak, full + group.grads + lent + kept)
    return peak
