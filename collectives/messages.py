"""Point-to-point messages, numbered on both sides, so that a send can be compared with the receive that it meets.

A transport cannot be trusted with a receive of another size: MPI writes beyond the end of one that is too short, gloo
ends the process. So a message's tag on the wire depends on its size and dtype: those that differ never meet. Both ranks
then wait, and the control plane lets each compare the other's message with its own of the same number.
"""

from __future__ import annotations

import zlib
from functools import lru_cache
from typing import NamedTuple

import torch

from collectives.backend import SCHEDULE_TAGS, Backend
from collectives.types import P2P

_SPREAD = 1021  # signatures told apart on the wire, where the transport has tags enough
_KEYS = 4096
_RECENT = 16  # how many messages of one kind are remembered


class Message(NamedTuple):
    """One of a rank's messages: ``number`` counts, from 1, those in its direction with its peer and its tag."""

    peer: int
    sends: bool
    tag: int
    number: int
    what: str


def spread(backend: Backend) -> int:
    """Tags on the wire for each tag of the user's."""
    return _SPREAD if backend.max_tag >= _SPREAD * 1024 else 1


@lru_cache(maxsize=4096)
def wire_tag(tag: int, numel: int, dtype: torch.dtype, width: int) -> int:
    """What a message carries instead of the user's ``tag``."""
    return SCHEDULE_TAGS + tag * width + zlib.crc32(f"{numel} {dtype}".encode()) % width


class Ledger:
    """The messages of one rank of a communicator. A program that uses very many tags is not watched any more."""

    def __init__(self) -> None:
        self._recent: dict[tuple[int, bool, int], tuple[int, tuple[str, ...]]] = {}
        self._watches = True

    def enter(self, op: P2P, tag: int) -> Message:
        """Number a message that is about to start."""
        key = (op.peer, op.sends, tag)
        count, recent = self._recent.get(key) or (0, ())
        what = f"{op.tensor.numel()} x {str(op.tensor.dtype).removeprefix('torch.')}"
        if self._watches:
            self._recent[key] = count + 1, (*recent, what)[-_RECENT:]  # at once: another thread looks things up
            if len(self._recent) > _KEYS:
                self._watches = False
                self._recent.clear()
        return Message(op.peer, op.sends, tag, count + 1, what)

    def counterpart(self, of: Message) -> Message | None:
        """This rank's side of a peer's message (``of.peer`` is the peer), if it has started and is remembered."""
        count, recent = self._recent.get((of.peer, not of.sends, of.tag)) or (0, ())
        back = count - of.number
        if not 0 <= back < len(recent):
            return None
        return of._replace(sends=not of.sends, what=recent[-1 - back])
