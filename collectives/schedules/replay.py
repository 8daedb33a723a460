"""Follow a schedule without moving any data: who holds what after every round, and whether that may be.

A value is what a place in memory stands for: a chunk, and whose contributions have been added to it. The rules of
``round.py`` and the meaning of the operation decide which values may go where; the first breach is raised with its
round, rank and chunk.

Ranks go through their rounds side by side: round k of one rank meets round k of the others, and a rank with nothing to
do yields an empty ``Round``. So if every message of a round has its counterpart in the same round, no rank can wait for
ever, even where a send blocks until it is received.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

from collectives.schedules.round import ACC, IN, OUT, RX, Buf, Round, Schedule, Span, Sum
from collectives.schedules.symmetry import whole
from collectives.schedules.task import Task, Value, name_ranks


class ScheduleError(ValueError):
    """A schedule does not do what it should. The message names the first wrong round, rank and chunk."""


class Message(NamedTuple):
    """What travels: the values, and whether in the accumulation dtype."""

    wide: bool
    values: Sequence[Value]


Place: TypeAlias = tuple[Buf, int]
Mail: TypeAlias = dict[tuple[int, int], list[Message]]


class Rank:
    """One rank's memory, and what its rounds do to it."""

    def __init__(self, task: Task, rank: int) -> None:
        self.task, self.rank, self.round = task, rank, 0
        self.wanted = task.wanted(rank)
        self.input = task.inputs(rank)
        # Callers may have the result of a reduction in the place of their input.
        self.output = self.input if task.reduces and self.wanted else task.outputs(rank)
        self.partial: dict[int, Value] = {}
        self.received: dict[int, Value] = {}
        self.sent: list[tuple[int, Message]] = []
        self.volume = 0
        if task.size == 1:
            self.output.update(self.wanted)

    def post(self, round: Round) -> list[tuple[int, Message]]:
        """The messages that this round sends, with their peers."""
        self.sent = []
        for peer, span in round.sends:
            self.check_peer(peer, "sends to")
            self.volume += span.count
            self.sent.append((peer, Message(span.buf is ACC, [self._read(place) for place in self._places(span)])))
        return self.sent

    def finish(self, round: Round, messages: Sequence[Message]) -> None:
        """Receive ``messages``, one for each of the round's receives, and do its sums."""
        busy = {cell for _, span in round.sends for cell in self._memory(span)} if round.recvs else set()
        unmeasured: set[Place] = set()
        for (peer, span), message in zip(round.recvs, messages, strict=True):
            if message.wide != (span.buf is ACC):
                sent, here = ("accumulation", "tensor's") if message.wide else ("tensor's", "accumulation")
                raise self.error(span.first, f"rank {peer} sends the {sent} dtype, {_name(span)} holds the {here}")
            if len(message.values) != span.count:
                raise self.error(
                    span.first, f"rank {peer} sends {len(message.values)} chunks, {_name(span)} takes {span.count}"
                )
            for place, cell, value in zip(self._places(span), self._memory(span), message.values, strict=True):
                if cell in busy:
                    raise self.error(place[1], f"receives into {_name(place)}, which is in use in the same round")
                busy.add(cell)
                if place[0] is ACC or place[0] is RX:
                    unmeasured.add(place)
                self._write(place, value)
        for total in round.then:
            self._add(total, unmeasured)
        for place in unmeasured:
            raise self.error(place[1], f"receives into {_name(place)}, which no sum of this round reads or measures")
        self.round += 1

    def close(self) -> None:
        """Check the result after the last round."""
        for chunk, value in self.wanted.items():
            held = self.output.get(chunk)
            if held != value:
                raise self.error(chunk, f"expected {value} in the end, found {held or 'nothing'}", after=True)

    def _add(self, total: Sum, unmeasured: set[Place]) -> None:
        into, terms = self._places(total.into), [self._places(term) for term in total.terms]
        if not terms or any(len(term) != len(into) for term in terms):
            raise self.error(total.into.first, f"the terms of a sum into {_name(total.into)} differ from it in count")
        for target, *places in zip(into, *terms, strict=True):
            values = [self._read(place) for place in places]
            if target[0] is not OUT and unmeasured.issuperset(places):
                raise self.error(target[1], f"nothing says how long the sum into {_name(target)} is")
            unmeasured.difference_update(places)
            self._write(target, self._sum(target, values))

    def _sum(self, target: Place, values: list[Value]) -> Value:
        if not self.task.reduces:
            if len(values) > 1:
                raise self.error(target[1], f"adds, but {self.task.operation} only moves")
            return values[0]
        if target[0] is RX:
            raise self.error(target[1], "a partial sum in RX would be rounded; it belongs in ACC")
        chunk, ranks, in_order, final = values[0]
        for value in values[1:]:
            if value.chunk != chunk:
                raise self.error(value.chunk, f"adds {value} to chunk {chunk}")
            if ranks & value.ranks:
                raise self.error(chunk, f"adds {name_ranks(ranks & value.ranks)} twice")
            in_order = in_order and value.ranks > ranks and value.ranks & (value.ranks - 1) == 0
            ranks, final = ranks | value.ranks, final or value.final
        if final and self.task.size > 1:
            raise self.error(chunk, "adds to a finished result, which is rounded and perhaps divided")
        return Value(chunk, ranks, in_order or not self.task.in_rank_order, target[0] is OUT)

    def _read(self, place: Place) -> Value:
        buf, chunk = place
        cells = self._cells(buf)
        if chunk not in cells or (buf is OUT and cells is self.input and chunk not in self.wanted):
            what = "does not exist here" if buf is IN else "holds nothing yet"
            raise self.error(chunk, f"reads {_name(place)}, which {what}")
        value = cells[chunk]
        if buf is IN and value.final and self.task.size > 1:
            raise self.error(chunk, f"reads {_name(place)}, which the result has taken the place of")
        return value

    def _write(self, place: Place, value: Value) -> None:
        buf, chunk = place
        if buf is IN:
            raise self.error(chunk, "writes to IN")
        if buf is OUT:
            if self.task.operation == "barrier":
                self._hear(value)
            elif value != self.wanted.get(chunk):
                raise self.error(chunk, self._wrong(chunk, value))
        self._cells(buf)[chunk] = value

    def _hear(self, value: Value) -> None:
        token = self.output[self.rank]
        self.output[self.rank] = Value(self.rank, token.ranks | value.ranks)

    def _wrong(self, chunk: int, value: Value) -> str:
        wanted = self.wanted.get(chunk)
        if wanted is None:
            return f"writes {_name((OUT, chunk))}, which does not exist here"
        if value.ranks == wanted.ranks and value.chunk == wanted.chunk:
            return "is not added in rank order" if not value.in_order else "is not a finished result"
        return f"expected {wanted} in {_name((OUT, chunk))}, found {value}"

    def _cells(self, buf: Buf) -> dict[int, Value]:
        if buf is OUT:
            return self.output
        if buf is IN:
            return self.input
        return self.partial if buf is ACC else self.received

    def _places(self, span: Span) -> list[Place]:
        buf, first, count = span
        if buf is IN or buf is OUT:
            return [(buf, (first + i) % self.task.chunks) for i in range(count)]
        if first < 0:
            raise self.error(first, f"names {_name(span)}; scratch slots count from 0")
        return [(buf, first + i) for i in range(count)]

    def _memory(self, span: Span) -> list[Place]:
        """The span's places, those of IN under the name of OUT where the two are one tensor."""
        aliased = span.buf is IN and self.input is self.output
        return self._places(span._replace(buf=OUT) if aliased else span)

    def check_peer(self, peer: int, verb: str) -> None:
        """Raise unless ``peer`` is another rank."""
        if not 0 <= peer < self.task.size or peer == self.rank:
            raise self.error(None, f"{verb} rank {peer}; expected another one of 0 to {self.task.size - 1}")

    def error(self, chunk: int | None, fact: str, after: bool = False) -> ScheduleError:
        """A ``ScheduleError`` that happened here, in this round."""
        where = f"after round {self.round - 1}" if after else f"round {self.round}"
        return ScheduleError(
            f"{where}, rank {self.rank}" + (f", chunk {chunk}" if chunk is not None else "") + f": {fact}"
        )


