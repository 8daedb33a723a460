"""The figures as an image for a report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from collectives.bench.contenders import COPY
from collectives.bench.report import Row, size_name

_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F3C8D", "#666666")  # Okabe and Ito
_MARKERS = "osD^vP*X"


def save(rows: Sequence[Row], machine: Mapping[str, Any], path: str | Path) -> None:
    """A panel for each operation (and cache temperature): bus bandwidth over bytes, both logarithmic.

    Raises ``ValueError`` where matplotlib is missing.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError("--plot needs matplotlib, which is not installed; pip install matplotlib") from error
    operations = list(dict.fromkeys(row.operation for row in rows))
    caches = list(dict.fromkeys(row.cache for row in rows))
    names = [name for name in dict.fromkeys(row.contender for row in rows) if name != COPY]
    figure = Figure(figsize=(0.8 + 4.2 * len(operations), 1.8 + 3.4 * len(caches)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(caches), len(operations), squeeze=False, sharex=True, sharey=True)
    for line, cache in zip(axes, caches, strict=True):
        for ax, operation in zip(line, operations, strict=True):
            here = [row for row in rows if row.cache == cache and row.operation == operation]
            _panel(ax, here, names)
            ax.set_title(f"{operation}, {cache}" if len(caches) > 1 else operation)
        line[0].set_ylabel("bus bandwidth, GB/s")
    for ax in axes[-1]:
        ax.set_xlabel("bytes")
    handles = {label: handle for ax in axes.flat for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    figure.legend(
        handles.values(), handles.keys(), loc="outside lower center", ncols=min(6, len(handles)), frameon=False
    )
    first = rows[0]
    figure.suptitle(
        f"{first.world_size} ranks, {first.dtype}, on {machine['cpu']}, {machine['processors']} processors\n"
        f"torch {machine['torch']}" + (f", {machine['mpi']}" if machine["mpi"] else ""),
        fontsize="medium",
    )
    figure.savefig(path, dpi=150)


def _panel(ax: Any, rows: Sequence[Row], names: Sequence[str]) -> None:
    sizes = sorted({row.nbytes for row in rows})
    for number, name in enumerate(names):
        points = sorted((row.nbytes, row.busbw) for row in rows if row.contender == name)
        if points:
            turn, place = divmod(number, len(_COLOURS))
            style = {"color": _COLOURS[place], "marker": _MARKERS[place]}
            if turn % 2:  # the same colour again, hollow
                style["markerfacecolor"] = "white"
            dashes = "--" if name.startswith("lib:") else "-"
            ax.plot(*zip(*points, strict=True), dashes, label=name, linewidth=1.5, markersize=4, **style)
    # The bound is the same whichever contender's row it is read from.
    bound = {row.nbytes: row.busbw * 100 / row.bound_percent for row in rows if row.contender != COPY}
    ax.plot(sizes, [bound[size] for size in sizes if size in bound], ":", color="black", label="bound by copying")
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xticks(sizes, [size_name(size) for size in sizes])
    ax.minorticks_off()
    ax.grid(True, which="major", linewidth=0.4, alpha=0.5)
    ax.spines[["top", "right"]].set_visible(False)
