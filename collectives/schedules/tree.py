"""Binomial trees: the number of ranks that are done doubles in every round. Fewest rounds, for small tensors.

R. Thakur, R. Rabenseifner and W. Gropp, "Optimization of collective communication operations in MPICH",
International Journal of High Performance Computing Applications 19(1), 2005. In the costs, n is the whole tensor, p the
world size, alpha the latency of a message, beta the time to send and gamma the time to add one element.
"""

from __future__ import annotations

from collections.abc import Iterator

from collectives.schedules.round import ACC, IN, OUT, RX, Round, Span, Sum


def tree_broadcast(rank: int, size: int, root: int) -> Iterator[Round]:
    """Whoever has the tensor sends it to one that has not, 1, 2, 4, ... places on from the root.

    Cost: ceil(log2 p) (alpha + n beta).
    """
    place, whole, reach = (rank - root) % size, Span(OUT, 0, size), 1
    while reach < size:
        if place < reach and place + reach < size:
            yield Round(sends=(((rank + reach) % size, whole),))
        elif reach <= place < 2 * reach:
            yield Round(recvs=(((rank - reach) % size, whole),))
        else:
            yield Round()
        reach *= 2


def tree_reduce(rank: int, size: int, root: int) -> Iterator[Round]:
    """The broadcast backwards: whoever was sent the tensor there sends its sum here, when its own branches are in.

    Cost: ceil(log2 p) (alpha + n beta + n gamma).
    """
    place, total, reach = (rank - root) % size, Span(IN, 0, size), (1 << (size - 1).bit_length()) // 2
    while reach:
        if place < reach and place + reach < size:
            leaf = place + 3 * reach >= size  # a leaf sends its input, others a sum
            arriving = Span(RX, 0, size) if leaf else Span(ACC, size, size)
            into = Span(ACC if place or reach > 1 else OUT, 0, size)
            yield Round(recvs=(((rank + reach) % size, arriving),), then=(Sum(into, (total, arriving)),))
            total = into
        elif reach <= place < 2 * reach:
            yield Round(sends=(((rank - reach) % size, total),))
        else:
            yield Round()
        reach //= 2