def _name(place: Place | Span) -> str:
    return f"{place[0].name}[{place[1]}]"


def replay(schedule: Schedule, task: Task) -> Iterator[list[Rank]]:
    """All ranks, before the first round and after each; after the last, the results are checked too.

    Raises ``UnlikeError`` for a task with the tensor as a whole, where the schedule tells chunks apart.
    """
    ranks = [Rank(task, rank) for rank in range(task.size)]
    running = [rounds_of(schedule, task, rank) for rank in range(task.size)]
    yield ranks
    while (rounds := next_rounds(running, ranks)) is not None:
        mail: Mail = {}
        for rank, round in zip(ranks, rounds, strict=True):
            for peer, message in rank.post(round):
                mail.setdefault((rank.rank, peer), []).append(message)
        exchange(rounds, ranks, mail)
        yield ranks
    for rank in ranks:
        rank.close()


def rounds_of(schedule: Schedule, task: Task, rank: int) -> Iterator[Round]:
    """One rank's part of the schedule."""
    rounds = schedule(rank, task.size) if task.root is None else schedule(rank, task.size, task.root)
    return whole(rounds, task.size) if task.whole else rounds


def next_rounds(running: Sequence[Iterator[Round]], ranks: Sequence[Rank]) -> list[Round] | None:
    """The next round of each of ``ranks``, or None after the last."""
    rounds = [next(each, None) for each in running]
    there = [round for round in rounds if round is not None]
    if there and len(there) < len(rounds):
        ended = ranks[rounds.index(None)]
        raise ended.error(None, "has no such round, but others have; a rank with nothing to do yields Round()")
    return there or None


