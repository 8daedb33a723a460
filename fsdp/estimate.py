"""Will it fit? The bytes that a rank will hold, from shapes alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from fsdp.flat_layout import FlatLayout
from fsdp.fully_shard import BUCKET_MB, Units, inner_units, resharding
from fsdp.precision import MixedPrecisionPolicy
from fsdp.strategy import STAGES, Trigger
from fsdp.wrap import Resident, resident_groups, walk_and_group


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


@dataclass(frozen=True)
class _Unit:
    """Bytes of a unit. ``waits`` is held from its forward to the end of its backward, ``opens`` only while it runs."""

    whole: _Group
    waits: int
    opens: int


def estimate(
    model: nn.Module,
    stage: int,
    world_size: int,
    *,
    units: Units | None = None,
    reshard_after_forward: bool | int | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    persistence_threshold: int = 0,
    optimizer_moments: int = 2,
) -> Estimate:
    """What ``fully_shard(model, comm, stage=stage, units=units, ...)`` will hold on a rank of ``world_size``.

    Starts nothing and needs no communicator; ``model`` is not wrapped, and may be on the meta device. Where ranks of a
    host share memory, they have one copy of what is gathered, and hold less than this.

    Args:
        reshard_after_forward, persistence_threshold: see ``fully_shard``.
        optimizer_moments: tensors of a parameter's size and dtype that the optimizer keeps: 2 for Adam, 1 for SGD with
            momentum, 0 for SGD.
    """
    strategy = STAGES[stage]
    policy = mp_policy or MixedPrecisionPolicy()
    parts = world_size if strategy.shards else 1
    bucket_mb = BUCKET_MB if stage < 3 and units is None else None
    resident = Resident(persistence_threshold) if persistence_threshold > 0 and stage == 3 else None
    taken: set[int] = set()
    by_unit: list[_Unit] = []  # inner before outer
    every: list[_Group] = []
    chosen = [(module, own) for _, module, own in inner_units(model, units)]
    for module, own in [*chosen, (model, {})]:
        own_policy = own.get("mp_policy", policy) or MixedPrecisionPolicy()
        groups = [
            _sizes(group, parts, strategy.shards, own_policy)
            for group in walk_and_group(module, taken, bucket_mb, resident)
        ]
        every += groups
        reshard, size = resharding(own.get("reshard_after_forward", reshard_after_forward), world_size)
        by_unit.append(_unit(_merge(groups), module is not model if reshard is None else reshard, size))
    small = _merge([_sizes(g, parts, True, policy) for g in resident_groups(resident)] if resident is not None else [])
    parameters = sum(group.shard for group in (*every, small))
    gradients = sum(group.kept_grads for group in (*every, small))
    optimizer = optimizer_moments * sum(group.state for group in (*every, small))
    buffers = sum(b.numel() * b.element_size() for b in model.buffers())
    steady = parameters + optimizer + buffers
    if strategy.trigger is Trigger.INPUTS:
        peak = steady + _peak_of_units(by_unit, small)
    else:
        peak = steady + _peak_of_buckets(every, strategy.shards, strategy.reduce_buffers)
    return Estimate(parameters, gradients, optimizer, buffers, max(peak, steady + gradients))


def _unit(whole: _Group, frees: bool, size: int | None) -> _Unit:
    """``size``: how many ranks hold a copy of it together between forward and backward; None: all, or nobody."""
    if not frees:
        return _Unit(whole, whole.full, 0)
    return _Unit(whole, 0 if size is None else whole.full // size, whole.full)


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


def _peak_of_units(units: Sequence[_Unit], small: _Group) -> int:
    """Backward through units from the last to the first, then what is left: small parameters, and the root.

    The root is gathered all the time, and so is what is small.
    """
    *inner, root = units
    buffer = max(small.buffer, *(unit.whole.buffer for unit in units))
    always = root.waits + root.opens + small.full + small.grads + root.whole.grads + buffer
    kept, peak = 0, 0
    for i in reversed(range(len(inner))):
        unit = inner[i]
        kept += unit.whole.kept_grads
        following = inner[i - 1].opens if i else 0
        waiting = sum(other.waits for other in inner[: i + 1])
        peak = max(peak, always + waiting + unit.opens + following + unit.whole.grads + kept)
    left = always + kept + small.kept_grads
    return max(peak, left, left - small.grads + root.whole.kept_grads)


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
