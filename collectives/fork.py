"""What a forked child must know: that it is one, and which connections it must not hold open.

Asking the operating system for the process id on every call would cost more than the rest of a small operation.
"""

from __future__ import annotations

import os
import socket
import weakref

_parents_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
_forks = 0


def generation() -> int:
    """How many forks lie between this process and the one that imported this module first."""
    return _forks


def close_in_child(connection: socket.socket) -> None:
    """A child that outlives its parent would keep the connection open, and hide that the parent has died."""
    _parents_sockets.add(connection)


def _after_in_child() -> None:
    global _forks
    _forks += 1
    for connection in list(_parents_sockets):
        connection.close()
    _parents_sockets.clear()


os.register_at_fork(after_in_child=_after_in_child)
