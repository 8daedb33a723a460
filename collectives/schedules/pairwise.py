"""Pairwise exchange: in every round each rank sends to one peer and receives from one, so no rank is overrun.

R. Thakur, R. Rabenseifner and W. Gropp, "Optimization of collective communication operations in MPICH",
International Journal of High Performance Computing Applications 19(1), 2005, section 4.4.
"""

from __future__ import annotations

from collections.abc import Iterator

from collectives.schedules.round import IN, OUT, Round, Span


def pairwise_all_to_all(rank: int, size: int) -> Iterator[Round]:
    """In round k, send to the rank k + 1 places on and receive from the one k + 1 places back.

    Cost: (p-1) alpha + (p-1)/p n beta, with p the world size, n the elements of a rank's input, alpha the latency of a
    message and beta the time to send one element.
    """
    for step in range(1, size):
        to, source = (rank + step) % size, (rank - step) % size
        yield Round(sends=((to, Span(IN, to)),), recvs=((source, Span(OUT, source)),))
