"""The counters of one group of parameters."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class UnitStatistics:
    """Collectives of a unit.

    Args:
        gathers: all_gathers started.
        gathered_nbytes: size of what they gathered, padding included.
        gather_wait: seconds that computation stood still for them.
        reductions: reduce_scatters, or all_reduces at stage 0.
        reduced_nbytes: size of what they reduced, padding included.
        reduction_wait: seconds that backward stood still for them.
    """

    gathers: int = 0
    gathered_nbytes: int = 0
    gather_wait: float = 0.0
    reductions: int = 0
    reduced_nbytes: int = 0
    reduction_wait: float = 0.0
