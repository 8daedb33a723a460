"""The figures as an image for a report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fsdp.bench.contenders import APART, DEEPSPEED, TORCH
from fsdp.bench.report import Row

_APART, _OTHERS, _OURS = "#666666", "#E69F00", "#0072B2"  # Okabe and Ito's colours


def save(rows: Sequence[Row], machine: Mapping[str, Any], path: str | Path) -> None:
    """A panel for each model: tokens per second by contender.

    Raises ``ValueError`` where matplotlib is missing.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError("--plot needs matplotlib, which is not installed; pip install matplotlib") from error
    models = list(dict.fromkeys(row.model for row in rows))
    tallest = max(sum(row.model == model for row in rows) for model in models)
    figure = Figure(figsize=(1.0 + 5.0 * len(models), 1.4 + 0.3 * tallest), layout="constrained")
    FigureCanvasAgg(figure)
    for ax, model in zip(figure.subplots(1, len(models), squeeze=False)[0], models, strict=True):
        _panel(ax, [row for row in rows if row.model == model])
        ax.set_title(f"GPT of {model} parameters")
    figure.suptitle(
        f"{rows[0].world_size} ranks on {machine['cpu']}, {machine['processors']} processors\n"
        f"torch {machine['torch']}, float32, AdamW(fused=True), one thread a rank",
        fontsize="medium",
    )
    figure.savefig(path, dpi=150)


def _panel(ax: Any, rows: Sequence[Row]) -> None:
    names = [row.contender for row in rows]
    colours = [_APART if n == APART else _OTHERS if n in TORCH or n in DEEPSPEED else _OURS for n in names]
    bars = ax.barh(names, [row.tokens for row in rows], color=colours)
    ax.bar_label(bars, [f"{row.tokens:,.0f}" for row in rows], padding=3, fontsize="small")
    ax.invert_yaxis()
    ax.margins(x=0.18)
    ax.set_xlabel("tokens per second, all ranks")
    ax.spines[["top", "right"]].set_visible(False)
