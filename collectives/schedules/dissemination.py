"""Dissemination: in round k everyone tells the rank 2**k places on; ceil(log2 p) rounds later, all know what one knew.

Debra Hensgen, Raphael Finkel and Udi Manber, "Two algorithms for barrier synchronization", International Journal of
Parallel Programming 17(1), 1988.
"""

from __future__ import annotations

from collections.abc import Iterator

from collectives.schedules.round import OUT, Round, Span


def dissemination_barrier(rank: int, size: int) -> Iterator[Round]:
    """Nobody is through before everybody has come. Messages are one chunk of any content; OUT has one for each rank.

    Cost: ceil(log2 p) alpha, with p the world size and alpha the latency of a message.
    """
    distance = 1
    while distance < size:
        to, source = (rank + distance) % size, (rank - distance) % size
        yield Round(sends=((to, Span(OUT, rank)),), recvs=((source, Span(OUT, source)),))
        distance *= 2
