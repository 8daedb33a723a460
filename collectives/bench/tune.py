"""From measurements to a table of the fastest algorithms."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from collectives.bench.contenders import NATIVE
from collectives.bench.report import Row
from collectives.schedules import SCHEDULES
from collectives.selection import Entry, Table

# Differences below this are noise. Then the algorithm for smaller sizes is kept, else the first of these is taken.
_MARGIN = 1.05
_PREFERRED = (NATIVE, "direct", "ring", "tree")


def contender_names(bases: Iterable[str], operation: str) -> list[str]:
    """Every algorithm of ``operation`` on every base, the library's own included, where it has one."""
    algorithms = [NATIVE, *(name for of, name in SCHEDULES if of == operation)]
    return [f"{base}@{algorithm}" for base in bases for algorithm in algorithms]


def entries(rows: Sequence[Row]) -> list[Entry]:
    """What the rows say: for each base with the library's own collectives, and for the layer that does without them."""
    found = []
    times: dict[tuple[str, str, int], dict[int, dict[str, float]]] = {}
    for row in rows:
        base, _, algorithm = row.contender.partition("@")
        if algorithm and not row.wrong:
            sizes = times.setdefault((base, row.operation, row.world_size), {})
            sizes.setdefault(row.nbytes, {})[algorithm] = row.seconds
    for (base, operation, world_size), sizes in sorted(times.items()):
        schedules = {
            nbytes: {name: seconds for name, seconds in known.items() if name != NATIVE}
            for nbytes, known in sizes.items()
        }
        for backend, measured in ((base, sizes), (f"ring+{base}", schedules)):
            found.append(Entry(backend, operation, world_size, _fastest(measured)))
    return found


def _fastest(measured: Mapping[int, Mapping[str, float]]) -> dict[int, str]:
    """Sizes from which another algorithm is the fastest. The first one serves everything smaller as well."""
    choices: dict[int, str] = {}
    current = ""
    for nbytes, seconds in sorted(measured.items()):
        limit = _MARGIN * min(seconds.values())
        good = [name for name in (current, *_PREFERRED, *sorted(seconds)) if seconds.get(name, limit * 2) <= limit]
        if good[0] != current:
            current = choices[nbytes if choices else 0] = good[0]
    return choices


def update(path: Path, rows: Sequence[Row], measured: Mapping[str, Any]) -> Table:
    """Write the table, or replace in it what ``rows`` measured anew."""
    new = entries(rows)
    replaced = {(entry.backend, entry.operation, entry.world_size) for entry in new}
    old = Table.load(path).entries if path.exists() else ()
    kept = [e for e in old if e.op is not None or (e.backend, e.operation, e.world_size) not in replaced]
    ordered = sorted([*kept, *new], key=lambda e: (e.backend, e.operation, e.world_size, e.op or ""))
    table = Table(ordered, measured, str(path))
    path.write_text(table.dump())
    return table
