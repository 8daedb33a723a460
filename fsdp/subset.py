"""Communicators that models need beside the one they were given."""

from __future__ import annotations

from typing import cast

from collectives import Communicator


def subset(comm: Communicator, size: int, purpose: str) -> Communicator:
    """The communicator of this rank and its neighbours: every ``size`` ranks in a row, where ``size`` divides.

    Collective when it is first asked for. Later models on ``comm`` get the same one, so that building and dropping
    models leaves no communicators behind; it is closed with ``comm``, which holds it.
    """
    known = cast("dict[tuple[int, str], Communicator]", vars(comm).setdefault("_fsdp_subsets", {}))
    if (size, purpose) not in known:
        known[size, purpose] = cast("Communicator", comm.split(comm.rank // size))
    return known[size, purpose]
