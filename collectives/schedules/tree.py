"""Binomial trees: the number of ranks that are done doubles in every round. Fewest rounds, for small tensors.

R. Thakur, R. Rabenseifner and W. Gropp, "Optimization of collective communication operations in MPICH",
International Journal of High Performance Computing Applications 19(1), 2005. In the costs, n is the whole tensor, p the
world size, alpha the latency of a message, beta the time to send and gamma the time to add one element.
"""

from __future__ import annotations

from collections.abc import Iterator

from collectives.schedules.round import OUT, Round, Span


def tree_broadcast(rank: int, size: int, root: int) -> Iterator[Round]:
    """Whoever has the tensor sends it to one that has not, ``reach`` places on from the root.

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
