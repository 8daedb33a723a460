"""For a rendezvous: listen at one address, wait for a listener, never block past a deadline or a failure."""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from collectives.errors import RendezvousError

_T = TypeVar("_T")


def listen(host: str, port: int) -> int:
    """A listening socket on ``host`` alone, as a descriptor."""
    family, address = socket.AF_INET, ("", port)
    # A public name may belong to a gateway in front of this host: then only the wildcard address can be bound.
    with contextlib.suppress(socket.gaierror):
        family, _, _, _, resolved = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        address = (str(resolved[0]), port)
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        try:
            listener.bind(address)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            listener.bind(("", port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise RendezvousError(
            f"expected a free port {host}:{port} to serve the key-value store at, but found: {error.strerror}; choose "
            "another port, or end the program that holds it"
        ) from error
    return listener.detach()


def await_listener(host: str, port: int, deadline: float, timeout: float) -> None:
    """Wait until something accepts connections, so that an absent server costs no pages of warnings."""
    while True:
        try:
            with socket.create_connection((host, port), timeout=max(0.01, deadline - time.monotonic())):
                return
        except OSError as error:
            if time.monotonic() + 0.1 >= deadline:
                raise RendezvousError(
                    f"expected a key-value store at {host}:{port} within {timeout:g} s, but could not connect: "
                    f"{error}; check the address, and that rank 0 is running"
                ) from error
        time.sleep(0.1)


def within(deadline: float, function: Callable[[], _T], stopped: Callable[[], bool] = lambda: False) -> _T:
    """``function()``, for functions of libraries that may block for ever: on a server that accepts but never answers,
    or a peer that died. The function runs on a thread, which is given up where it does not end.

    Raises ``TimeoutError`` at ``deadline`` (``time.monotonic()``), and soon after ``stopped()`` has become true.
    """
    result: list[_T] = []
    failure: list[Exception] = []

    def call() -> None:
        try:
            result.append(function())
        except Exception as error:
            failure.append(error)

    thread = threading.Thread(target=call, name="open-store", daemon=True)
    thread.start()
    while thread.is_alive() and not stopped() and (left := deadline - time.monotonic()) > 0:
        thread.join(min(left, 0.05))
    if failure:
        raise failure[0]
    if not result:
        raise TimeoutError("no answer")
    return result[0]
