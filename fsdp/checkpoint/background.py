"""A save that goes on in a thread while training does.

Training uses the communicator meanwhile, so the threads do not: each rank leaves a note beside its file when it is
done, in the folder that they all see, and rank 0's thread waits for all notes.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from collectives import CommError
from fsdp.checkpoint import directory
from fsdp.checkpoint.errors import CheckpointError
from fsdp.checkpoint.ranks import Ranks, describe
from fsdp.checkpoint.snapshot import Snapshot, join

NOTE = "done-{:05d}.json"
INTERVAL = 0.05  # seconds between looks for notes
NICENESS = 19  # of the thread: training comes first
PATIENCE = 600.0  # seconds that rank 0 waits for the others' notes
AFTERWARDS = 60.0  # seconds of that, once the program has ended: nobody may be left to write them


class Background:
    """The writing of one snapshot, which has been copied, begun when it is built."""

    def __init__(self, snapshot: Snapshot, partial: Path, step: int, keep: int | None, ranks: Ranks) -> None:
        self._snapshot: Snapshot | None = snapshot
        self._partial, self._step, self._keep = partial, step, keep
        self._rank, self._world_size = ranks.rank, ranks.world_size
        self._written = threading.Event()  # this rank's part is, or has failed
        self._given_up = threading.Event()
        self._error: str | None = None
        self._final: Path | None = None
        self._thread = threading.Thread(target=self._run, name="fsdp-save")
        self._thread.start()

    @property
    def writes(self) -> bool:
        """Whether the thread is at work."""
        return self._thread.is_alive()

    def _run(self) -> None:
        if sys.platform == "linux":  # where a thread has a priority of its own
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        try:
            assert self._snapshot is not None
            part = self._snapshot.write(self._partial)
            self._snapshot = None
            note = self._partial / NOTE.format(self._rank)
            unfinished = note.with_suffix(".tmp")
            unfinished.write_text(json.dumps(part), encoding="utf-8")
            os.rename(unfinished, note)
            self._written.set()
            if self._rank == 0:
                self._publish(self._notes())
        except Exception as error:  # raised by ``finish``, on every rank
            self._error = describe(error, self._rank)
        finally:
            self._snapshot = None
            self._written.set()

    def _notes(self) -> Sequence[dict[str, Any]]:
        """What every rank wrote, when all have."""
        notes = [self._partial / NOTE.format(rank) for rank in range(self._world_size)]
        deadline = time.monotonic() + PATIENCE
        goes_on = True
        while missing := [note for note in notes if not note.exists()]:
            if goes_on and not threading.main_thread().is_alive():
                goes_on, deadline = False, min(deadline, time.monotonic() + AFTERWARDS)
            if self._given_up.wait(INTERVAL) or time.monotonic() > deadline:
                raise CheckpointError(
                    f"{missing[0]}: expected this note of a rank that has written its part; found none"
                )
        return [json.loads(note.read_text(encoding="utf-8")) for note in notes]

    def _publish(self, parts: Sequence[dict[str, Any]]) -> None:
        for rank in range(self._world_size):
            os.unlink(self._partial / NOTE.format(rank))
        self._final = directory.publish(self._partial, self._step, join(self._step, parts))
        directory.tidy(self._final, self._keep)

    def finish(self, ranks: Ranks) -> Path:
        """The checkpoint's folder. Collective. Raises ``CheckpointError`` on every rank where one failed."""
        self._written.wait()
        try:
            own = ranks.gather(self._error)
        except CommError:  # whoever was lost leaves no note
            self._given_up.set()
            raise
        failure = next((error for error in own if error is not None), None)
        if failure is not None:
            self._given_up.set()
        self._thread.join()
        failure = ranks.broadcast(failure or self._error)
        if failure is not None:
            if ranks.rank == 0 and self._final is None:
                directory.remove(self._partial)
            raise CheckpointError(failure)
        final = ranks.broadcast(self._final)
        assert final is not None
        return final