def exchange(rounds: Sequence[Round], ranks: Sequence[Rank], mail: Mail) -> None:
    """Finish a round on each of ``ranks``: every receive takes, in the order sent, from ``mail`` of (source, rank)."""
    arrived: list[list[Message]] = []
    for rank, round in zip(ranks, rounds, strict=True):
        arrived.append([])
        for peer, _ in round.recvs:
            rank.check_peer(peer, "receives from")
            if not (queue := mail.get((peer, rank.rank))):
                raise _unpaired(rounds, ranks)
            arrived[-1].append(queue.pop(0))
    if any(mail.values()):
        raise _unpaired(rounds, ranks)
    for rank, round, messages in zip(ranks, rounds, arrived, strict=True):
        rank.finish(round, messages)


def _unpaired(rounds: Sequence[Round], ranks: Sequence[Rank]) -> ScheduleError:
    """Say which rank waits for which, and whether they wait in a circle."""
    sent, taken = Counter[tuple[int, int]](), Counter[tuple[int, int]]()
    for rank, round in zip(ranks, rounds, strict=True):
        sent.update((rank.rank, peer) for peer, _ in round.sends)
        taken.update((peer, rank.rank) for peer, _ in round.recvs)
    waits: dict[int, tuple[int, str, int]] = {}
    for rank, round in zip(ranks, rounds, strict=True):
        for peer, span in round.recvs:
            if sent[peer, rank.rank] < taken[peer, rank.rank]:
                waits[rank.rank] = peer, "receives from rank {}, which sends it nothing", span.first
        for peer, span in round.sends:
            if taken[rank.rank, peer] < sent[rank.rank, peer]:
                waits[rank.rank] = peer, "sends to rank {}, which takes nothing from it", span.first
    circle = _circle(waits)
    first = circle[0] if circle else min(waits)
    peer, fact, chunk = waits[first]
    stuck = f"; a circle: rank {' waits for '.join(map(str, [*circle, first]))}" if circle else ""
    return ranks[first].error(chunk, fact.format(peer) + " in this round" + stuck)


def _circle(waits: dict[int, tuple[int, str, int]]) -> list[int]:
    for start in sorted(waits):
        path = [start]
        while (following := waits.get(path[-1], (None,))[0]) is not None and following not in path:
            path.append(following)
        if following is not None:
            circle = path[path.index(following) :]
            lowest = circle.index(min(circle))
            return circle[lowest:] + circle[:lowest]
    return []
