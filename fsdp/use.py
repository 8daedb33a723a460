"""One forward of a unit, as long as backward through it may come."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fsdp.param_group import ParamGroup
    from fsdp.unit import Unit


class Progress(enum.Enum):
    """What became of one forward of a unit."""

    PENDING = "backward may come"  # -> BEGUN by the gradient of an output
    BEGUN = "backward computes in the unit"  # -> DONE when it has passed the inputs, or at the end of backward
    DONE = "backward has passed"  # -> BEGUN by another backward through a retained graph


class Use:
    """One forward of a unit. The autograd graph holds it, so it is gone when its backward can no longer come.

    Args:
        unit: it ran.
        before: the unit that backward comes to next: the last one inside of it, or else the one that ran before it.
    """

    __slots__ = ("__weakref__", "before", "groups", "progress", "unit")

    def __init__(self, unit: Unit, before: Unit | None) -> None:
        self.unit = unit
        self.groups: list[ParamGroup] = unit.groups
        self.before = before
        self.progress = Progress.PENDING
