"""What can go wrong, as one tree.

CommError                       any failure of a communicator
├── CollectiveMismatchError     ranks made different calls
├── CommTimeoutError            nothing came in time (also a TimeoutError)
├── PeerLostError               a peer died or left; ``.rank`` says which
├── UnsupportedError            this backend, build or machine cannot do that
├── CommClosedError             the communicator was closed, or failed before
└── RendezvousError             the ranks could not be told apart or brought together

Wrong arguments (a dtype, a size, a rank out of range) are ``TypeError`` and ``ValueError``, raised before anything is
sent, so they leave the communicator usable. A ``CommError`` raised by a running operation is terminal: the
communicator is failed, and later calls raise ``CommClosedError`` from it.
"""

from __future__ import annotations


class CommError(RuntimeError):
    """Any failure of a communicator. The message names the rank, what it expected, what it found and the remedy."""


class CollectiveMismatchError(CommError):
    """Ranks called different operations, or the same one with different sizes, dtypes or roots."""


class CommTimeoutError(CommError, TimeoutError):
    """An operation did not finish within its time-out."""


class PeerLostError(CommError):
    """A peer died, or left without saying goodbye.

    Args:
        message: what was seen.
        rank: the lost peer's rank in the communicator, or -1 where the transport cannot tell.
    """

    def __init__(self, message: str, rank: int = -1) -> None:
        super().__init__(message)
        self.rank = rank


class UnsupportedError(CommError):
    """The backend, the build or the machine cannot do what was asked."""


class CommClosedError(CommError):
    """The communicator was closed, or an earlier failure ended it (then that failure is the ``__cause__``)."""


class RendezvousError(CommError):
    """The environment contradicts itself, or the ranks could not meet."""
