"""The ranks of a communicator that share a host, and how they use the memory between them.

Each has a block of lines (see ``signals``) and two slots for data, used in turn: what is written for a step lies in the
slot of that step. A slot is made of pieces, one for each member: a piece carries what this rank has for that member,
and its own piece what it has for all.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, TypeAlias

import torch

from collectives.backends.segment import PAGE, Segment
from collectives.backends.signals import BLOCK, DETAILS, OWNER, PLACE, Signals
from collectives.errors import CollectiveMismatchError
from collectives.schedules.arithmetic import Arithmetic
from collectives.schedules.executor import Posted
from collectives.types import ReduceOp

PIECE_BYTES = 512 * 1024  # what is copied or added at once: several of them stay in a core's cache
_LARGEST_SLOT = 2 * 1024 * 1024

# What a call waits for: None for the step that was published last, else messages, or a condition.
Awaited: TypeAlias = "Posted | Callable[[], bool] | None"
Steps: TypeAlias = Iterator[Awaited]
Combine: TypeAlias = Callable[[torch.Tensor, Sequence[torch.Tensor]], None]

OPERATIONS = (
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "broadcast",
    "barrier",
    "all_gather into a shared buffer",
    "broadcast of a shared buffer",
)
_DTYPES = tuple(
    dict.fromkeys(value for name in sorted(dir(torch)) if isinstance(value := getattr(torch, name), torch.dtype))
)
_OPS = (None, *ReduceOp)


class Place(NamedTuple):
    """Where data lies: in which member's segment, at which byte."""

    owner: int
    offset: int


class Call(NamedTuple):
    """What all members must call alike, as numbers that fit a header."""

    signature: int
    details: tuple[int, int]


