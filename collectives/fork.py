"""What a forked child must know: that it is one, and which connections it must not hold open.

Asking the operating system for the process id on every call would cost more than the rest of a small operation.
"""

from __future__ import annotations

import os
import socket
import weakref
from typing import Protocol

_parents_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
_parents_shortcuts: weakref.WeakSet[Forgetful] = weakref.WeakSet()
_forks = 0


class Forgetful(Protocol):
    """What must be forgotten in a child."""

    def forget(self) -> None: ...


def generation() -> int:
    """How many forks lie between this process and the one that imported this module first."""
    return _forks


def close_in_child(connection: socket.socket) -> None:
    """A child that outlives its parent would keep the connection open, and hide that the parent has died."""
    _parents_sockets.add(connection)


def forget_in_child(what: Forgetful) -> None:
    """So that a call there need not ask whether it is one."""
    _parents_shortcuts.add(what)


def _after_in_child() -> None:
    global _forks
    _forks += 1
    for what in list(_parents_shortcuts):
        what.forget()
    for connection in list(_parents_sockets):
        connection.close()
    _parents_sockets.clear()


os.register_at_fork(after_in_child=_after_in_child)
