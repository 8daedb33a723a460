"""Draw a schedule: who holds which chunk after each round."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from collectives.errors import UnsupportedError
from collectives.schedules.replay import Rank, replay
from collectives.schedules.round import Schedule
from collectives.schedules.task import Task, Value, spell

# Up to here a cell has room for words; beyond, a chunk is one character.
_WORDS_UP_TO = 8
_LEVELS = "▁▂▃▄▅▆▇█"
_PANELS = 24


class Picture(NamedTuple):
    """What every rank holds after ``rounds`` rounds: of each chunk, the value nearest to the result."""

    rounds: int
    held: list[dict[int, Value]]
    sent: list[str]  # by rank, what it sent in this round

    def cell(self, rank: int, chunk: int) -> Value | None:
        return self.held[rank].get(chunk)


def pictures(schedule: Schedule, task: Task) -> Iterator[Picture]:
    """One picture before the first round and one after each. Raises ``ScheduleError`` where the schedule is wrong."""
    for rounds, ranks in enumerate(replay(schedule, task)):
        yield Picture(rounds, [_held(rank) for rank in ranks], [_sent(rank) for rank in ranks])


def draw_text(schedule: Schedule, task: Task) -> Iterator[str]:
    """The drawing as lines: a table a round up to 8 ranks, one character a chunk for more."""
    words = task.size <= _WORDS_UP_TO
    yield f"{schedule.__name__}, {task.size} ranks" + ("" if task.root is None else f", root {task.root}")
    yield _legend(task, words)
    before: Picture | None = None
    for picture in pictures(schedule, task):
        yield ""
        yield f"after round {picture.rounds - 1}" if before else "before round 0"
        yield from _table(task, picture, before) if words else _blocks(task, picture)
        before = picture


def draw_png(schedule: Schedule, task: Task, path: Path) -> None:
    """The drawing as an image: a panel a round, of which at most 24 are shown; the darker, the more is added up.

    Raises:
        UnsupportedError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UnsupportedError(
            "drawing an image needs matplotlib, which is not installed; pip install matplotlib, or leave out --png"
        ) from error
    every = list(pictures(schedule, task))
    shown = every if len(every) <= _PANELS else [every[i * (len(every) - 1) // (_PANELS - 1)] for i in range(_PANELS)]
    columns = min(len(shown), 6)
    rows = -(-len(shown) // columns)
    figure = Figure(figsize=(2.1 * columns, 2.2 * rows + 0.6), layout="constrained")
    figure.suptitle(f"{schedule.__name__}, {task.size} ranks: who holds what")
    panels = figure.subplots(rows, columns, squeeze=False).flatten()
    for panel in panels[len(shown) :]:
        panel.set_axis_off()
    for picture, panel in zip(shown, panels, strict=False):
        shades = [[_share(task, picture.cell(rank, chunk)) for chunk in range(task.size)] for rank in range(task.size)]
        panel.imshow(shades, cmap="Blues", vmin=0.0, vmax=1.2)
        done = [
            (rank, chunk)
            for rank in range(task.size)
            for chunk, value in _goal(task, rank).items()
            if picture.cell(rank, chunk) == value
        ]
        panel.scatter([chunk for _, chunk in done], [rank for rank, _ in done], s=120 / task.size, c="white")
        panel.set_title(f"after round {picture.rounds - 1}" if picture.rounds else "before round 0", fontsize=8)
        panel.set_xticks([])
        panel.set_yticks([])
    panels[0].set_xlabel("chunk", fontsize=8)
    panels[0].set_ylabel("rank", fontsize=8)
    figure.savefig(path, dpi=150)


def _held(rank: Rank) -> dict[int, Value]:
    task = rank.task
    if task.operation == "barrier":
        return _heard(rank.output[rank.rank], task.size)
    if task.operation == "all_to_all":
        return dict(rank.output)
    best: dict[int, Value] = {}
    for cells in (rank.input, rank.received, rank.partial, rank.output):
        for value in cells.values():
            if value.chunk not in best or value.ranks.bit_count() >= best[value.chunk].ranks.bit_count():
                best[value.chunk] = value
    return best


def _heard(token: Value, size: int) -> dict[int, Value]:
    return {rank: Value(rank, 1 << rank) for rank in range(size) if token.ranks >> rank & 1}


def _goal(task: Task, rank: int) -> Mapping[int, Value]:
    wanted = task.wanted(rank)
    return _heard(wanted[rank], task.size) if task.operation == "barrier" else wanted


def _sent(rank: Rank) -> str:
    return ", ".join(
        f"{spell(sorted(value.chunk for value in message.values))} to {peer}" for peer, message in rank.sent
    )


def _share(task: Task, value: Value | None) -> float:
    """How much of the result is in a value, from 0 to 1."""
    if value is None:
        return 0.0
    return value.ranks.bit_count() / task.size if task.reduces else 1.0


def _legend(task: Task, words: bool) -> str:
    what = {"all_to_all": "chunk c: what comes from rank c", "barrier": "chunk c: word from rank c"}
    column = what.get(task.operation, "a cell: whose contributions are added up" if task.reduces else "a cell: held")
    if words:
        return f"{column}; = is the result, * is new in this round"
    return f"a row a rank, a character a chunk; {column}" + (f", · one {_LEVELS} all" if task.reduces else "")


def _table(task: Task, picture: Picture, before: Picture | None) -> Iterator[str]:
    def words(rank: int, chunk: int) -> str:
        value = picture.cell(rank, chunk)
        if value is None:
            return "."
        ranks = spell([r for r in range(task.size) if value.ranks >> r & 1], to="..", also="+")
        done = "=" if value == _goal(task, rank).get(chunk) else ""
        known = before.cell(rank, chunk) if before is not None else value
        new = "*" if known is None or value.ranks & ~known.ranks else ""
        return (ranks if task.reduces else "held") + done + new

    chunks = range(task.size)
    rows = [[f"rank {rank}", *(words(rank, chunk) for chunk in chunks), picture.sent[rank]] for rank in chunks]
    header = ["", *(f"chunk {chunk}" for chunk in chunks), "sent" if before is not None else ""]
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    for row in (header, *rows):
        yield "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()


def _blocks(task: Task, picture: Picture) -> Iterator[str]:
    def block(value: Value | None) -> str:
        if value is None:
            return " "
        added = value.ranks.bit_count() - 1
        return (
            _LEVELS[(len(_LEVELS) - 1) * added // (task.size - 1)] if task.reduces and added else "·█"[not task.reduces]
        )

    width = len(str(task.size - 1))
    for rank in range(task.size):
        yield f"{rank:{width}} |" + "".join(block(picture.cell(rank, chunk)) for chunk in range(task.size)) + "|"
