"""Schedules that only tell a rank apart as this one, the root or another: a small world stands for all larger ones.

[Note: any other rank] The schedule is run with symbols: this rank, the root (the same symbol, or another) and, where
it asks for its peers (``peers.py``), any other rank. Symbols may be compared with each other, and nothing else; what
depends on more raises. What comes out is a text: the rounds, in those symbols. If the text for p ranks is that for
``SMALL``, then neither world tells a rank, chunk or scratch slot from another. So what can be said of a place in memory
(which chunk it holds, and whose contributions) is said of the rank that it belongs to, of the one that it is named
after, of the root, and of all the rest together. With the peer of a message those are four ranks and a rest, which
SMALL ranks have too: every step does in both worlds what the text says, and a rule that is broken in one is broken in
the other. Sums in rank order keep it: the text says which they are, and in the small world every term is seen to be its
own rank's. All roots are proved at once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple, NoReturn, TypeVar

from collectives.schedules.peers import Peers, Symbol
from collectives.schedules.replay import replay
from collectives.schedules.round import Round, Schedule, Span, Sum
from collectives.schedules.symmetry import UnlikeError
from collectives.schedules.task import Task

SMALL = 6
T = TypeVar("T")
Text = tuple[Any, ...]


class Cost(NamedTuple):
    """Rounds, and the most chunks that any rank sends."""

    rounds: int
    volume: int


def cost_by_orbits(schedule: Schedule, task: Task) -> Cost:
    """Prove ``schedule`` for ``task``, and for all its roots: see [Note: any other rank].

    Raises ``UnlikeError`` where that is not possible, ``ScheduleError`` where the schedule is wrong in a small world.
    """
    if task.size <= SMALL:
        raise UnlikeError
    small = task._replace(size=SMALL)
    parts = _parts(schedule, task)
    if parts != _parts(schedule, small):
        raise UnlikeError
    if _cost(parts, SMALL) != _follow(schedule, small):
        raise UnlikeError
    return _cost(parts, task.size)


@lru_cache(maxsize=64)
def _follow(schedule: Schedule, task: Task) -> Cost:
    """What it costs to have any root, all ranks followed."""
    costs = []
    for root in range(task.size) if task.root is not None else [None]:
        *_, ranks = replay(schedule, task._replace(root=root))
        costs.append(Cost(ranks[0].round, max(rank.volume for rank in ranks)))
    if len(set(costs)) > 1:
        raise UnlikeError
    return costs[0]


def _parts(schedule: Schedule, task: Task) -> list[Text]:
    """The rounds of the root, and those of any other rank; without a root those of any rank."""
    if task.root is None:
        return [_text(schedule, _Self("self"), task.size)]
    root, other = _Self("self"), _Self("self")
    root.root, other.root = root, _Other("root")
    return [_text(schedule, root, task.size), _text(schedule, other, task.size)]


def _cost(parts: list[Text], size: int) -> Cost:
    """``parts`` are the root's and another's, or anyone's."""
    volumes = []
    for peers, rounds in zip((size - 1, size - 2), parts, strict=False):
        times = {"one": 1, "each": peers}
        volumes.append(sum(times[kind] for sends, _, _ in rounds for kind, *_ in sends))
    return Cost(len(parts[0]), max(volumes))


class _Other:
    """A rank that can be told from others, and no more."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Other):
            raise UnlikeError
        return self is other

    __hash__ = None  # type: ignore[assignment]

    def __bool__(self) -> NoReturn:
        raise UnlikeError


class _Self(_Other, Symbol):
    """The rank whose part is looked at. ``root`` is itself, another one, or None."""

    root: _Other | None = None

    def peers(self, size: int, without: Any) -> Peers:
        if without is not None and without is not self.root:
            raise UnlikeError
        return _Peers(self.root if without is None and self.root is not self else None)

    def in_rank_order(self, size: int, make: Callable[[Any], T]) -> Any:
        first = _Family([("own", None, make(self))])
        return first + _Peers(self.root if self.root is not self else None).each(make)


class _Peers(Peers):
    """All others: the root, if it is one of them, and any other one."""

    def __init__(self, root: _Other | None) -> None:
        self._root = root

    def each(self, make: Callable[[Any], T]) -> Any:
        anyone = _Other("each")
        each = _Family([("each", anyone, make(anyone))])
        return each if self._root is None else _Family([("one", None, make(self._root))]) + each

    backwards = each


class _Family:
    """What a schedule sees as a tuple of unknown length: it can be put together with others, and passed on."""

    def __init__(self, items: list[tuple[str, _Other | None, Any]]) -> None:
        self.items = items

    def __add__(self, other: Any) -> _Family:
        return _Family(self.items + _family(other).items)

    def __radd__(self, other: Any) -> _Family:
        return _Family(_family(other).items + self.items)


def _family(items: Any) -> _Family:
    return items if isinstance(items, _Family) else _Family([("one", None, item) for item in items])


def _text(schedule: Schedule, rank: _Self, size: int) -> Text:
    arguments = (rank, size) if rank.root is None else (rank, size, rank.root)
    try:
        return tuple([_round(round, rank) for round in schedule(*arguments)])
    except (TypeError, AttributeError, ValueError) as error:  # what a symbol cannot do
        raise UnlikeError from error


def _round(round: Round, rank: _Self) -> Text:
    def name(of: Any, anyone: _Other | None) -> str:
        for known in (rank, rank.root, anyone):
            if of is known and known is not None:
                return str(known.name)
        raise UnlikeError

    def span(of: Span, anyone: _Other | None) -> Text:
        buf, first, count = of
        if count != 1:
            raise UnlikeError
        return buf.name, name(first, anyone)

    def message(of: tuple[Any, Span], anyone: _Other | None) -> Text:
        peer, what = of
        if peer is rank:
            raise UnlikeError
        return name(peer, anyone), span(what, anyone)

    def total(of: Sum, anyone: _Other | None) -> Text:
        into, terms = of
        if anyone is not None and isinstance(terms, _Family):  # of all peers for each peer
            raise UnlikeError
        return span(into, anyone), texts(terms, lambda term, each: span(term, anyone if each is None else each))

    def texts(items: Any, text: Callable[[Any, _Other | None], Text]) -> Text:
        return tuple([(kind, *text(item, anyone)) for kind, anyone, item in _family(items).items])

    sends, recvs, then = round
    return texts(sends, message), texts(recvs, message), texts(then, total)
