"""Circulant graphs: as few rounds as a tree, as little volume as a ring, for any number of ranks.

Jesper Larsson Träff, "Optimal, Non-pipelined Reduce-scatter and Allreduce Algorithms", arXiv:2410.14234, 2024. Its
all-gather is that of J. Bruck, C.-T. Ho, S. Kipnis, E. Upfal and D. Weathersby, "Efficient algorithms for all-to-all
communications in multiport message-passing systems", IEEE Transactions on Parallel and Distributed Systems 8(11), 1997.

In the costs, n is the whole tensor, p the world size, alpha the latency of a message, beta the time to send and gamma
the time to add one element.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from collectives.schedules.round import ACC, IN, OUT, RX, Round, Span, Sum


def circulant_reduce_scatter(rank: int, size: int) -> Iterator[Round]:
    """Hand on the partial sums of the farther half of the chunks, until only one's own is left.

    A rank holds partial sums of the chunks rank, rank + 1, ..., the j-th in scratch slot j. What it hands on to rank
    + ``keep`` are the first chunks that one holds.

    Cost: ceil(log2 p) alpha + (p-1)/p n (beta + gamma).
    """
    for held, keep in pairwise(_halvings(size)):
        moved = held - keep
        if held == size:
            own, away, arriving = Span(IN, rank, moved), Span(IN, rank + keep, moved), Span(RX, 0, moved)
        else:
            own, away, arriving = Span(ACC, 0, moved), Span(ACC, keep, moved), Span(ACC, held, moved)
        then = [Sum(Span(OUT, rank) if keep == 1 else Span(ACC, 0, moved), (own, arriving))]
        if held == size and moved < keep:
            then.append(Sum(Span(ACC, moved), (Span(IN, rank + moved),)))
        yield Round(sends=(((rank + keep) % size, away),), recvs=(((rank - keep) % size, arriving),), then=tuple(then))


def circulant_all_gather(rank: int, size: int) -> Iterator[Round]:
    """The reduce-scatter backwards: hand back the first chunks held, until everyone holds all.

    Cost: ceil(log2 p) alpha + (p-1)/p n beta.
    """
    for have, want in pairwise(reversed(_halvings(size))):
        moved = want - have
        yield Round(
            sends=(((rank - have) % size, Span(OUT, rank, moved)),),
            recvs=(((rank + have) % size, Span(OUT, rank + have, moved)),),
        )


def circulant_all_reduce(rank: int, size: int) -> Iterator[Round]:
    """Reduce-scatter, then all-gather.

    Cost: 2 ceil(log2 p) alpha + 2(p-1)/p n beta + (p-1)/p n gamma.
    """
    yield from circulant_reduce_scatter(rank, size)
    yield from circulant_all_gather(rank, size)


def _halvings(size: int) -> list[int]:
    """``size`` halved, rounding up, down to 1."""
    halvings = [size]
    while halvings[-1] > 1:
        halvings.append((halvings[-1] + 1) // 2)
    return halvings
