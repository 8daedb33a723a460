"""For layers over any transport: its messages, asked and waited for alike."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable

from collectives.backend import Backend, Pending
from collectives.errors import CommTimeoutError
from collectives.interrupts import join


class BothWays:
    """Messages of a transport that either polls or waits, as something that does both.

    Args:
        transport: it.
        waiters: threads, for one that waits.
        crowded: more ranks than cores, so that waiting must not spin.
        below, count: what it posted, and how many messages these are.
    """

    def __init__(self, transport: Backend, waiters: Waiters, crowded: bool, below: Pending, count: int) -> None:
        self._polls = transport.polls
        self._waiters = waiters
        self._crowded = crowded
        self._below = below
        self._count = count
        self._waited = 0  # so many have been waited for
        self._threaded = False
        self._done = False
        self._error: Exception | None = None

    def poll(self) -> bool:
        if self._polls:
            return self._below.poll()
        if not self._threaded and not self._done:
            self._threaded = True
            self._waiters.run(self._wait_for_all)
        if self._error is not None:
            raise self._error
        return self._done

    def _wait_for_all(self) -> None:
        try:
            for i in range(self._waited, self._count):
                self._below.wait(i, time.monotonic() + 1e6)
            self._done = True
        except Exception as error:  # raised where somebody polls
            self._error = error

    def wait(self, i: int, deadline: float) -> None:
        if not self._polls and not self._threaded:
            self._below.wait(i, deadline)
            self._waited = max(self._waited, i + 1)
            self._done = self._waited == self._count
            return
        turn = 0
        while not self.poll():
            turn += 1
            if turn & 31 == 0 and time.monotonic() > deadline:
                raise CommTimeoutError("nothing came in time")
            if turn > 2000 or (turn > 50 and self._crowded):
                time.sleep(1e-4)
            else:
                os.sched_yield()


class Waiters:
    """Threads that wait for transports that can only be waited for; made when needed, and used again."""

    def __init__(self) -> None:
        self._idle: list[queue.SimpleQueue[Callable[[], None] | None]] = []
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._closed = False

    def run(self, job: Callable[[], None]) -> None:
        with self._lock:
            jobs = self._idle.pop() if self._idle else None
        if jobs is None:
            jobs = queue.SimpleQueue()
            thread = threading.Thread(target=self._serve, args=(jobs,), name="collectives shm waiter", daemon=True)
            thread.start()
            self._threads.append(thread)
        jobs.put(job)

    def _serve(self, jobs: queue.SimpleQueue[Callable[[], None] | None]) -> None:
        while (job := jobs.get()) is not None:
            job()
            del job
            with self._lock:
                if self._closed:
                    return
                self._idle.append(jobs)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for jobs in self._idle:
                jobs.put(None)
            self._idle.clear()
        join(self._threads)
