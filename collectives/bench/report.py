"""From samples to figures, and figures as text and JSON."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from collectives.bench.contenders import COPY
from collectives.bench.measure import Case, Result
from collectives.bench.operations import OPERATIONS

SCHEMA = 1
_CACHES = "/sys/devices/system/cpu/cpu0/cache"
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}


@dataclass(frozen=True)
class Row:
    """One contender in one case. Bandwidths are in 1e9 bytes a second.

    Attributes:
        nbytes: of the larger side, as nccl-tests count.
        seconds: median over samples of the slowest rank's time for a call.
        fastest, slowest: the tenth and the ninetieth percentile of the same.
        algbw: nbytes / seconds. busbw: that times nccl-tests' factor for the operation.
        bound_percent: the time that the bytes would take that all ranks together must read and write (each input
            once, each result once) at the rate at which all ranks at once copied tensors of ``nbytes``, as a part of
            ``seconds``.
        ratio: the baseline's seconds over this contender's: above 1 it is faster. None without a baseline.
        adds: seconds beyond the baseline's.
        wrong: samples whose result was wrong on some rank.
    """

    operation: str
    contender: str
    nbytes: int
    dtype: str
    world_size: int
    cache: str
    seconds: float
    fastest: float
    slowest: float
    algbw: float
    busbw: float
    bound_percent: float
    ratio: float | None
    adds: float | None
    samples: int
    wrong: int


def rows(case: Case, results: Sequence[Result], world_size: int, baseline: str | None) -> list[Row]:
    """The figures of one case."""
    operation = OPERATIONS[case.operation]
    nbytes = case.numel(world_size) * case.dtype.itemsize
    medians = {result.contender: median(result.seconds) for result in results}
    # A copy reads and writes nbytes on every rank.
    bound = medians[COPY] * operation.moves(world_size) / (2 * world_size)
    reference = medians.get(baseline or "")
    found = []
    for name, seconds, wrong in results:
        ordered, middle = sorted(seconds), medians[name]
        copied = name == COPY
        found.append(
            Row(
                operation=case.operation,
                contender=name,
                nbytes=nbytes,
                dtype=str(case.dtype).removeprefix("torch."),
                world_size=world_size,
                cache="cold" if case.cold else "hot",
                seconds=middle,
                fastest=ordered[len(ordered) // 10],
                slowest=ordered[-1 - len(ordered) // 10],
                algbw=nbytes / middle / 1e9,
                busbw=nbytes / middle / 1e9 * (1.0 if copied else operation.bus(world_size)),
                bound_percent=100.0 if copied else 100 * bound / middle,
                ratio=None if reference is None or copied else reference / middle,
                adds=None if reference is None or copied else middle - reference,
                samples=len(seconds),
                wrong=wrong,
            )
        )
    return found


class Columns:
    """The figures as text, line by line as they come. ``adds`` shows what a call costs beyond the baseline's."""

    def __init__(self, names: Iterable[str], baseline: str | None, adds: bool = False) -> None:
        widest = max(map(len, [*names, COPY]))
        ratio = f"to {baseline}" if baseline else "ratio"
        self._heads = ["operation", "bytes", "ranks", "cache", "backend", "time", "algbw", "busbw", "bound", ratio]
        self._widths = [14, 7, 5, 5, widest, 10, 7, 7, 6, max(5, len(ratio))]
        if adds:
            self._heads, self._widths = [*self._heads, "adds"], [*self._widths, 10]

    def head(self) -> str:
        return self._join(self._heads)

    def line(self, row: Row) -> str:
        cells = [
            row.operation,
            size_name(row.nbytes),
            str(row.world_size),
            row.cache,
            row.contender,
            time_name(row.seconds),
            f"{row.algbw:.2f}",
            f"{row.busbw:.2f}",
            f"{row.bound_percent:.0f} %",
            "" if row.ratio is None else f"{row.ratio:.2f}",
        ]
        if len(self._heads) > len(cells):
            cells.append("" if row.adds is None else f"{row.adds * 1e6:+.2f} us")
        return self._join(cells) + (f"  WRONG in {row.wrong} of {row.samples} samples" if row.wrong else "")

    def _join(self, cells: Sequence[str]) -> str:
        left = {0, 3, 4}
        pairs = enumerate(zip(cells, self._widths, strict=True))
        return "  ".join(cell.ljust(width) if n in left else cell.rjust(width) for n, (cell, width) in pairs).rstrip()


def document(found: Sequence[Row], machine: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """What ``--json`` writes."""
    return {
        "schema": SCHEMA,
        "machine": dict(machine),
        "settings": dict(settings),
        "rows": [asdict(row) for row in found],
    }


def machine(launcher: str, mpi: str) -> dict[str, Any]:
    """What was measured on. ``mpi`` is the MPI library's version, or empty."""
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "processors": os.cpu_count(),
        "last_level_cache": cache_bytes(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "mpi": mpi,
        "launcher": launcher,
        "load_before": load(),
    }


def load() -> float:
    """Processes that wanted to run during the last minute."""
    return os.getloadavg()[0]


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*:\s*(.+)$", info.read_text(), re.MULTILINE) if info.exists() else None
    return found.group(1) if found else platform.processor() or platform.machine()


def cache_bytes(folder: str = _CACHES) -> int:
    """The last-level cache's size; 64 MiB where the system does not say."""
    sizes = [path.read_text().strip() for path in Path(folder).glob("index*/size")]
    return max((size_bytes(size) for size in sizes), default=64 * 2**20)


def size_bytes(name: str) -> int:
    """64K, 1M, 1.5G, 100: bytes, in powers of two. Raises ``ValueError``."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?)(?:i?B)?", name.strip(), re.IGNORECASE)
    if found is None or float(found.group(1)) <= 0:
        raise ValueError(f"expected a size such as 1K, 64M or 1000, found {name!r}")
    return int(float(found.group(1)) * _UNITS[found.group(2).upper()])


def size_name(nbytes: int) -> str:
    for unit in ("G", "M", "K"):
        if nbytes >= 0.99 * _UNITS[unit]:  # a multiple of three ranks is no power of two
            return f"{nbytes / _UNITS[unit]:.2f}".rstrip("0").rstrip(".") + unit
    return str(nbytes)


def time_name(seconds: float) -> str:
    return f"{seconds * 1e6:.2f} us" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"