@lru_cache(maxsize=4096)
def describe(
    operation: str,
    dtype: torch.dtype,
    numel: int,
    op: ReduceOp | None = None,
    root: int = -1,
    cuts: tuple[int, ...] = (),
) -> Call:
    """The header of a call; ``cuts`` where its parts are uneven."""
    code = OPERATIONS.index(operation) | _DTYPES.index(dtype) << 8 | _OPS.index(op) << 16 | (root + 1) << 24
    text = f"{code} {numel} {cuts}".encode()
    return Call(int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little"), (code, numel))


def spell(code: int, numel: int) -> str:
    """A header in words."""
    root, op = code >> 24, _OPS[code >> 16 & 255]
    details = [f"{numel} x {str(_DTYPES[code >> 8 & 255]).removeprefix('torch.')}"]
    details += [op.name] if op is not None else []
    details += [f"root {root - 1}"] if root else []
    return f"{OPERATIONS[code & 255]} ({', '.join(details)})"


@dataclass(frozen=True)
class Pieces:
    """The pieces that a member reads and writes, as tensors of one dtype: first by parity of the step, then by member.

    ``numel``: elements in a piece. ``to``: this rank's, for each member. ``of``: each member's, for this rank.
    ``shared``: each member's, for all.
    """

    numel: int
    to: list[list[torch.Tensor]]
    of: list[list[torch.Tensor]]
    shared: list[list[torch.Tensor]]


class Team:
    """The members of a communicator on this host, seen from one of them.

    Args:
        ranks: the members' ranks in the communicator, ascending.
        me: which of them this is.
        segments: the memory of each.
        offsets: where each keeps its lines and slots: ``footprint`` bytes.
        largest: how many members the team of any host has, at most, so that slots are alike on all hosts.
        signals: their lines.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        me: int,
        segments: Sequence[Segment],
        offsets: Sequence[int],
        largest: int,
        signals: Signals,
    ) -> None:
        self.ranks = ranks
        self.me = me
        self.size = len(ranks)
        self.others = [member for member in range(self.size) if member != me]
        self.signals = signals
        self.slot_bytes = slot_bytes(largest)
        self.scratch = torch.empty(self.slot_bytes, dtype=torch.uint8)
        self._segments = segments
        self._slots = [
            [
                segment.tensor(offset + PAGE + parity * self.slot_bytes, self.slot_bytes, torch.uint8)
                for segment, offset in zip(segments, offsets, strict=True)
            ]
            for parity in (0, 1)
        ]
        self._views: dict[tuple[torch.dtype, int], list[list[torch.Tensor]]] = {}
        self._pieces: dict[torch.dtype, Pieces] = {}

    # Steps

    @property
    def next(self) -> int:
        """The parity of the step that is being written."""
        return self.signals.step + 1 & 1

    @property
    def now(self) -> int:
        """The parity of the step that everybody has published."""
        return self.signals.step & 1

    def announce(self, call: Call, place: Place | None = None) -> None:
        """Publish the first step of a call. ``place``: where peers find this rank's data, unless that is its slot."""
        if place is None:
            self.signals.announce(call.signature, call.details)
        else:
            self.signals.announce(call.signature, call.details, place.offset + 1, place.owner)

    def verify(self, call: Call) -> None:
        """Raise ``CollectiveMismatchError`` unless everybody announced the same call."""
        if self.signals.agree(call.signature):
            return
        headers = self.signals.headers()
        texts = [
            f"rank {rank} called {spell(header[DETAILS], header[DETAILS + 1])}"
            for rank, header in zip(self.ranks, headers, strict=True)
        ]
        same = len({(header[DETAILS], header[DETAILS + 1]) for header in headers}) == 1
        raise CollectiveMismatchError(
            f"{'; '.join(texts)}{', with other sizes for the ranks' if same else ''}; "
            "make the same calls in the same order everywhere"
        )

    def places(self) -> list[Place | None]:
        """For each member, where its data lies; None for its slot."""
        return [Place(header[OWNER], header[PLACE] - 1) if header[PLACE] else None for header in self.signals.headers()]

    def leave(self) -> Callable[[], bool]:
        """Let go of the memory. Returns what tells whether all other members have left too."""
        self._segments, self._slots = (), []
        self._views.clear()
        self._pieces.clear()
        return self.signals.leave()

    # Memory

    def place(self, tensor: torch.Tensor) -> Place | None:
        """Where peers find a tensor; None if it is in nobody's segment."""
        offset = self._segments[self.me].offset_of(tensor)
        return None if offset is None else Place(self.me, offset)

    def at(self, place: Place, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A tensor of some member."""
        return self._segments[place.owner].tensor(place.offset, numel, dtype)

    def slots(self, numel: int, dtype: torch.dtype) -> list[list[torch.Tensor]]:
        """The first ``numel`` elements of every slot, by parity and member."""
        views = self._views.get((dtype, numel))
        if views is None:
            if len(self._views) >= 256:
                self._views.clear()
            nbytes = numel * dtype.itemsize
            with torch.inference_mode(False):  # a view made in it could not be written outside of it
                views = [[slot[:nbytes].view(dtype) for slot in slots] for slots in self._slots]
            self._views[dtype, numel] = views
        return views

    def pieces(self, dtype: torch.dtype) -> Pieces:
        """The slots cut into pieces."""
        found = self._pieces.get(dtype)
        if found is None:
            nbytes = self.slot_bytes // self.size // 64 * 64

            def piece(parity: int, of: int, to: int) -> torch.Tensor:
                return self._slots[parity][of][to * nbytes : (to + 1) * nbytes].view(dtype)

            members, me = range(self.size), self.me
            with torch.inference_mode(False):
                found = self._pieces[dtype] = Pieces(
                    nbytes // dtype.itemsize,
                    [[piece(parity, me, member) for member in members] for parity in (0, 1)],
                    [[piece(parity, member, me) for member in members] for parity in (0, 1)],
                    [[piece(parity, member, member) for member in members] for parity in (0, 1)],
                )
        return found

    def combiner(self, op: ReduceOp, dtype: torch.dtype) -> Combine:
        """A function that combines one term of each member, in their order, into a tensor that may be one of the terms.

        Tensors have at most as many elements as a slot holds.
        """
        arithmetic = Arithmetic(op, dtype, self.size)
        if arithmetic.acc_dtype != dtype or self.size == 1:
            return lambda into, terms: arithmetic.combine(into, terms, True)
        function, averages = arithmetic.function, op is ReduceOp.AVG
        if self.size == 2 and not averages:

            def add(into: torch.Tensor, terms: Sequence[torch.Tensor]) -> None:
                function(terms[0], terms[1], out=into)

            return add
        with torch.inference_mode(False):
            scratch = self.scratch.view(dtype)

        def chain(into: torch.Tensor, terms: Sequence[torch.Tensor]) -> None:
            first, second, *others = terms
            total = scratch[: into.numel()] if others else into
            function(first, second, out=total)
            for i, term in enumerate(others, 1):
                following = into if i == len(others) else total
                function(total, term, out=following)
            if averages:
                arithmetic.finish(into)

        return chain


def slot_bytes(members: int) -> int:
    """The length of a slot: a piece for each of ``members``."""
    return min(members * PIECE_BYTES, _LARGEST_SLOT)


def footprint(members: int) -> int:
    """What a team needs in each member's segment: a page with its lines, then two slots."""
    assert BLOCK <= PAGE
    return PAGE + 2 * slot_bytes(members)
