"""Prove that a schedule is right: each contribution exactly once, in the places, rounds and volume it promises."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import NamedTuple

from collectives.schedules.orbits import cost_by_orbits
from collectives.schedules.replay import Mail, Message, Rank, ScheduleError, exchange, next_rounds, replay, rounds_of
from collectives.schedules.round import Schedule
from collectives.schedules.symmetry import UnlikeError, check_roots, part_of_all
from collectives.schedules.task import CHUNKS_ALIKE, ROOTED, UNROOTED, Task, Value

__all__ = ["Report", "ScheduleError", "check"]


class Report(NamedTuple):
    """What a schedule costs: its rounds, and the most chunks that any rank sends."""

    rounds: int
    volume: int


def check(
    schedule: Schedule,
    operation: str,
    size: int,
    root: int | None = None,
    *,
    in_rank_order: bool = False,
    expect: Report | None = None,
    rotations: int | None = None,
    every_root: bool = False,
) -> Report:
    """Prove ``schedule`` for ``size`` ranks.

    Proved are: each contribution is in the result exactly once and nothing else is; the result is everywhere it should
    be; IN is never written, and nothing is read before it is there; messages meet in length and dtype; no deadlock,
    even where a send blocks until it is received; 16-bit floats are rounded once.

    All ranks are followed. Where that is shown to be the same, one rank stands for all (it names others by their
    distance only: see [Note: a rank as a symbol]), one chunk for all (the tensor is never cut), or a small world for
    all larger ones (ranks are told apart only as this one, the root and any other: see [Note: any other rank]).

    Args:
        schedule: a generator of ``Round`` for (rank, size), or (rank, size, root) for a rooted operation.
        operation: what it should do, such as "all_reduce".
        size: the world size.
        root: of a broadcast, gather, reduce or scatter (there it is source or destination).
        in_rank_order: whether contributions must be added in the order of ranks, one at a time.
        expect: the rounds and the volume that it should have.
        rotations: for large worlds: follow rank 0, and compare with it this many other ranks, picked at random. Not a
            proof for the others. None follows all. Not for rooted operations.
        every_root: also show that it does for any root what it does for root 0, rotated. ``root`` must be 0.

    Returns:
        The rounds and the volume it has.

    Raises:
        ScheduleError: names the first wrong round, rank and chunk.
        ValueError: ``operation``, ``size`` or ``root`` is out of range.
    """
    if operation not in (*UNROOTED, *ROOTED):
        raise ValueError(f"expected one of {', '.join((*UNROOTED, *ROOTED))}, got {operation!r}")
    if size < 1:
        raise ValueError(f"expected a world size of at least 1, got {size}")
    if (operation in ROOTED) != (root is not None) or not 0 <= (root or 0) < size:
        expected = f"a root of 0 to {size - 1}" if operation in ROOTED else "no root"
        raise ValueError(f"{operation} takes {expected}, got {root}")
    if rotations is not None and root is not None:
        raise ValueError(f"{operation} has a root, so its ranks are not alike; leave out rotations")
    if every_root and root != 0:
        raise ValueError(f"every_root compares with root 0, got root {root}")
    task = Task(operation, size, root, in_rank_order)
    report = _by_orbits(schedule, task) if rotations is None else _sample(schedule, task, rotations)
    any_root = report is not None
    report = report or _prove(schedule, task)
    if expect is not None and report != expect:
        raise ScheduleError(f"expected {expect} for {size} ranks, found {report}")
    if every_root and not any_root:
        try:
            check_roots(schedule, size, chunks_alike=operation in CHUNKS_ALIKE)
        except UnlikeError:
            raise ScheduleError("does not do for every root what it does for root 0; check each root") from None
    return report


def _by_orbits(schedule: Schedule, task: Task) -> Report | None:
    try:
        return Report(*cost_by_orbits(schedule, task))
    except (UnlikeError, ScheduleError):
        return None


def _prove(schedule: Schedule, task: Task) -> Report:
    """By the shorter ways that there are. A breach sends it the long way, which names the first one."""
    ways: list[Iterator[list[Rank]]] = []
    if task.root is None and not task.in_rank_order:
        ways.append(_replay_rotated(lambda rank, size: part_of_all(schedule, size), task, []))
    if task.operation in CHUNKS_ALIKE:
        ways.append(replay(schedule, task._replace(whole=True)))
    for way in ways:
        try:
            return _report(way, task)
        except (UnlikeError, ScheduleError):
            continue
    return _report(replay(schedule, task), task)


def _sample(schedule: Schedule, task: Task, rotations: int) -> Report:
    others = random.Random(task.size).sample(range(1, task.size), min(rotations, task.size - 1))
    return _report(_replay_rotated(schedule, task, sorted(others)), task)


def _report(followed: Iterator[list[Rank]], task: Task) -> Report:
    *_, ranks = followed
    chunks = task.size if ranks[0].task.whole else 1
    return Report(ranks[0].round, chunks * max(rank.volume for rank in ranks))


def _replay_rotated(schedule: Schedule, task: Task, others: list[int]) -> Iterator[list[Rank]]:
    """Follow rank 0, and ``others`` as far as needed to see that they do the same, ``rank`` places on.

    If all do, what a rank receives from ``peer`` is what rank 0 sends to (rank - peer), rotated by ``peer``.
    """
    ranks = [Rank(task, rank) for rank in (0, *others)]
    running = [rounds_of(schedule, task, rank.rank) for rank in ranks]
    yield ranks
    while (rounds := next_rounds(running, ranks)) is not None:
        mail: Mail = {}
        first: dict[int, list[Message]] = {}
        for rank, round in zip(ranks, rounds, strict=True):
            sent: dict[int, list[Message]] = {}
            for peer, message in rank.post(round):
                sent.setdefault((peer - rank.rank) % task.size, []).append(message)
            first = first or sent
            if sent != {offset: _rotated(messages, rank.rank, task.size) for offset, messages in first.items()}:
                raise rank.error(None, "does not send what rank 0 sends, rotated; check all ranks instead")
            for offset, messages in first.items():
                source = (rank.rank - offset) % task.size
                mail[source, rank.rank] = _rotated(messages, source, task.size)
        exchange(rounds, ranks, mail)
        yield ranks
    for rank in ranks:
        rank.close()


def _rotated(messages: list[Message], by: int, size: int) -> list[Message]:
    everyone = (1 << size) - 1

    def rotate(value: Value) -> Value:
        chunk, ranks, in_order, final = value
        ranks <<= by
        return Value((chunk + by) % size, ranks & everyone | ranks >> size, in_order, final)

    return [Message(wide, [rotate(value) for value in values]) for wide, values in messages] if by else list(messages)
