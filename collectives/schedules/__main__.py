"""``python -m collectives.schedules list | check | show``: see what the schedules do, without running them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from collectives.errors import UnsupportedError
from collectives.schedules.catalogue import SCHEDULES
from collectives.schedules.check import Report, ScheduleError, check
from collectives.schedules.show import draw_png, draw_text
from collectives.schedules.task import ROOTED, Task


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, or 1 where a schedule is wrong or cannot be drawn."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.command == "list":
        _list(options.size)
        return 0
    operation, algorithm = _NAMES[options.schedule]
    root = options.root if operation in ROOTED else None
    if root is not None and not 0 <= root < options.size:
        parser.error(f"expected a root of 0 to {options.size - 1}, got {root}")
    task = Task(operation, options.size, root)
    promise = SCHEDULES[operation, algorithm]
    try:
        if options.command == "check":
            expect = Report(promise.rounds(options.size), promise.volume(options.size))
            report = check(
                promise.schedule, operation, options.size, root, in_rank_order=promise.in_rank_order, expect=expect
            )
            print(f"{options.schedule} is right for {options.size} ranks: {report.rounds} rounds, {_chunks(report)}")
        elif options.png is not None:
            draw_png(promise.schedule, task, options.png)
            print(f"wrote {options.png}")
        else:
            for line in draw_text(promise.schedule, task):
                print(line)
    except (OSError, ScheduleError, UnsupportedError) as error:
        print(f"{options.schedule}: {error}", file=sys.stderr)
        return 1
    return 0


_NAMES = {algorithm.schedule.__name__: key for key, algorithm in SCHEDULES.items()}


def _list(size: int) -> None:
    print(f"{'schedule':28}{'rounds':>8}{'chunks sent':>14}   by the busiest of {size} ranks; a chunk is 1/{size}")
    for algorithm in SCHEDULES.values():
        print(f"{algorithm.schedule.__name__:28}{algorithm.rounds(size):>8}{algorithm.volume(size):>14}")


def _chunks(report: Report) -> str:
    return f"at most {report.volume} chunk{'s' * (report.volume != 1)} sent by a rank"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m collectives.schedules", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, purpose in (
        ("list", "all schedules, with their rounds and volume"),
        ("check", "prove a schedule"),
        ("show", "draw who holds which chunk after each round"),
    ):
        command = commands.add_parser(name, help=purpose, description=purpose)
        if name != "list":
            command.add_argument("schedule", choices=_NAMES, metavar="schedule", help=", ".join(_NAMES))
            command.add_argument("--root", type=int, default=0, help="of a broadcast, gather, reduce or scatter")
        command.add_argument("-p", "--size", type=_positive, default=4, help="world size (default: 4)")
        if name == "show":
            command.add_argument("--png", type=Path, metavar="FILE", help="draw an image instead of text")
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a world size of at least 1, got {text}")
    return number


if __name__ == "__main__":
    sys.exit(main())
