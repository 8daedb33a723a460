"""Recursive doubling: in every round, groups that know their own sum pair up. Fewest rounds, for small tensors.

R. Thakur, R. Rabenseifner and W. Gropp, "Optimization of collective communication operations in MPICH",
International Journal of High Performance Computing Applications 19(1), 2005, section 4.5.
"""

from __future__ import annotations

from collections.abc import Iterator

from collectives.schedules.round import ACC, IN, OUT, RX, Round, Span, Sum


def doubling_all_reduce(rank: int, size: int) -> Iterator[Round]:
    """Exchange the whole sum so far with a peer 1, 2, 4, ... places away.

    That pairs off the first 2**k ranks. Each of the others hands its input to one of them before, and gets the result
    after. Lower ranks' sums come first in every addition, so both peers compute the same bits.

    Cost: log2 p (alpha + n beta + n gamma) for a power of two, else with floor(log2 p), and 2 alpha + 2n beta + n gamma
    more; n is the whole tensor, p the world size, alpha the latency of a message, beta the time to send and gamma the
    time to add one element.
    """
    paired = 1 << (size.bit_length() - 1)
    helper, guest = (rank - paired, rank + paired) if size > paired else (-1, size)
    total, arriving = Span(IN, 0, size), Span(RX, 0, size)
    result, partial, next_arriving = Span(OUT, 0, size), Span(ACC, 0, size), Span(ACC, size, size)
    if size > paired:
        if helper >= 0:
            yield Round(sends=((helper, total),))
        elif guest < size:
            yield Round(recvs=((guest, arriving),), then=(Sum(partial, (total, arriving)),))
        else:
            yield Round(then=(Sum(partial, (total,)),))
        total, arriving = partial, next_arriving
    distance = 1
    while distance < paired:
        peer, into = rank ^ distance, partial if 2 * distance < paired else result
        terms = (total, arriving) if rank < peer else (arriving, total)
        add = Sum(into, terms)
        yield Round() if helper >= 0 else Round(((peer, total),), ((peer, arriving),), (add,))
        total, arriving, distance = partial, next_arriving, 2 * distance
    if size > paired:
        yield Round(sends=((guest, result),) if guest < size else (), recvs=((helper, result),) if helper >= 0 else ())
