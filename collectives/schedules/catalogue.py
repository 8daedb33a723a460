"""Every schedule that comes with the package, with what it promises."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

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
from collectives.schedules.round import Schedule
from collectives.schedules.tree import tree_broadcast, tree_reduce


class Algorithm(NamedTuple):
    """A schedule and its promises.

    ``rounds`` and ``volume`` are functions of the world size: how many rounds, and how many chunks (a chunk is 1/size
    of the whole) the busiest rank sends. ``in_rank_order``: contributions are added in the order of ranks, so the bits
    do not depend on how tensors are cut. ``alike``: every rank does what rank 0 does, rotated.
    """

    schedule: Schedule
    rounds: Callable[[int], int]
    volume: Callable[[int], int]
    in_rank_order: bool = False
    alike: bool = True


def _log2(p: int) -> int:
    return (p - 1).bit_length()


def _doubling_rounds(p: int) -> int:
    return p.bit_length() - 1 + (0 if p.bit_count() == 1 else 2)


def _doubling_volume(p: int) -> int:
    return p * (p.bit_length() - 1 + (0 if p.bit_count() == 1 else 1))


SCHEDULES: Mapping[tuple[str, str], Algorithm] = MappingProxyType(
    {
        ("all_gather", "ring"): Algorithm(ring_all_gather, lambda p: p - 1, lambda p: p - 1),
        ("all_gather", "direct"): Algorithm(direct_all_gather, lambda p: 1, lambda p: p - 1),
        ("all_gather", "circulant"): Algorithm(circulant_all_gather, _log2, lambda p: p - 1),
        ("reduce_scatter", "ring"): Algorithm(ring_reduce_scatter, lambda p: p - 1, lambda p: p - 1),
        ("reduce_scatter", "direct"): Algorithm(direct_reduce_scatter, lambda p: 1, lambda p: p - 1, True),
        ("reduce_scatter", "circulant"): Algorithm(circulant_reduce_scatter, _log2, lambda p: p - 1),
        ("all_reduce", "ring"): Algorithm(ring_all_reduce, lambda p: 2 * (p - 1), lambda p: 2 * (p - 1)),
        ("all_reduce", "direct"): Algorithm(direct_all_reduce, lambda p: 2, lambda p: 2 * (p - 1), True),
        ("all_reduce", "circulant"): Algorithm(circulant_all_reduce, lambda p: 2 * _log2(p), lambda p: 2 * (p - 1)),
        ("all_reduce", "doubling"): Algorithm(doubling_all_reduce, _doubling_rounds, _doubling_volume, alike=False),
        ("broadcast", "direct"): Algorithm(direct_broadcast, lambda p: 2, lambda p: 2 * (p - 1), alike=False),
        ("broadcast", "tree"): Algorithm(tree_broadcast, _log2, lambda p: p * _log2(p), alike=False),
        ("reduce", "direct"): Algorithm(direct_reduce, lambda p: 2, lambda p: p if p > 1 else 0, True, False),
        ("reduce", "tree"): Algorithm(tree_reduce, _log2, lambda p: p if p > 1 else 0, alike=False),
        ("gather", "direct"): Algorithm(direct_gather, lambda p: 1, lambda p: min(1, p - 1), alike=False),
        ("scatter", "direct"): Algorithm(direct_scatter, lambda p: 1, lambda p: p - 1, alike=False),
        ("all_to_all", "pairwise"): Algorithm(pairwise_all_to_all, lambda p: p - 1, lambda p: p - 1),
        ("barrier", "dissemination"): Algorithm(dissemination_barrier, _log2, _log2),
    }
)
