"""Collective algorithms as data: generators of rounds, one family a file."""

from __future__ import annotations

from typing import NamedTuple

from collectives.schedules.direct import (
    direct_all_gather,
    direct_all_reduce,
    direct_broadcast,
    direct_gather,
    direct_reduce,
    direct_reduce_scatter,
    direct_scatter,
)
from collectives.schedules.pairwise import pairwise_all_to_all
from collectives.schedules.ring import ring_all_gather, ring_all_reduce, ring_reduce_scatter
from collectives.schedules.round import Schedule
from collectives.schedules.tree import tree_broadcast


class Entry(NamedTuple):
    """One algorithm."""

    schedule: Schedule


SCHEDULES: dict[tuple[str, str], Entry] = {
    ("all_gather", "ring"): Entry(ring_all_gather),
    ("all_gather", "direct"): Entry(direct_all_gather),
    ("reduce_scatter", "ring"): Entry(ring_reduce_scatter),
    ("reduce_scatter", "direct"): Entry(direct_reduce_scatter),
    ("all_reduce", "ring"): Entry(ring_all_reduce),
    ("all_reduce", "direct"): Entry(direct_all_reduce),
    ("broadcast", "direct"): Entry(direct_broadcast),
    ("broadcast", "tree"): Entry(tree_broadcast),
    ("reduce", "direct"): Entry(direct_reduce),
    ("gather", "direct"): Entry(direct_gather),
    ("scatter", "direct"): Entry(direct_scatter),
    ("all_to_all", "pairwise"): Entry(pairwise_all_to_all),
}
