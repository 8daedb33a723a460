"""The ring: every rank talks to its two neighbours only, so each link carries the least that any algorithm could.

Pitch Patarasuk and Xin Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", Journal of
Parallel and Distributed Computing 69(2), 2009. In the costs, n is the whole tensor, p the world size, alpha the
latency of a message, beta the time to send and gamma the time to add one element.
"""

from __future__ import annotations

from collections.abc import Iterator

from collectives.schedules.round import ACC, IN, OUT, RX, Round, Span, Sum


def ring_all_gather(rank: int, size: int) -> Iterator[Round]:
    """Pass on what came last; after size - 1 rounds everyone has every chunk.

    Cost: (p-1) alpha + (p-1)/p n beta.
    """
    right, left = (rank + 1) % size, (rank - 1) % size
    for k in range(size - 1):
        yield Round(sends=((right, Span(OUT, rank - k)),), recvs=((left, Span(OUT, rank - k - 1)),))


def ring_reduce_scatter(rank: int, size: int) -> Iterator[Round]:
    """A partial sum of each chunk goes once round, every rank adds its own part, and it ends at its owner.

    Chunk c sets out from rank c + 1, so its terms are added in the order c + 1, ..., p - 1, 0, ..., c. The two scratch
    slots take turns: while one partial sum leaves, the next arrives.

    Cost: (p-1) alpha + (p-1)/p n (beta + gamma).
    """
    right, left = (rank + 1) % size, (rank - 1) % size
    partial = Span(IN, rank - 1)
    for k in range(size - 1):
        arriving = Span(ACC if k else RX, k % 2)
        total = Span(ACC, k % 2) if k < size - 2 else Span(OUT, rank)
        add = Sum(total, (arriving, Span(IN, rank - k - 2)))
        yield Round(sends=((right, partial),), recvs=((left, arriving),), then=(add,))
        partial = total


def ring_all_reduce(rank: int, size: int) -> Iterator[Round]:
    """Reduce-scatter, then all-gather: twice round the ring.

    Cost: 2(p-1) alpha + 2(p-1)/p n beta + (p-1)/p n gamma.
    """
    yield from ring_reduce_scatter(rank, size)
    yield from ring_all_gather(rank, size)
