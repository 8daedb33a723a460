"""What tells DDP, ZeRO and FSDP apart. The core reads these fields and never asks for a stage by number."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Trigger(enum.Enum):
    """When the gradients of a group are reduced. [Note: reduction triggers] in runtime.py says why."""

    INPUTS = "when backward has passed the inputs of the unit"
    ORDER = "when every gradient of the group and of all groups before it in a fixed order is there"
    END = "at the end of backward"


@dataclass(frozen=True)
class Strategy:
    """One row of the table.

    Args:
        shards: at rest a rank holds 1/N of the parameters, and of their gradients and optimizer state.
        frees_after_forward: gathered parameters are freed after the unit's forward, and gathered again for backward.
        trigger: what starts a reduction.
        keeps_full_gradients: under ``no_sync`` full gradients add up on the rank; otherwise every backward is reduced.
        reduce_buffers: how many reductions may be under way, each with an input buffer of a group's size.
    """

    name: str
    shards: bool
    frees_after_forward: bool
    trigger: Trigger
    keeps_full_gradients: bool
    reduce_buffers: int


STAGES = (
    Strategy("DDP", False, False, Trigger.ORDER, True, 2**31),  # buckets are the gradients: nothing to run out of
    Strategy("ZeRO-1", True, False, Trigger.ORDER, True, 2),
    Strategy("ZeRO-2", True, False, Trigger.ORDER, False, 2),
    Strategy("FSDP", True, True, Trigger.INPUTS, False, 1),
)
# Small parameters of many units in one group: one gather a step, and one reduction when the last unit is done.
RESIDENT = Strategy("FSDP, small parameters", True, False, Trigger.END, False, 1)
