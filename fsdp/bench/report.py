"""From seconds to figures, and figures as tables and JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from rich.table import Table

from fsdp.bench.contenders import APART, FSDP2
from fsdp.bench.measure import TOLERANCE, Memory, Result
from fsdp.bench.models import SHAPES

SCHEMA = 1


@dataclass(frozen=True)
class Row:
    """One contender with one model.

    Attributes:
        seconds: median over steps of the slowest rank's time for a step.
        fastest, slowest: the tenth and the ninetieth percentile of the same.
        tokens: words that all ranks together train on in a second.
        to_apart: seconds over those of processes that never communicate. None where they do not take part.
        to_fsdp2: FSDP2's seconds over this contender's: above 1 it is faster. None likewise.
        communicating: the part of the time in which ranks were blocked in collectives, on average; ours only.
        wrong: steps whose loss differed from the first communicating contender's by more than the tolerance.
    """

    model: str
    contender: str
    world_size: int
    seconds: float
    fastest: float
    slowest: float
    tokens: float
    to_apart: float | None
    to_fsdp2: float | None
    communicating: float | None
    steps: int
    wrong: int
    first_loss: float
    last_loss: float


def rows(model: str, results: Sequence[Result], world_size: int) -> list[Row]:
    """The figures of one model."""
    shape = SHAPES[model]
    medians = {result.contender: median(result.seconds) for result in results}
    apart, fsdp2 = medians.get(APART), medians.get(FSDP2)
    found = []
    for result in results:
        seconds, ordered = medians[result.contender], sorted(result.seconds)
        found.append(
            Row(
                model=model,
                contender=result.contender,
                world_size=world_size,
                seconds=seconds,
                fastest=ordered[len(ordered) // 10],
                slowest=ordered[-1 - len(ordered) // 10],
                tokens=world_size * shape.rows * shape.length / seconds,
                to_apart=None if apart is None else seconds / apart,
                to_fsdp2=None if fsdp2 is None else fsdp2 / seconds,
                communicating=result.waited,
                steps=len(result.seconds),
                wrong=result.wrong,
                first_loss=result.first_loss,
                last_loss=result.last_loss,
            )
        )
    return found


def table(found: Sequence[Row]) -> Table:
    """One model's rows."""
    first = found[0]
    drawn = Table(title=f"GPT of {first.model} parameters, {first.world_size} ranks", title_justify="left")
    drawn.add_column("contender", no_wrap=True)
    for head in ("step", "tokens/s", f"x {APART}", "over fsdp2", "in comm.", "losses"):
        drawn.add_column(head, justify="right", no_wrap=True)
    for row in found:
        drawn.add_row(
            row.contender,
            f"{row.seconds * 1e3:.1f} ms",
            f"{row.tokens:,.0f}",
            "" if row.to_apart is None else f"{row.to_apart:.3f}",
            "" if row.to_fsdp2 is None else f"{row.to_fsdp2:.2f}",
            "" if row.communicating is None else f"{row.communicating:.1%}",
            f"WRONG in {row.wrong}" if row.wrong else "agree",
        )
    return drawn


def memory_table(model: str, found: Sequence[Memory]) -> Table:
    """Peaks of contenders that ran alone."""
    fsdp2 = next((memory.peak for memory in found if memory.contender == FSDP2), None)
    drawn = Table(title=f"{model}: proportional set size at the peak, all ranks, each alone", title_justify="left")
    drawn.add_column("contender", no_wrap=True)
    for head in ("peak", "before the model", "of fsdp2's"):
        drawn.add_column(head, justify="right", no_wrap=True)
    for name, peak, before in found:
        ratio = "" if fsdp2 is None else f"{peak / fsdp2:.2f}"
        drawn.add_row(name, f"{peak / 2**20:,.0f} MiB", f"{before / 2**20:,.0f} MiB", ratio)
    return drawn


def units_table(found: Mapping[str, float], fsdp2: str) -> Table:
    """Microseconds that a unit costs in a step."""
    drawn = Table(title="a unit in a step", title_justify="left")
    drawn.add_column("contender", no_wrap=True)
    for head in ("CPU time", "of fsdp2's"):
        drawn.add_column(head, justify="right", no_wrap=True)
    for name, value in found.items():
        drawn.add_row(name, f"{value:.1f} us", f"{value / found[fsdp2]:.2f}")
    return drawn


def document(
    machine: Mapping[str, Any],
    found: Sequence[Row] = (),
    memories: Mapping[str, Sequence[Memory]] | None = None,
    units: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """What ``--json`` writes."""
    return {
        "schema": SCHEMA,
        "machine": dict(machine),
        "settings": {"optimizer": "AdamW(fused=True)", "dtype": "float32", "threads": 1, "loss_tolerance": TOLERANCE},
        "rows": [asdict(row) for row in found],
        "memory": [{"model": model, **m._asdict()} for model, many in (memories or {}).items() for m in many],
        "microseconds_per_unit": dict(units or {}),
    }
