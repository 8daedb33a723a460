"""What the ranks print: every line with its rank before it, tracebacks held back until it is known whose matters."""

from __future__ import annotations

import os
import re

HEADER = re.compile(rb"\s*(\+ Exception Group )?Traceback \(most recent call last\):")
# What may come before the header: a cause that was never raised, or PyTorch about a store whose server has died.
START = re.compile(HEADER.pattern + rb"|(\w+\.)+\w*(Error|Exception|Interrupt|Exit): |\[W\d+ [\d:.]+ TCPStore\.cpp")
MAX_LINE = 1 << 20
MAX_LIVE = 4096
ERASE_LINE = b"\r\x1b[K"


class Screen:
    """One output of the launcher. On a terminal, rank 0 may keep one unfinished line at the bottom."""

    def __init__(self, fd: int, terminal: bool) -> None:
        self._fd = fd
        self.terminal = terminal
        self.broken = False  # whoever read this has gone
        self._live = b""

    def line(self, text: bytes) -> None:
        """Print a whole line, above the live one."""
        self._write((ERASE_LINE if self._live else b"") + text + b"\n" + self._live)

    def live(self, text: bytes) -> None:
        """Pass on rank 0's bytes as they are; remember what an interruption must draw again."""
        self._write(text)
        self._live = (self._live + text).rpartition(b"\n")[2]
        start = self._live.rfind(b"\r", 0, -1)
        self._live = self._live[max(start, len(self._live) - MAX_LIVE, 0) :]

    def _write(self, data: bytes) -> None:
        while data and not self.broken:
            try:
                data = data[os.write(self._fd, data) :]
            except BrokenPipeError:
                self.broken = True


class Stream:
    """One rank's stdout or stderr, cut into lines.

    ``add`` prints what is ready. A traceback goes to ``held`` instead: whether it is the cause of a failure or only
    its echo on another rank is not known before the processes have ended. ``release`` prints it after all.
    """

    def __init__(self, rank: int, screen: Screen, *, hold_tracebacks: bool) -> None:
        self.held: list[bytes] = []
        self._prefix = b"[%d] " % rank
        self._screen = screen
        self._holds = hold_tracebacks
        self._may_be_live = rank == 0 and screen.terminal
        self._is_live = False
        self._rest = b""

    def add(self, data: bytes) -> None:
        self._rest += data
        while self._rest:
            if self._is_live or (self._may_be_live and not self.held and _redraws(self._rest.partition(b"\n")[0])):
                line, newline, self._rest = self._rest.partition(b"\n")
                self._screen.live(line + newline)
                self._is_live = not newline
                continue
            line, newline, rest = self._rest.partition(b"\n")
            if not newline and len(line) < MAX_LINE:
                return
            self._rest = rest
            self._line(line)

    def finish(self) -> None:
        """The stream has ended: print the last line, even without its newline."""
        if self._is_live:
            self._screen.live(b"\n")
        elif self._rest:
            self._line(self._rest)
        self._rest, self._is_live = b"", False

    def release(self) -> None:
        """Print the traceback that was held back."""
        held, self.held = self.held, []
        for line in held:
            self._screen.line(self._prefix + line)

    def _line(self, line: bytes) -> None:
        line = line.removesuffix(b"\r")
        if self._holds and (self.held or START.match(line)):
            self.held.append(line)
        else:
            self._screen.line(self._prefix + line)


def _redraws(line: bytes) -> bool:
    """Whether a terminal program draws here: a carriage return inside the line, or an escape sequence."""
    return b"\r" in line.removesuffix(b"\r") or line == b"\r" or b"\x1b" in line


def exception_line(traceback: list[bytes]) -> str:
    """The line that names the exception of a (chained) traceback, without further lines of its message."""
    start = max((i for i, line in enumerate(traceback) if HEADER.match(line)), default=0)
    for line in traceback[start + 1 :]:
        if line[:1] not in (b" ", b"\t", b""):
            return line.decode(errors="replace")
    return traceback[-1].decode(errors="replace").strip() if traceback else ""
