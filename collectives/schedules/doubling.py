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
    steps = [1 << k for k in range(size.bit_length() - 1)]
    paired = 1 << len(steps)
    total, arriving, result = Span(IN, 0, size), Span(RX, 0, size), Span(OUT, 0, size)
    if rank >= paired:
        yield Round(sends=((rank - paired, total),))
        yield from (Round() for _ in steps)
        yield Round(recvs=((rank - paired, result),))
        return
    guest, sums, sums_arriving = rank + paired, Span(ACC, 0, size), Span(ACC, size, size)
    if size > paired:
        if guest < size:
            yield Round(recvs=((guest, arriving),), then=(Sum(sums, (total, arriving)),))
        else:
            yield Round(then=(Sum(sums, (total,)),))
        total, arriving = sums, sums_arriving
    for distance in steps:
        peer = rank ^ distance
        terms = (total, arriving) if rank < peer else (arriving, total)
        add = Sum(sums if 2 * distance < paired else result, terms)
        yield Round(sends=((peer, total),), recvs=((peer, arriving),), then=(add,))
        total, arriving = sums, sums_arriving
    if size > paired:
        yield Round(sends=((guest, result),)) if guest < size else Round()
