"""Which algorithm carries a call: what the caller asked for, else what was measured to be fastest, else a rule.

The measurements are a ``Table``: JSON that a person can read and edit (``selection.json`` comes with the package,
``python -m collectives.bench --tune`` writes one). Rank 0's table is sent to all ranks when a job starts, so the choice
depends on the call's signature alone, never on a rank's own files or environment.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from collectives.backend import Backend
from collectives.collective import NATIVE, Algorithm, Collective
from collectives.errors import UnsupportedError
from collectives.schedules import SCHEDULES
from collectives.schedules.arithmetic import accumulation_dtype
from collectives.schedules.round import Schedule
from collectives.types import ReduceOp

SCHEMA = 1
# From here on the ring's neighbours-only traffic pays for its many rounds.
_RING_FROM_BYTES = 32 * 1024
_FALLBACK = {"broadcast": "tree", "all_to_all": "pairwise", "barrier": "dissemination"}


@dataclass(frozen=True)
class Entry:
    """The fastest algorithms of one operation on one backend, by size.

    Attributes:
        backend: the full name, layers included ("ring+gloo").
        world_size: from this one on, up to the next that the table has for the operation, and at most to its double.
        op: a reduce op's name; None for all that have no entry of their own. AVG is looked up as "SUM".
        from_bytes: ascending sizes (nbytes of the larger side) and the algorithm from there on; "native" is the
            library's own. Below the first size the table says nothing.
    """

    backend: str
    operation: str
    world_size: int
    from_bytes: Mapping[int, str]
    op: str | None = None


@dataclass(frozen=True)
class Table:
    """Measured choices. ``origin`` names the file, ``measured`` says on what, by what and when."""

    entries: Sequence[Entry] = ()
    measured: Mapping[str, Any] = field(default_factory=dict)
    origin: str = "a table"

    def __post_init__(self) -> None:
        seen: dict[tuple[str, str, int, str | None], int] = {}
        for number, entry in enumerate(self.entries, 1):
            where = f"{self.origin}, entry {number}"
            _check_entry(entry, where)
            key = (entry.backend, entry.operation, entry.world_size, entry.op)
            if (other := seen.setdefault(key, number)) != number:
                raise ValueError(f"{where} repeats entry {other}: {entry.operation} on {entry.backend}; keep one")

    @classmethod
    def shipped(cls) -> Table:
        """The table that comes with the package."""
        return cls.parse((files("collectives") / "selection.json").read_text(), "collectives/selection.json")

    @classmethod
    def load(cls, path: str | Path) -> Table:
        """Read a file. Raises ``ValueError`` that names the file and what is wrong with it."""
        try:
            text = Path(path).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"expected a table of algorithms in {path}, but it cannot be read: {error}") from error
        return cls.parse(text, str(path))

    @classmethod
    def parse(cls, text: str, origin: str = "a table") -> Table:
        """From JSON. Raises ``ValueError`` that names ``origin`` and what is wrong."""
        try:
            data = json.loads(text)
        except ValueError as error:
            raise ValueError(
                f"{origin} is no JSON ({error}); 'python -m collectives.bench --tune' writes one"
            ) from error
        if not isinstance(data, dict) or data.get("schema") != SCHEMA or not isinstance(data.get("entries"), list):
            found = f"schema {data.get('schema')!r}" if isinstance(data, dict) else type(data).__name__
            raise ValueError(f'{origin}: expected {{"schema": {SCHEMA}, "entries": [...]}}, found {found}')
        entries = [_entry(row, f"{origin}, entry {number}") for number, row in enumerate(data["entries"], 1)]
        return cls(entries, data.get("measured", {}), origin)

    def dump(self) -> str:
        """As JSON, one entry a line."""
        rows = [{k: v for k, v in asdict(entry).items() if v is not None} for entry in self.entries]
        lines = ",\n".join(f"    {json.dumps(row)}" for row in rows)
        measured = json.dumps(self.measured, indent=2).replace("\n", "\n  ")
        return f'{{\n  "schema": {SCHEMA},\n  "measured": {measured},\n  "entries": [\n{lines}\n  ]\n}}\n'

    def rows(self, backend: str, world_size: int) -> dict[tuple[str, str | None], Mapping[int, str]]:
        """What holds for a communicator: (operation, reduce op) to sizes and algorithms."""
        best: dict[tuple[str, str | None], Entry] = {}
        for entry in self.entries:
            key = (entry.operation, entry.op)
            fits = entry.backend == backend and entry.world_size <= world_size <= 2 * entry.world_size
            if fits and (key not in best or best[key].world_size < entry.world_size):
                best[key] = entry
        return {key: entry.from_bytes for key, entry in best.items()}


def agree_on_table(asked: Table | str | Path | None, rank: int, share: Callable[[bytes | None], bytes]) -> Table:
    """Rank 0's table, on every rank: what is ``asked`` for there, a table or a file, else the one of the package.

    ``share`` carries rank 0's bytes to every rank. What other ranks ask for is not looked at. Raises ``ValueError`` on
    every rank where rank 0 cannot read it.
    """
    told: bytes | None = None
    failure: ValueError | None = None
    if rank == 0:
        try:
            table = asked if isinstance(asked, Table) else Table.load(asked) if asked else Table.shipped()
            told = f"{table.origin}\n{table.dump()}".encode()
        except ValueError as error:
            failure, told = error, f"\n{error}".encode()
    origin, _, text = share(told).decode().partition("\n")
    if not origin:
        raise ValueError(text) from failure
    return Table.parse(text, origin)


def _entry(row: Any, where: str) -> Entry:
    wanted = {"backend": str, "operation": str, "world_size": int, "from_bytes": dict}
    if not isinstance(row, dict) or any(not isinstance(row.get(name), kind) for name, kind in wanted.items()):
        needs = ", ".join(f"{name} ({kind.__name__})" for name, kind in wanted.items())
        raise ValueError(f"{where}: expected an object with {needs}, found {row!r}")
    if unknown := set(row) - {*wanted, "op"}:
        raise ValueError(f"{where} has unknown names: {', '.join(sorted(unknown))}; expected {', '.join(wanted)}, op")
    try:
        from_bytes = {int(nbytes): str(algorithm) for nbytes, algorithm in row["from_bytes"].items()}
    except ValueError as error:
        raise ValueError(f"{where}: the names in from_bytes must be whole numbers of bytes ({error})") from error
    op = str(row["op"]) if "op" in row else None
    return Entry(row["backend"], row["operation"], row["world_size"], from_bytes, op)


def _check_entry(entry: Entry, where: str) -> None:
    if entry.op is not None and entry.op not in {op.name for op in ReduceOp if op is not ReduceOp.AVG}:
        names = ", ".join(op.name for op in ReduceOp if op is not ReduceOp.AVG)
        raise ValueError(f"{where}: unknown reduce op {entry.op!r}; expected one of {names}, or none at all")
    if entry.operation not in {operation for operation, _ in SCHEDULES}:
        operations = ", ".join(sorted({operation for operation, _ in SCHEDULES}))
        raise ValueError(f"{where}: unknown operation {entry.operation!r}; expected one of {operations}")
    if entry.world_size < 1:
        raise ValueError(f"{where}: world_size is {entry.world_size}, expected at least 1")
    sizes = list(entry.from_bytes)
    if not sizes or sizes != sorted(sizes) or sizes[0] < 0:
        raise ValueError(f"{where}: from_bytes is {sizes}, expected ascending sizes, at least one")
    for algorithm in entry.from_bytes.values():
        if algorithm != NATIVE and (entry.operation, algorithm) not in SCHEDULES:
            known_here = known(entry.operation)
            raise ValueError(f"{where}: {entry.operation} has no algorithm {algorithm!r}; expected one of {known_here}")
        if algorithm == NATIVE and "+" in entry.backend:
            raise ValueError(f"{where}: {entry.backend} never uses the library's own collectives; name a schedule")


class Selection:
    """The algorithms of one communicator's calls. All ranks choose alike.

    ``name`` is the backend's full name and ``ring`` whether that forbids the library's own collectives. ``default`` is
    the algorithm of calls that name none, where it exists; it outranks the ``table``.
    """

    def __init__(
        self, backend: Backend, name: str, *, ring: bool, default: str | None = None, table: Table | None = None
    ) -> None:
        if default is not None and default not in {name for _, name in SCHEDULES}:
            raise ValueError(f"unknown algorithm {default!r}; expected one of {known(None)}")
        self.backend = backend
        self.ring = ring
        self.default = default
        self.table = Table() if table is None else table
        names = [name] if ring else [name, f"ring+{name}"]  # the second for what the library cannot do
        self._rows = [
            {key: (list(found), list(found.values())) for key, found in self.table.rows(name, backend.size).items()}
            for name in names
        ]

    def choose(self, call: Collective, algorithm: Algorithm) -> str | Schedule:
        """The schedule's name or generator, or ``NATIVE``.

        Raises ``ValueError`` for a name that does not exist, ``UnsupportedError`` where "native" is asked of a library
        that does not have the operation, or not for all that the contract asks for.
        """
        operation = call.operation
        if callable(algorithm):
            return algorithm
        if algorithm is not None:
            if algorithm == NATIVE:
                self.check_native(call)
                if self.backend.size > 1:
                    return NATIVE
                algorithm = _FALLBACK.get(operation, "direct")
            if (operation, algorithm) not in SCHEDULES:
                raise ValueError(f"{operation} has no algorithm {algorithm!r}; expected one of {known(operation)}")
            return algorithm
        if self.default is not None and (operation, self.default) in SCHEDULES:
            return self.default
        return self._measured(call) or self._rule(call)

    def _measured(self, call: Collective) -> str | None:
        """What the table says; None where that is nothing, or cannot be done."""
        if not call.numel or _widened(call):
            return None
        op = None if call.op is None else ReduceOp.SUM.name if call.op is ReduceOp.AVG else call.op.name
        nbytes = call.numel * call.dtype.itemsize
        for rows in self._rows:
            found = rows.get((call.operation, op)) or rows.get((call.operation, None))
            if found is not None and (place := bisect_right(found[0], nbytes)):
                algorithm = found[1][place - 1]
                if algorithm != NATIVE or self.has_native(call):
                    return algorithm
        return None

    def _rule(self, call: Collective) -> str:
        operation = call.operation
        if not self.ring and self.has_native(call):
            return NATIVE
        if operation in _FALLBACK:
            return _FALLBACK[operation]
        large = call.numel * call.dtype.itemsize >= _RING_FROM_BYTES
        if self.ring and large and not _widened(call) and (operation, "ring") in SCHEDULES:
            return "ring"
        return "direct"

    def has_native(self, call: Collective) -> bool:
        """Whether the library carries this call, with the result that the contract asks for."""
        op = ReduceOp.SUM if call.op is ReduceOp.AVG else call.op
        fits = (call.even or self.backend.uneven) and 0 < call.numel <= self.backend.max_count
        return fits and self.backend.size > 1 and self.backend.supports(call.operation, call.dtype, op)

    def check_native(self, call: Collective) -> None:
        """Raise ``UnsupportedError`` unless the library's own collective may rightly be asked for."""
        op = ReduceOp.SUM if call.op is ReduceOp.AVG else call.op
        fits = (call.even or self.backend.uneven) and call.numel <= self.backend.max_count
        if self.ring or not (call.numel == 0 or (fits and self.backend.supports(call.operation, call.dtype, op))):
            layer = " under a layer of schedules" if self.ring else ""
            raise UnsupportedError(
                f"{self.backend.name}{layer} does not do {call} by itself, or not as all backends do it; leave "
                "algorithm out, or name a schedule"
            )


def _widened(call: Collective) -> bool:
    """Whether partial sums are wider than the terms: float32 for 16-bit floats. A ring sends partial sums, so twice the
    bytes of an algorithm that sends the terms; tables are measured where both are alike."""
    return call.op is not None and accumulation_dtype(call.dtype) != call.dtype


def known(operation: str | None) -> str:
    """The names of an operation's algorithms, or of all."""
    names = sorted({name for of, name in SCHEDULES if operation in (None, of)})
    return ", ".join([*names, NATIVE])
