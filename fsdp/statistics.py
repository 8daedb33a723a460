"""What the collectives of each unit moved, and how long the unit waited for them."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from fsdp.unit import find_unit
from fsdp.unit_statistics import UnitStatistics


def unit_statistics(model: nn.Module) -> dict[str, UnitStatistics]:
    """Totals of each unit of ``model`` since it was wrapped, by the name of its module ("" for ``model`` itself).

    This rank's view: not collective. The values are copies.
    """
    found = {}
    for name, module in model.named_modules():
        unit = find_unit(module)
        if unit is not None:
            found[name] = _sum(group.statistics for group in unit.own_groups)
    return found


def _sum(parts: Iterable[UnitStatistics]) -> UnitStatistics:
    total = UnitStatistics()
    for part in parts:
        for name, value in vars(part).items():
            setattr(total, name, getattr(total, name) + value)
    return total
