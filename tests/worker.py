"""One rank of a pool (tests/ranks.py): takes calls from the side channel and answers with results or errors."""

from __future__ import annotations

import faulthandler
import os
import pickle
import queue
import signal
import socket
import sys
import threading
import traceback
from multiprocessing.connection import Client, Connection
from pathlib import Path

import collectives
from tests.ranks import LEAVE, Call

RANK_NAMES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "RANK")
TIMEOUT = 50.0  # of the communicators: below that of a test, so that the library's own error comes first


def start(environment: dict[str, str], store: socket.socket | None) -> None:
    """Be the rank that ``environment`` says; rank 0 of a job inherits the listening socket of its store."""
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    if store is not None:
        os.environ["COLLECTIVES_STORE_FD"] = str(store.detach())
    main()


def main() -> None:
    rank = int(next(os.environ[name] for name in RANK_NAMES if name in os.environ))
    log = os.open(Path(os.environ["RANKS_LOGS"]) / f"rank{rank}.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    connection = Client(os.environ["RANKS_SOCKET"], family="AF_UNIX", authkey=bytes.fromhex(os.environ["RANKS_KEY"]))
    connection.send_bytes(pickle.dumps((rank, os.getpid())))
    messages: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=receive, args=(connection, messages), daemon=True).start()
    communicators: dict[str, collectives.Communicator] = {}
    while (message := messages.get()) != LEAVE:
        answer(connection, message, communicators)
    for communicator in communicators.values():
        communicator.close()


def receive(connection: Connection, messages: queue.SimpleQueue[bytes]) -> None:
    """Hand on what arrives; leave at once, whatever the main thread does, when the test run is gone."""
    while True:
        try:
            message = connection.recv_bytes()
        except (EOFError, OSError):
            os._exit(1)
        messages.put(message)
        if message == LEAVE:
            return


def answer(connection: Connection, message: bytes, communicators: dict[str, collectives.Communicator]) -> None:
    result, error, trace = None, None, ""
    try:
        call: Call = pickle.loads(message)
        if call.backend not in communicators:
            communicators[call.backend] = collectives.init(call.backend, timeout=TIMEOUT, setup_timeout=TIMEOUT)
        result = call.fn(communicators[call.backend], *call.args, **call.kwargs)
    except BaseException as caught:  # it is raised again in the test
        trace = traceback.format_exc()
        error = portable(caught)
    connection.send_bytes(pickle.dumps((result, error, trace)))


def portable(error: BaseException) -> BaseException:
    """The error itself, or a plain one of the same text where it does not pickle."""
    try:
        copy: BaseException = pickle.loads(pickle.dumps(error))
    except Exception:  # whatever keeps it from pickling
        return RuntimeError(f"{type(error).__name__}: {error}")
    return copy


if __name__ == "__main__":
    main()
    sys.exit(0)
