"""What each backend does, as a Markdown table: ``python -m collectives.info --table``. README.md holds it."""

from __future__ import annotations

import textwrap
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module

import torch

from collectives.backend import Backend
from collectives.capabilities import DTYPES, MOVEMENTS, REDUCTIONS, Key, Support, capabilities
from collectives.types import ReduceOp

BEGIN, END = "<!-- capabilities -->", "<!-- /capabilities -->"
# By the name of a column: the class, whose answers depend on the question alone, so that no rank has to be started.
COLUMNS = {
    "threads": "collectives.backends.threads:ThreadsBackend",
    "gloo": "collectives.backends.torch_dist:GlooBackend",
    "mpi": "collectives.backends.mpi:MpiBackend",
    "nccl": "collectives.backends.torch_dist:NcclBackend",
    "shm+X": "collectives.backends.shm:ShmBackend",
}
_NOTE = (
    "The dtypes that the library itself does, where it keeps the contract; the others, and what is *emulated*, run by "
    "schedules over its messages, with the same result. On every backend alike {no} raise `TypeError`."
)


def render() -> str:
    """The table, between its markers."""
    tables = [*(capabilities(_blank(place), schedules_only=False) for place in COLUMNS.values())]
    tables.append(capabilities(_blank(COLUMNS["threads"]), schedules_only=True))
    names = ["operation", *(f"`{name}`" for name in COLUMNS), "`ring+X`"]
    lines = [f"| {' | '.join(names)} |", f"|{'---|' * len(names)}"]
    for operation in REDUCTIONS:
        lines += _rows([(operation, op) for op in ReduceOp], tables)
    lines += _rows([(operation, None) for operation in MOVEMENTS], tables)
    note = textwrap.fill(_NOTE.format(no=_undefined(tables[0])), 118, break_long_words=False)
    return "\n".join([BEGIN, *lines, "", note, END]) + "\n"


def _blank(place: str) -> Backend:
    module, name = place.split(":")
    kind: type[Backend] = getattr(import_module(module), name)
    return object.__new__(kind)


def _rows(calls: Sequence[tuple[str, ReduceOp | None]], tables: Sequence[Mapping[Key, Support]]) -> list[str]:
    """A line for calls that are alike everywhere."""
    alike: dict[tuple[str, ...], list[tuple[str, ReduceOp | None]]] = defaultdict(list)
    for operation, op in calls:
        cells = tuple(_names(dtype for dtype in DTYPES if t[Key(operation, dtype, op)] == "native") for t in tables)
        alike[cells].append((operation, op))
    lines = []
    for cells, those in alike.items():
        title = ", ".join(dict.fromkeys(f"`{operation}`" for operation, _ in those))
        ops = [op.name for _, op in those if op is not None]
        title += f" {', '.join(ops)}" if len(ops) not in (0, len(ReduceOp)) else ""
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return lines


def _names(dtypes: Iterable[torch.dtype]) -> str:
    names = [str(dtype).removeprefix("torch.") for dtype in dtypes]
    return "every dtype" if len(names) == len(DTYPES) else ", ".join(names) or "emulated"


def _undefined(table: Mapping[Key, Support]) -> str:
    """What is no reduction, in words."""
    alike: dict[str, list[str]] = defaultdict(list)
    for op in ReduceOp:
        dtypes = [dtype for dtype in DTYPES if table[Key("all_reduce", dtype, op)] == "no"]
        alike[_names(dtypes)].append(op.name)
    return ", ".join(f"{'/'.join(ops)} of {dtypes}" for dtypes, ops in alike.items())
