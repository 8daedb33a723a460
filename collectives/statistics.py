"""What a communicator has done: calls, bytes sent, seconds blocked, by operation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Stats:
    """A snapshot. ``sent_bytes`` counts payload that this rank sent to others; for a library's own collective, whose
    messages cannot be seen, it is the least that any algorithm must send. ``seconds`` is time blocked in calls."""

    calls: int
    sent_bytes: int
    seconds: float
    operations: Mapping[str, Stats]


class Row:
    """Running totals of one operation."""

    __slots__ = ("calls", "seconds", "sent_bytes")

    def __init__(self) -> None:
        self.calls = 0
        self.sent_bytes = 0
        self.seconds = 0.0


class Statistics:
    """Running totals by operation name."""

    def __init__(self) -> None:
        self._rows: dict[str, Row] = {}

    def row(self, operation: str) -> Row:
        row = self._rows.get(operation)
        if row is None:
            row = self._rows[operation] = Row()
        return row

    def snapshot(self) -> Stats:
        parts = {name: Stats(row.calls, row.sent_bytes, row.seconds, {}) for name, row in self._rows.items()}
        return Stats(
            calls=sum(part.calls for part in parts.values()),
            sent_bytes=sum(part.sent_bytes for part in parts.values()),
            seconds=sum(part.seconds for part in parts.values()),
            operations=parts,
        )
