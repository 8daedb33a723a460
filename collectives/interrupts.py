"""Threads that are inside a library when the program wants to stop, by Ctrl-C or because it has come to its end.

Python runs a signal's handler on the main thread, between two instructions of its own, so never while that thread
waits in a library. But the signal's number can be written to a pipe at once, and another thread that reads it can make
the library let go of the main thread.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from types import TracebackType

_GRACE = 1.0  # seconds in which a call of a library may still end by itself


def join(threads: Iterable[threading.Thread]) -> None:
    """Let threads that have nothing left to do come to their end, within a second in all.

    One that the interpreter's end meets inside a C++ library takes the whole process with it ("terminate called").
    """
    deadline = time.monotonic() + 1.0
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(max(0.0, deadline - time.monotonic()))


class Watch:
    """Around a call that cannot be interrupted: once ``look`` says so, ``act``, unless it soon ends by itself."""

    def __init__(self, look: Callable[[], bool], act: Callable[[], None]) -> None:
        self._look = look
        self._act = act
        self._over = threading.Event()

    def __enter__(self) -> None:
        self._thread = threading.Thread(target=self._run, name="collectives split", daemon=True)
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(0.1):
            if self._look():
                if not self._over.wait(_GRACE):
                    self._act()
                return


class Interrupts:
    """Around a wait: ``with interrupts: wait()``. Elsewhere ``seen()`` says whether a Ctrl-C came meanwhile."""

    def __init__(self) -> None:
        self._pipe: tuple[int, int] | None = None
        self._waiting = False
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        if self._pipe is None:
            self._pipe = os.pipe()
            for fd in self._pipe:
                os.set_blocking(fd, False)
        previous = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        if previous == -1:
            self._waiting = True
        else:  # somebody else, such as an event loop, reads signals this way
            signal.set_wakeup_fd(previous)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._waiting:
            self._waiting = False
            signal.set_wakeup_fd(-1)
            if kind is not None:  # what came was noticed here
                self._read()

    def seen(self) -> bool:
        """From another thread: whether the main thread, waiting, was sent a Ctrl-C that it is to raise."""
        if not self._waiting or signal.SIGINT not in self._read():
            return False
        return signal.getsignal(signal.SIGINT) is signal.default_int_handler

    def _read(self) -> bytes:
        with self._lock, contextlib.suppress(BlockingIOError):
            return b"" if self._pipe is None else os.read(self._pipe[0], 4096)
        return b""

    def close(self) -> None:
        with self._lock:
            if self._pipe is not None and not self._waiting:
                for fd in self._pipe:
                    os.close(fd)
                self._pipe = None
