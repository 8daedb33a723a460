"""How a program of a job begins and ends: every rank agrees, one speaks."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from typing import Any, TypeVar, cast

import collectives
from collectives import CommError, Communicator
from collectives.errors import RendezvousError
from collectives.rendezvous import resolve
from collectives.types import RankInfo

T = TypeVar("T")
HEAD_START = 0.5  # seconds that rank 0 has for its words before a launcher sees another rank fail
INTERRUPTED = 130  # what shells report for a program that Ctrl-C ended
STOPPED = 75  # EX_TEMPFAIL of sysexits.h: a signal ended it, its state is saved, and started again it goes on


class InputError(Exception):
    """What the user gave cannot be used. The message names what was expected, what was found and the remedy."""


class StoppedError(Exception):
    """A signal asked some rank to end; every rank has agreed, and the state is saved."""


class JobParser(argparse.ArgumentParser):
    """Every rank parses the same arguments and fails alike; only rank 0 says so."""

    def _print_message(self, message: str, file: Any = None) -> None:
        info = identity()
        if info is None or info.rank == 0:
            super()._print_message(message, file)
        else:
            time.sleep(HEAD_START)


def identity() -> RankInfo | None:
    """What the environment tells of this process; None where it contradicts itself, which ``init`` will explain."""
    try:
        return resolve(os.environ)
    except RendezvousError:
        return None


def on_rank_0(comm: Communicator, fn: Callable[[], T]) -> T:
    """``fn()`` of rank 0, on every rank. What it raises for the user to see is raised on every rank as well.

    Without this a rank that cannot read its input would leave the others waiting for it.
    """
    answer: object = None
    if comm.rank == 0:
        try:
            answer = fn()
        except InputError as error:
            answer = error
    answer = comm.broadcast_object(answer, 0)
    if isinstance(answer, InputError):
        raise answer
    return cast(T, answer)


def run_job(program: str, backend: str | None, body: Callable[[Communicator], T]) -> T:
    """``body(comm)`` of this rank, in a job that a launcher started or alone.

    Errors that are the user's to mend end the process with one line instead of a traceback, and exit code 1. A run that
    a signal ended has exit code 75.
    """
    try:
        comm = collectives.init(backend)
    except (CommError, ValueError) as error:
        sys.exit(f"{program}: error: {error}")
    failure: InputError | StoppedError | None = None
    try:
        with comm:
            try:
                return body(comm)
            except (InputError, StoppedError) as error:
                failure = error  # every rank has it, so they close together instead of aborting each other
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    if isinstance(failure, StoppedError):
        sys.exit(STOPPED)
    sys.exit(f"{program}: error on rank {comm.rank}: {failure}")
