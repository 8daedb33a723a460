"""Schedules in which all ranks do the same, rotated: one rank's part, or one root's, then stands for all.

[Note: a rank as a symbol] The proof needs no comparison of ranks. A schedule is run once with a ``Turn`` in place of
its rank: a number that is known up to a rotation of all ranks. It may be added to, reduced modulo the world size, and
compared with other ranks; whatever would depend on which rank it is raises. So a schedule that runs through names every
peer, and every chunk of IN and OUT, as a distance from the rank, and its part for rank 0 is everyone's part, rotated.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

from collectives.schedules.round import ACC, RX, Round, Schedule, Span, Sum


class UnlikeError(Exception):
    """The schedule looks at which rank or root it has, and not only at distances between ranks."""


class Turn:
    """Rank ``offset``, with all ranks rotated by an unknown number: see [Note: a rank as a symbol]."""

    __slots__ = ("offset", "reduced", "size")

    def __init__(self, offset: int, size: int, reduced: bool = True) -> None:
        self.offset, self.size = offset, size
        self.reduced = reduced  # from 0 to size - 1, whatever the rotation

    def __add__(self, other: int) -> Turn:
        if isinstance(other, int):
            return Turn(self.offset + other, self.size, self.reduced and other == 0)
        return NotImplemented

    __radd__ = __add__

    def __sub__(self, other: int | Turn) -> Any:
        if isinstance(other, Turn):
            return _Distance(self.offset - other.offset, self.size)
        return self + -other

    def __mod__(self, size: int) -> Turn:
        if size != self.size:
            raise UnlikeError
        return Turn(self.offset % size, size)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Turn) and self.reduced and other.reduced:
            return (self.offset - other.offset) % self.size == 0
        raise UnlikeError

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = None  # type: ignore[assignment]

    def __bool__(self) -> NoReturn:
        raise UnlikeError


class _Distance:
    """Between two ranks: known modulo the world size only."""

    def __init__(self, distance: int, size: int) -> None:
        self.distance, self.size = distance, size

    def __mod__(self, size: int) -> int:
        if size != self.size:
            raise UnlikeError
        return self.distance % size

    def __eq__(self, other: object) -> bool:
        raise UnlikeError

    __hash__ = None  # type: ignore[assignment]

    def __bool__(self) -> NoReturn:
        raise UnlikeError


def part_of_all(schedule: Schedule, size: int) -> Iterator[Round]:
    """Rank 0's part of ``schedule``, which is shown to be everyone's, rotated; raises ``UnlikeError`` if it is not."""
    for round in _symbolic(schedule, Turn(0, size), size):
        yield _resolved(round, chunks_stay=False)


def check_roots(schedule: Schedule, size: int, *, chunks_alike: bool) -> None:
    """Show that ``schedule`` for any root is that for root 0, rotated; raises ``UnlikeError`` if it is not.

    ``chunks_alike``: no chunk belongs to a rank, so that ranks may be rotated and chunks stay where they are.
    """
    ways = {False, True} if chunks_alike else {False}
    for rank in range(size):
        for round in _symbolic(schedule, Turn(rank, size), size, Turn(0, size)):
            ways -= {stay for stay in ways if not _fits(round, stay)}
            if not ways:
                raise UnlikeError


def _symbolic(schedule: Schedule, *arguments: Any) -> Iterator[Round]:
    try:
        yield from schedule(*arguments)
    except (TypeError, AttributeError) as error:  # what a Turn cannot do
        raise UnlikeError from error


def _fits(round: Round, chunks_stay: bool) -> bool:
    try:
        _resolved(round, chunks_stay)
    except UnlikeError:
        return False
    return True


def _resolved(round: Round, chunks_stay: bool) -> Round:
    """The round with numbers for symbols, unrotated."""

    def peer(rank: Any) -> int:
        if not isinstance(rank, Turn) or not rank.reduced:
            raise UnlikeError
        return rank.offset

    def span(span: Span) -> Span:
        buf, first, count = span
        rotates = buf is not ACC and buf is not RX and not chunks_stay
        if isinstance(first, Turn) != rotates or not isinstance(count, int):
            raise UnlikeError
        return Span(buf, first.offset, count) if isinstance(first, Turn) else span

    sends = tuple([(peer(to), span(what)) for to, what in round.sends])
    recvs = tuple([(peer(source), span(what)) for source, what in round.recvs])
    then = tuple([Sum(span(total.into), tuple([span(term) for term in total.terms])) for total in round.then])
    return Round(sends, recvs, then)


def whole(rounds: Iterator[Round], size: int) -> Iterator[Round]:
    """``rounds`` in which nothing smaller than the whole tensor is named, with that as the only chunk.

    Raises ``UnlikeError`` where chunks are told apart.
    """

    def span(span: Span) -> Span:
        buf, first, count = span
        if count != size or first % size:
            raise UnlikeError
        return Span(buf, first // size, 1)

    for round in rounds:
        sends = tuple([(to, span(what)) for to, what in round.sends])
        recvs = tuple([(source, span(what)) for source, what in round.recvs])
        then = tuple([Sum(span(total.into), tuple([span(term) for term in total.terms])) for total in round.then])
        yield Round(sends, recvs, then)
