"""Collective algorithms as data: generators of rounds, one family a file.

``SCHEDULES`` lists them by (operation, algorithm); ``check`` proves any of them, or one of your own.
"""

from __future__ import annotations

from collectives.schedules.catalogue import SCHEDULES, Algorithm
from collectives.schedules.check import Report, ScheduleError, check
from collectives.schedules.circulant import circulant_all_gather, circulant_all_reduce, circulant_reduce_scatter
from collectives.schedules.direct import (
    direct_all_gather,
    direct_all_reduce,
    direct_broadcast,
    direct_gather,
    direct_reduce,
    direct_reduce_scatter,
    direct_scatter,
)
from collectives.schedules.dissemination import dissemination_barrier
from collectives.schedules.doubling import doubling_all_reduce
from collectives.schedules.pairwise import pairwise_all_to_all
from collectives.schedules.ring import ring_all_gather, ring_all_reduce, ring_reduce_scatter
from collectives.schedules.round import ACC, IN, OUT, RX, Buf, Round, Schedule, Span, Sum
from collectives.schedules.tree import tree_broadcast, tree_reduce

__all__ = [
    "ACC",
    "IN",
    "OUT",
    "RX",
    "SCHEDULES",
    "Algorithm",
    "Buf",
    "Report",
    "Round",
    "Schedule",
    "ScheduleError",
    "Span",
    "Sum",
    "check",
    "circulant_all_gather",
    "circulant_all_reduce",
    "circulant_reduce_scatter",
    "direct_all_gather",
    "direct_all_reduce",
    "direct_broadcast",
    "direct_gather",
    "direct_reduce",
    "direct_reduce_scatter",
    "direct_scatter",
    "dissemination_barrier",
    "doubling_all_reduce",
    "pairwise_all_to_all",
    "ring_all_gather",
    "ring_all_reduce",
    "ring_reduce_scatter",
    "tree_broadcast",
    "tree_reduce",
]
