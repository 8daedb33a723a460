"""What rank 0 shows and keeps of a training run: a progress line, metrics.jsonl, summary.json, loss.png."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

METRICS = "metrics.jsonl"
PLAIN_INTERVAL = 10.0  # seconds between lines where there is no terminal


@dataclass(frozen=True)
class Step:
    """One line of metrics.jsonl. ``loss`` is the mean over the global batch, ``comm_share`` the part of the step that
    rank 0 spent blocked in communication; ``held_out_loss`` is there where it was measured after this step."""

    step: int
    loss: float
    tokens_per_s: float
    comm_share: float
    lr: float
    grad_norm: float
    held_out_loss: float | None = None

    def __str__(self) -> str:
        return f"loss {self.loss:.4f}  {self.tokens_per_s:,.0f} tokens/s  communication {self.comm_share:.0%}"


class Report:
    """The progress of a run: one live line on a terminal, else a plain line now and then, without control characters.

    Args:
        total: the steps that the run will take.
        folder: where files go; it exists. None writes nothing.
        earlier: steps of the run that this one goes on from.
    """

    def __init__(self, total: int, folder: Path | None, earlier: Sequence[Step] = ()) -> None:
        self.total = total
        self.folder = folder
        self.steps: list[Step] = list(earlier)
        self._metrics: IO[str] | None = None
        self._files = ExitStack()
        console = Console(file=sys.stdout, highlight=False)
        self._live: Progress | None = None
        # Open MPI gives every rank a terminal of its own for stdout, whatever mpirun writes to, but not for stderr.
        if sys.stdout.isatty() and sys.stderr.isatty() and not console.is_dumb_terminal:
            columns = (
                TextColumn("step {task.completed}/{task.total}"),
                BarColumn(),
                TextColumn("{task.description}"),
                TimeRemainingColumn(),
            )
            self._live = Progress(*columns, console=console)
            self._task = self._live.add_task("", total=total)

    def __enter__(self) -> Report:
        if self.folder is not None:
            self._metrics = self._files.enter_context(open(self.folder / METRICS, "w", buffering=1))
            for step in self.steps:
                self._write(step)
        if self._live is not None:
            self._live.start()
        self._started = self._ended = self._spoke = time.monotonic()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended = time.monotonic()
        if self._live is not None:
            self._live.stop()
        self._files.close()
        if kind is KeyboardInterrupt:
            kept = f"; {self.folder / METRICS} has them" if self.folder else ""
            self.say(f"interrupted after {len(self.steps)} of {self.total} steps{kept}")

    @property
    def seconds(self) -> float:
        """From the first step's beginning to the last one's end."""
        return self._ended - self._started

    def say(self, text: str) -> None:
        """Print lines, above the live one where there is one."""
        if self._live is not None:
            self._live.console.print(text, markup=False, soft_wrap=True)
        else:
            print(text, flush=True)

    def add(self, step: Step) -> None:
        """Take note of a finished step."""
        self.steps.append(step)
        self._write(step)
        if self._live is not None:
            self._live.update(self._task, completed=step.step, description=str(step))
        elif time.monotonic() - self._spoke >= PLAIN_INTERVAL or step.step == self.total:
            self._spoke = time.monotonic()
            self.say(f"step {step.step}/{self.total}  {step}")

    def _write(self, step: Step) -> None:
        if self._metrics is not None:
            fields = {name: value for name, value in dataclasses.asdict(step).items() if value is not None}
            self._metrics.write(json.dumps(fields) + "\n")

    def write_summary(self, summary: dict[str, Any]) -> None:
        """summary.json, and the picture where matplotlib is installed."""
        if self.folder is None:
            return
        (self.folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
        written = f"{METRICS}, summary.json"
        if plot(self.folder / "loss.png", self.steps, summary["bigram_entropy"]):
            written += ", loss.png"
        else:
            print(
                'no loss.png: matplotlib is not installed; pip install "collectives-fsdp[plot]" brings it', flush=True
            )
        print(f"wrote {written} to {self.folder}", flush=True)


def plot(path: Path, steps: list[Step], bigram_entropy: float) -> bool:
    """Draw the losses against the step, with the bigram entropy as a line to beat. False without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot([s.step for s in steps], [s.loss for s in steps], linewidth=0.8, alpha=0.6, label="training batch")
    held_out = [(s.step, s.held_out_loss) for s in steps if s.held_out_loss is not None]
    if held_out:
        axes.plot(*zip(*held_out, strict=True), marker="o", label="held out")
    axes.axhline(bigram_entropy, linestyle="--", color="grey", label="bigram entropy, held out")
    axes.set(xlabel="step", ylabel="loss (nats per byte)")
    axes.legend()
    figure.savefig(path, dpi=150)
    return True


def printable(text: bytes) -> str:
    """``text`` without what could steer a terminal."""
    decoded = text.decode("utf-8", errors="replace")
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in decoded)
