"""A rank's peers, for schedules that treat all of them alike.

What such a schedule does with a peer is a function of that peer, which ``check`` calls with a symbol for any of them
(see ``orbits.py``): so it is proved without following every pair of ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


class Peers:
    """Ranks other than this one, from the next on, so that no receiver is everyone's first."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self._ranks = ranks

    def each(self, make: Callable[[int], T]) -> tuple[T, ...]:
        """``make(peer)`` for each."""
        return tuple([make(peer) for peer in self._ranks])

    def backwards(self, make: Callable[[int], T]) -> tuple[T, ...]:
        """``make(peer)`` for each, the last first: the order in which their messages come."""
        return tuple([make(peer) for peer in reversed(self._ranks)])


class Symbol(ABC):
    """What stands for a rank in a proof."""

    @abstractmethod
    def peers(self, size: int, without: int | None) -> Peers: ...

    @abstractmethod
    def in_rank_order(self, size: int, make: Callable[[int], T]) -> tuple[T, ...]: ...


def peers_of(rank: int, size: int, without: int | None = None) -> Peers:
    """All ranks but ``rank``, and but ``without``."""
    if isinstance(rank, Symbol):
        return rank.peers(size, without)
    return Peers([peer for k in range(1, size) if (peer := (rank + k) % size) != without])


def in_rank_order(rank: int, size: int, make: Callable[[int], T]) -> tuple[T, ...]:
    """``make(r)`` for every rank r, from 0 on; ``rank`` is the one that asks."""
    if isinstance(rank, Symbol):
        return rank.in_rank_order(size, make)
    return tuple([make(peer) for peer in range(size)])
