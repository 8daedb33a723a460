"""A program in which one rank fails, and the others write down what they see.

Started by tests: python -m tests.collectives.failing HOW WHEN BACKEND VICTIM FOLDER.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import torch

import collectives
from collectives import Communicator, Work
from collectives.errors import CommClosedError, CommError

TIMEOUT = 2.0  # of calls that wait for a rank that is stopped; of others it is longer than any test
NUMEL = 300_000


def fail(how: str, folder: Path) -> None:
    """The end of the victim."""
    (folder / "death").write_text(str(time.time()))
    match how:
        case "SIGKILL":
            os.kill(os.getpid(), signal.SIGKILL)
        case "os._exit":
            os._exit(86)
        case "segfault":
            faulthandler.disable()
            ctypes.string_at(0)
        case "raise":
            raise ArithmeticError("the first failure")
        case "sys.exit":
            sys.exit(3)
        case "SIGSTOP":
            os.kill(os.getpid(), signal.SIGSTOP)


def main(how: str, when: str, backend: str, victim: int, folder: Path) -> None:
    comm = collectives.init(backend, timeout=TIMEOUT if how == "SIGSTOP" else 60.0, setup_timeout=60.0)
    (folder / f"pid{comm.rank}").write_text(str(os.getpid()))
    while len(list(folder.glob("pid*"))) < comm.world_size:  # a launcher may end who is still on the way
        time.sleep(0.01)
    tensor, works = torch.ones(NUMEL), list[Work]()
    group: Communicator | None = comm
    try:
        # The victim may be gone before the others are out of what comes first, too.
        if when != "first call":
            comm.all_reduce(tensor)
            assert float(tensor[-1]) == comm.world_size
        if when == "sub-group":
            group = comm.split(0, key=-comm.rank)
            assert group is not None
        if comm.rank == victim:
            if when == "ring":
                group.all_reduce(tensor.clone(), async_op=True, algorithm="ring")
            fail(how, folder)
        match when:
            case "ring":
                for _ in range(3):
                    works.append(group.all_reduce(tensor.clone(), async_op=True, algorithm="ring"))
                works[-1].wait()
            case "split":
                comm.split(0)
            case "close":
                works.append(group.all_reduce(tensor, async_op=True))
                comm.close()
                works[-1].wait()  # where its failure came before close()
            case _:
                works.append(group.all_reduce(tensor, async_op=True))
                works[-1].wait()
        raise AssertionError(f"rank {comm.rank} went on without rank {victim}")
    except CommError as raised:
        error: BaseException = raised
        if isinstance(raised, CommClosedError) and raised.__cause__ is not None:  # it was known before the call
            error = raised.__cause__
        note = {
            "seen": time.time(),
            "error": type(error).__name__,
            "rank": getattr(error, "rank", None),
            "text": str(error),
            "named": victim if group is comm else comm.world_size - 1 - victim,
            "refused": isinstance(raised, CommClosedError),
            "pending": [type(work.exception()).__name__ for work in works],
        }
        (folder / f"rank{comm.rank}.part").write_text(json.dumps(note))
        os.replace(folder / f"rank{comm.rank}.part", folder / f"rank{comm.rank}")
        raise


def start(environment: dict[str, str], store: socket.socket | None, arguments: tuple[Any, ...], log: str) -> None:
    """The program in a process forked from one that has PyTorch imported, ended as the interpreter ends one."""
    os.environ.clear()
    os.environ.update(environment)
    if store is not None:
        os.environ["COLLECTIVES_STORE_FD"] = str(store.detach())
    file = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    code = 0
    try:
        main(*arguments)
    except SystemExit as error:
        code = int(error.code or 0)
    except BaseException as error:
        code, sys.last_value = 1, error
        sys.excepthook(type(error), error, error.__traceback__)
    atexit._run_exitfuncs()
    os._exit(code)


if __name__ == "__main__":
    main(*sys.argv[1:4], int(sys.argv[4]), Path(sys.argv[5]))
