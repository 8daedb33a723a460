"""A rank that behaves as its first argument says; started by the tests of the launcher. Needs nothing but Python."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from types import FrameType

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def environment() -> None:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS")
    fd = os.environ.get("COLLECTIVES_STORE_FD")
    listens = fd is not None and os.path.exists(f"/proc/self/fd/{fd}")
    print(json.dumps({**{name: os.environ.get(name) for name in names}, "listens": listens, "args": sys.argv[2:]}))


def say() -> None:
    print(f"one from {RANK}\ntwo from {RANK}")
    print(f"error from {RANK}", file=sys.stderr)
    sys.stdout.write("no newline at the end")


def early() -> None:
    if RANK == 0:
        time.sleep(1)
        print("the last word")


def fail() -> None:
    """Rank 1 fails as the second argument says; the others would go on for long."""
    how = sys.argv[2]
    if RANK == 1:
        if how == "raise":
            raise ValueError("the reason\nwith a second line")
        if how == "exit":
            sys.exit(3)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
    time.sleep(100)


def echo() -> None:
    """Rank 1 fails, and all others complain at once, some even before rank 1's process has ended."""
    if RANK == 1:
        try:
            raise ValueError("the reason")
        finally:
            print("rank 1 leaves")
            threading.Thread(target=time.sleep, args=(1,)).start()

    class PeerLostError(Exception):
        pass

    time.sleep(0.5)
    try:
        raise OSError("connection reset")
    except OSError as error:
        raise PeerLostError("rank 1 is lost") from error


def stubborn() -> None:
    """Children everywhere, nobody listens to SIGTERM, rank 1 fails."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    subprocess.Popen([sys.executable, __file__, "wait", *sys.argv[2:]])
    subprocess.Popen([sys.executable, __file__, "wait", *sys.argv[2:]], start_new_session=True)
    time.sleep(0.5)
    if RANK == 1:
        sys.exit(4)
    time.sleep(100)


def wait() -> None:
    print("ready", flush=True)
    time.sleep(100)


def checkpoint() -> None:
    def save(number: int, frame: FrameType | None) -> None:
        time.sleep(1 + RANK * 4)
        print(f"saved after {signal.Signals(number).name}", flush=True)
        sys.exit(0)

    signal.signal(signal.SIGTERM, save)
    signal.signal(signal.SIGUSR1, lambda number, frame: print("usr1", flush=True))
    wait()


def logged() -> None:
    """A traceback that is only printed."""
    import traceback

    try:
        raise ValueError("handled")
    except ValueError:
        traceback.print_exc()
    time.sleep(0.5)
    print("all is well")


def progress() -> None:
    print(f"terminal {sys.stdout.isatty()}")
    if RANK == 0:
        for step in range(3):
            sys.stdout.write(f"\rstep {step}")
            sys.stdout.flush()
            time.sleep(0.5)
        print()
    else:
        time.sleep(0.75)
        print("in between")


if __name__ == "__main__":
    globals()[sys.argv[1]]()
