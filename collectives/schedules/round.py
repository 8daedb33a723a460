"""What a schedule is made of: rounds of messages, each followed by sums.

A schedule is a pure generator of ``Round`` for one (rank, size). It names chunks, never bytes or tensors, so that one
description can be executed, proved, drawn and timed.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeAlias


class Buf(enum.Enum):
    """Where a chunk lies. IN is never written; OUT is the result; ACC holds partial sums; RX receives.

    IN and OUT are the caller's tensors, cut into ``size`` chunks (where a rank owns only one chunk, that is chunk
    ``rank``). In an all_reduce they are one tensor: chunk c of OUT may be written only when IN's is no longer needed.
    ACC and RX are scratch, as many slots as the schedule uses. A slot is as long as what was last put there; ACC is in
    the accumulation dtype (float32 for 16-bit floats), RX in the tensor's own.
    """

    IN = "in"
    OUT = "out"
    ACC = "acc"
    RX = "rx"


IN, OUT, ACC, RX = Buf.IN, Buf.OUT, Buf.ACC, Buf.RX


class Span(NamedTuple):
    """``count`` chunks from chunk ``first`` on; in IN and OUT modulo the world size."""

    buf: Buf
    first: int
    count: int = 1  # type: ignore[assignment]  # the tuple method of that name is not wanted here


class Sum(NamedTuple):
    """``into`` = the terms combined left to right in the accumulation dtype, rounded once; one term is a copy.

    In a reduction a sum into OUT is that chunk's last: AVG divides there. Partial sums belong in ACC.
    """

    into: Span
    terms: tuple[Span, ...]


class Round(NamedTuple):
    """Messages that are posted together, as (peer, span), and the sums that follow when all of them are done.

    A message has the dtype of its spans: the accumulation dtype for ACC, the tensor's own for IN, OUT and RX; so ACC is
    received as ACC. A message into scratch is as long as the sum that reads it in the same round.
    """

    sends: tuple[tuple[int, Span], ...] = ()
    recvs: tuple[tuple[int, Span], ...] = ()
    then: tuple[Sum, ...] = ()


Schedule: TypeAlias = Callable[..., Iterator[Round]]
