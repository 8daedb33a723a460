"""A job of ranks: started together, watched, and ended together when one fails."""

from __future__ import annotations

import math
import os
import selectors
import signal
import time
from collections.abc import Mapping, Sequence
from types import FrameType

from launch import processes
from launch.output import Screen, Stream, exception_line
from launch.processes import Rank

SETTLE = 1.0  # seconds for survivors of a failure to say what they saw
GRACE = 3.0  # seconds between SIGTERM and SIGKILL
STOP_GRACE = {signal.SIGINT: 5.0, signal.SIGTERM: 30.0, signal.SIGHUP: 5.0, signal.SIGQUIT: 5.0}  # to save a checkpoint
HOLD = 5.0  # seconds after which a rank that printed a traceback and lives on was not dying of it
# What a rank raises because of another one.
ECHOES = ("PeerLostError", "CommClosedError", "CommTimeoutError", "CommError")


class Job:
    """``size`` ranks of one command. ``run`` returns the exit code of the launcher.

    Every rank is the leader of a process group and dies with the launcher. A rank that ends with code 0 is done; the
    first that ends otherwise fails the job: the others get SIGTERM and then SIGKILL.
    """

    def __init__(self, command: Sequence[str], size: int, environ: Mapping[str, str]) -> None:
        self._command = command
        self._size = size
        self._environ = environ
        self._selector = selectors.DefaultSelector()
        self._screens = (Screen(1, os.isatty(1)), Screen(2, os.isatty(2)))
        if os.isatty(1) and os.isatty(2):
            self._screens = (self._screens[0],) * 2  # one terminal, one live line
        self._ranks: list[Rank] = []
        self._streams: dict[int, Stream] = {}  # by descriptor
        self._signals: list[int] = []
        self._stopped_by: int | None = None
        self._term_at = self._kill_at = math.inf

    def run(self) -> int:
        """Start the ranks, wait for all, and leave no process behind."""
        processes.adopt_orphans()
        self._catch_signals()
        try:
            self._start()
            while any(rank.status is None for rank in self._ranks):
                self._step()
        finally:
            for rank in self._ranks:
                rank.signal(signal.SIGKILL)
            self._drain()
            for rank in self._ranks:
                rank.reap()
            processes.kill_orphans()
        return self._report()

    def _start(self) -> None:
        threads = None if "OMP_NUM_THREADS" in self._environ else max(1, processes.allowed_cores() // self._size)
        with processes.listener() as store:
            for number in range(self._size):
                env = processes.environment(self._environ, number, self._size, store, threads)
                terminals = (number == 0 and os.isatty(1), number == 0 and os.isatty(2))
                self._add(processes.start(number, self._command, env, store, terminals))

    def _add(self, rank: Rank) -> None:
        self._ranks.append(rank)
        self._selector.register(rank.pidfd, selectors.EVENT_READ, rank)
        for fd, screen, holds in ((rank.stdout, self._screens[0], False), (rank.stderr, self._screens[1], True)):
            self._streams[fd] = Stream(rank.number, screen, hold_tracebacks=holds)
            self._selector.register(fd, selectors.EVENT_READ, rank)

    def _step(self) -> None:
        now = time.monotonic()
        ready = self._selector.select(timeout=0.1)
        # Deaths first: a rank that died without a word comes before those that complain about it.
        for key, _ in ready:
            rank: Rank = key.data
            if key.fd == rank.pidfd and rank.peek() is not None:
                self._selector.unregister(rank.pidfd)
                self._read(rank.stderr, rank)
                rank.failed_at = min(rank.failed_at, now) if rank.status else math.inf
                if rank.status and self._term_at == math.inf:
                    self._term_at = now + SETTLE
        for key, _ in ready:
            if key.fd in self._streams:
                self._read(key.fd, key.data)
        if any(screen.broken for screen in self._screens) and self._stopped_by is None:
            self._stopped_by, self._kill_at = signal.SIGPIPE, now
        self._forward_signals(now)
        self._release_tracebacks(now)
        if now >= self._term_at:
            self._end(signal.SIGTERM)
            self._term_at, self._kill_at = math.nan, min(self._kill_at, now + GRACE)
        if now >= self._kill_at:
            self._end(signal.SIGKILL)

    def _end(self, number: int) -> None:
        for rank in self._ranks:
            if rank.peek() is None:
                rank.ended_by_us = True
                rank.signal(number)

    def _read(self, fd: int, rank: Rank) -> None:
        """Take what a rank has printed; close the stream at its end."""
        stream = self._streams.get(fd)
        while stream is not None:
            try:
                data = os.read(fd, 1 << 16)
            except BlockingIOError:
                return
            except OSError:  # a terminal whose other end is closed
                data = b""
            if not data:
                stream.finish()
                rank.traceback = stream.held or rank.traceback
                self._selector.unregister(fd)
                os.close(fd)
                del self._streams[fd]
                return
            had = bool(stream.held)
            stream.add(data)
            if stream.held and not had:
                rank.failed_at = min(rank.failed_at, time.monotonic())
            rank.traceback = stream.held or rank.traceback  # stdout holds none, and may be read last

    def _release_tracebacks(self, now: float) -> None:
        if self._term_at != math.inf:
            return
        for rank in self._ranks:
            stream = self._streams.get(rank.stderr)
            if stream is not None and stream.held and rank.status is None and now > rank.failed_at + HOLD:
                rank.shown, rank.traceback = stream.held, []
                stream.release()
                rank.failed_at = math.inf

    def _drain(self) -> None:
        for rank in self._ranks:
            for fd in (rank.stdout, rank.stderr):
                self._read(fd, rank)
                if fd in self._streams:  # something outside our reach still has it open
                    self._streams[fd].finish()
                    rank.traceback = self._streams[fd].held or rank.traceback

    # Signals

    def _catch_signals(self) -> None:
        def note(number: int, frame: FrameType | None) -> None:
            self._signals.append(number)

        for number in (*STOP_GRACE, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTSTP, signal.SIGCONT, signal.SIGWINCH):
            if signal.getsignal(number) != signal.SIG_IGN:  # as nohup leaves SIGHUP
                signal.signal(number, note)

    def _forward_signals(self, now: float) -> None:
        while self._signals:
            number = self._signals.pop(0)
            if number == signal.SIGWINCH:
                for fd in (self._ranks[0].stdout, self._ranks[0].stderr):
                    if fd in self._streams:
                        processes.copy_window_size(fd)
                continue
            again = number == signal.SIGINT and self._stopped_by == signal.SIGINT
            for rank in self._ranks:
                if rank.status is None:
                    sent = {signal.SIGTSTP: signal.SIGSTOP}.get(signal.Signals(number), number)
                    rank.signal(signal.SIGKILL if again else sent)
            if number in STOP_GRACE:
                self._stopped_by = self._stopped_by or number
                self._kill_at = min(self._kill_at, now + STOP_GRACE[signal.Signals(number)])
                self._term_at = math.nan  # how a rank ends now is no failure
            elif number == signal.SIGTSTP:
                os.kill(os.getpid(), signal.SIGSTOP)

    # The end

    def _report(self) -> int:
        failed = [rank for rank in self._ranks if rank.status]
        if self._stopped_by is not None:
            for rank in failed:
                self._say_exception(rank)
            reader_gone = self._stopped_by == signal.SIGPIPE
            self._say(
                "nobody reads the output any more" if reader_gone else f"stopped by {_signal_name(self._stopped_by)}"
            )
            return 128 + self._stopped_by
        if not failed:
            for rank in self._ranks:
                self._show(rank)
            return 0
        first = self._culprit(failed)
        for rank in self._ranks:
            if rank is not first and rank.status == 0:
                self._show(rank)
            elif rank is not first and rank.traceback:
                self._say_exception(rank)
            elif rank is not first:
                how = "was ended" if rank.ended_by_us else _how(rank)
                self._say(f"rank {rank.number} {how}, after rank {first.number}")
        self._show(first)
        if first.ended_by_us:
            self._say(
                f"rank {first.number} of {self._size} failed: an exception ended its program, but not its process"
            )
            return 1
        self._say(f"rank {first.number} of {self._size} failed: it {_how(first)}")
        assert first.status is not None
        return first.status if first.status > 0 else 128 - first.status

    def _culprit(self, failed: Sequence[Rank]) -> Rank:
        """The rank whose failure came first, leaving out those that only complain about another."""
        own = [rank for rank in failed if not rank.ended_by_us]
        stuck = [rank for rank in failed if rank.ended_by_us and (rank.traceback or rank.shown)]
        if stuck and all(_is_echo(rank) for rank in own):
            return stuck[0]  # its exception ended the program, but a thread of it lived on
        return min(own or failed, key=lambda rank: (_is_echo(rank), rank.failed_at, rank.number))

    def _show(self, rank: Rank) -> None:
        for line in rank.traceback:
            self._screens[1].line(b"[%d] %b" % (rank.number, line))

    def _say_exception(self, rank: Rank) -> None:
        if rank.traceback:
            self._screens[1].line(f"[{rank.number}] {exception_line(rank.traceback)}".encode())

    def _say(self, text: str) -> None:
        self._screens[1].line(f"launch: {text}".encode())


def _is_echo(rank: Rank) -> bool:
    name = exception_line(rank.traceback).partition(":")[0]
    return name.rpartition(".")[2] in ECHOES


def _how(rank: Rank) -> str:
    assert rank.status is not None
    if rank.status < 0:
        return f"was killed by {_signal_name(-rank.status)} (signal {-rank.status})"
    return f"exited with code {rank.status}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"
