"""Direct: every rank sends each peer its chunk, at once, and sums are added in rank order.

One round where the ring takes p - 1, for the same volume, but every rank talks to every other. A chunk's terms meet on
one rank, which adds those of ranks 0, 1, ..., p - 1 in that order: the result does not depend on how a tensor is cut
into chunks, buckets or segments, and is the same bits on every transport.

In the costs, n is the whole tensor, p the world size, alpha the latency of a message, beta the time to send and gamma
the time to add one element; a rank starts its messages one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator

from collectives.schedules.peers import in_rank_order, peers_of
from collectives.schedules.round import ACC, IN, OUT, RX, Round, Span, Sum


def direct_all_gather(rank: int, size: int) -> Iterator[Round]:
    """Everyone sends its chunk to everyone.

    Cost: (p-1) alpha + (p-1)/p n beta, in one round.
    """
    peers = peers_of(rank, size)
    yield Round(
        sends=peers.each(lambda peer: (peer, Span(OUT, rank))),
        recvs=peers.backwards(lambda peer: (peer, Span(OUT, peer))),
    )


def direct_reduce_scatter(rank: int, size: int) -> Iterator[Round]:
    """Everyone sends each owner its part of the owner's chunk; the owner adds them in rank order.

    Cost: (p-1) alpha + (p-1)/p n (beta + gamma), in one round.
    """
    yield _reduce_own_chunk(rank, size, into=Span(OUT, rank))


def direct_all_reduce(rank: int, size: int) -> Iterator[Round]:
    """Reduce-scatter, then all-gather.

    Cost: 2(p-1) alpha + 2(p-1)/p n beta + (p-1)/p n gamma, in two rounds.
    """
    yield from direct_reduce_scatter(rank, size)
    yield from direct_all_gather(rank, size)


def direct_broadcast(rank: int, size: int, root: int) -> Iterator[Round]:
    """The root deals out the chunks, then everyone sends its chunk to those who lack it.

    After M. Barnett, L. Shuler, R. van de Geijn, S. Gupta, D. Payne and J. Watts, "Interprocessor collective
    communication library (InterCom)", Scalable High Performance Computing Conference, 1994 (scatter, then collect).

    Cost: 2(p-1) alpha + 2(p-1)/p n beta, in two rounds.
    """
    others = peers_of(rank, size, without=root)
    to_each = others.each(lambda peer: (peer, Span(OUT, rank)))
    from_root = ((root, Span(OUT, root)),)
    if rank == root:
        yield Round(sends=others.each(lambda peer: (peer, Span(OUT, peer))))
        yield Round(sends=to_each)
    else:
        yield Round(recvs=((root, Span(OUT, rank)),))
        yield Round(sends=to_each, recvs=from_root + others.backwards(lambda peer: (peer, Span(OUT, peer))))


def direct_reduce(rank: int, size: int, root: int) -> Iterator[Round]:
    """Everyone adds up its own chunk, in rank order, and sends the total to the root.

    The totals travel unrounded: only the root has an OUT, so only there they are rounded, once.

    Cost: p alpha + n beta + (p-1)/p n gamma, in two rounds; the root receives 2(p-1)/p n.
    """
    if rank == root:
        peers = peers_of(rank, size)
        yield _reduce_own_chunk(rank, size, into=Span(OUT, rank))
        yield Round(
            recvs=peers.each(lambda peer: (peer, Span(ACC, peer))),
            then=peers.each(lambda peer: Sum(Span(OUT, peer), (Span(ACC, peer),))),
        )
    else:
        yield _reduce_own_chunk(rank, size, into=Span(ACC, rank))
        yield Round(sends=((root, Span(ACC, rank)),))


def direct_gather(rank: int, size: int, root: int) -> Iterator[Round]:
    """Everyone sends its chunk to the root.

    Cost: (p-1) alpha + (p-1)/p n beta at the root, in one round.
    """
    if rank == root:
        own = Sum(Span(OUT, root), (Span(IN, root),))
        yield Round(recvs=peers_of(rank, size).each(lambda peer: (peer, Span(OUT, peer))), then=(own,))
    else:
        yield Round(sends=((root, Span(IN, rank)),))


def direct_scatter(rank: int, size: int, root: int) -> Iterator[Round]:
    """The root sends everyone its chunk.

    Cost: (p-1) alpha + (p-1)/p n beta at the root, in one round.
    """
    if rank == root:
        own = Sum(Span(OUT, root), (Span(IN, root),))
        yield Round(sends=peers_of(rank, size).each(lambda peer: (peer, Span(IN, peer))), then=(own,))
    else:
        yield Round(recvs=((root, Span(OUT, rank)),))


def _reduce_own_chunk(rank: int, size: int, into: Span) -> Round:
    peers = peers_of(rank, size)
    terms = in_rank_order(rank, size, lambda peer: Span(IN if peer == rank else RX, peer))
    return Round(
        sends=peers.each(lambda peer: (peer, Span(IN, peer))),
        recvs=peers.backwards(lambda peer: (peer, Span(RX, peer))),
        then=(Sum(into, terms),),
    )
