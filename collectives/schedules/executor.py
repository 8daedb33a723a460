"""Run a schedule over tensors: cut chunks into segments, post them, and add one while the next is on its way.

The executor is a generator. It yields whatever must be done before it can go on, and the caller decides how to wait for
that: by polling, or by blocking with a deadline. So it serves both kinds of transport, and asynchronous calls for free.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from collectives.schedules.arithmetic import Arithmetic
from collectives.schedules.round import ACC, IN, OUT, RX, Buf, Round, Span
from collectives.types import P2P

# What is added is cut into segments, so that it is still in the cache when it is added, and that one can be added while
# the next is on its way: LANES of them are. Smaller ones cost more in messages than they save. What is only moved is
# cut for the second reason alone.
SEGMENT_BYTES = 1024 * 1024
MOVE_BYTES = 8 * 1024 * 1024
LANES = 2


class Posted(NamedTuple):
    """``count`` operations in flight, as one ``backend.Pending``."""

    pending: Any
    count: int  # type: ignore[assignment]  # hides the tuple method


Post = Callable[[Sequence[P2P]], Posted]


class Chunks(NamedTuple):
    """A contiguous 1-D tensor cut at ``cuts`` (size + 1 ascending offsets, of which ``base`` is the tensor's first)."""

    tensor: torch.Tensor
    cuts: Sequence[int]
    base: int = 0

    def view(self, chunk: int) -> torch.Tensor:
        return self.tensor[self.cuts[chunk] - self.base : self.cuts[chunk + 1] - self.base]


def even_cuts(numel: int, size: int) -> list[int]:
    """``size`` chunks of ``numel`` elements, as equal as can be, the longer ones first."""
    small, longer = divmod(numel, size)
    return [chunk * small + min(chunk, longer) for chunk in range(size + 1)]


class Plan(NamedTuple):
    """A schedule's rounds for one rank, and what executing them takes.

    ``slots``: of scratch. ``chunkwise``: all spans are one chunk. ``moves``: how many rounds at the end only move
    chunks of IN and OUT, on this rank and on all others.
    """

    rounds: tuple[Round, ...]
    slots: dict[Buf, int]
    chunkwise: bool
    moves: int = 0

    @classmethod
    def of(cls, rounds: Iterable[Round], alike: bool = False) -> Plan:
        """``alike``: every rank does the same, rotated."""
        rounds = tuple(rounds)
        spans = [
            span
            for round in rounds
            for span in (
                *(span for _, span in (*round.sends, *round.recvs)),
                *(span for total in round.then for span in (total.into, *total.terms)),
            )
        ]
        slots = {buf: max((s.first + s.count for s in spans if s.buf is buf), default=0) for buf in (ACC, RX)}
        moves = len(list(itertools.takewhile(_only_moves, reversed(rounds)))) if alike else 0
        return cls(rounds, slots, all(span.count == 1 for span in spans), moves)


def _only_moves(round: Round) -> bool:
    return not round.then and all(span.buf in (IN, OUT) for _, span in (*round.sends, *round.recvs))


class Scratch:
    """Memory that executions use one after the other, grown to what the largest needed."""

    def __init__(self) -> None:
        self._blocks: dict[Buf, torch.Tensor] = {}

    def take(self, buf: Buf, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """``numel`` uninitialised elements, the same memory each time."""
        block = self._blocks.get(buf)
        if block is None or block.numel() < numel * dtype.itemsize:
            block = self._blocks[buf] = torch.empty(numel * dtype.itemsize, dtype=torch.uint8, device=device)
        return block[: numel * dtype.itemsize].view(dtype)


@dataclass
class Memory:
    """The four buffers of one execution. ``input`` and ``output`` are None where a rank has none."""

    size: int
    input: Chunks | None
    output: Chunks | None
    dtype: torch.dtype
    acc_dtype: torch.dtype
    device: torch.device
    scratch: Scratch = field(default_factory=Scratch)

    @property
    def longest(self) -> int:
        """Elements in the longest chunk."""
        tables = [chunks.cuts for chunks in (self.input, self.output) if chunks is not None]
        return max((b - a for cuts in tables for a, b in itertools.pairwise(cuts)), default=0)

    def chunks(self, buf: Buf) -> Chunks:
        chunks = self.input if buf is IN else self.output
        assert chunks is not None, f"the schedule uses {buf.name}, which this rank does not have"
        return chunks


class _Resolver:
    """Spans to tensors. Scratch slots are ``stride`` elements apart, and as long as what was last put there."""

    def __init__(self, plan: Plan, memory: Memory, stride: int) -> None:
        self._memory = memory
        self._stride = stride
        self._lengths: dict[tuple[Buf, int], int] = {}
        dtypes = {ACC: memory.acc_dtype, RX: memory.dtype}
        self._blocks = {
            buf: memory.scratch.take(buf, slots * stride, dtypes[buf], memory.device)
            for buf, slots in plan.slots.items()
            if slots
        }

    def places(self, span: Span) -> list[tuple[Buf, int]]:
        wraps = span.buf in (IN, OUT)
        return [
            (span.buf, (span.first + i) % self._memory.size if wraps else span.first + i) for i in range(span.count)
        ]

    def length(self, place: tuple[Buf, int]) -> int:
        buf, chunk = place
        if buf in (IN, OUT):
            cuts = self._memory.chunks(buf).cuts
            return cuts[chunk + 1] - cuts[chunk]
        return self._lengths[place]

    def tensor(self, place: tuple[Buf, int]) -> torch.Tensor:
        """A chunk; of scratch what was last put there."""
        buf, chunk = place
        if buf in (IN, OUT):
            return self._memory.chunks(buf).view(chunk)
        return self.slot(place)[: self._lengths[place]]

    def slot(self, place: tuple[Buf, int]) -> torch.Tensor:
        """A scratch slot, used or not."""
        buf, slot = place
        return self._blocks[buf][slot * self._stride :][: self._stride]

    def joined(self, span: Span) -> list[torch.Tensor]:
        """A span's chunks, neighbours in memory as one tensor."""
        joined: list[torch.Tensor] = []
        for tensor in map(self.tensor, self.places(span)):
            if joined and joined[-1].data_ptr() + joined[-1].nbytes == tensor.data_ptr():
                joined[-1] = joined[-1].as_strided((joined[-1].numel() + tensor.numel(),), (1,))
            else:
                joined.append(tensor)
        return joined

    def measure(self, round: Round) -> None:
        """Learn from a round's sums how long its scratch will be: what is received for them, and what they write."""
        received = {place for _, span in round.recvs for place in self.places(span)}
        found: dict[tuple[Buf, int], int] = {}
        for total in round.then:
            for into, *terms in zip(*map(self.places, (total.into, *total.terms)), strict=True):
                known = [into] if into[0] in (IN, OUT) else []
                known += [term for term in terms if term in found or term not in received]
                length = found[known[0]] if known[0] in found else self.length(known[0])
                found.update((place, length) for place in (into, *terms) if place[0] in (ACC, RX))
        self._lengths.update(found)


def execute(
    plan: Plan, memory: Memory, arithmetic: Arithmetic, post: Post, segment_bytes: int = SEGMENT_BYTES
) -> Iterator[Posted]:
    """Carry out a schedule over ``memory``. Yields what must be done before it continues."""
    elements = max(1, segment_bytes // memory.acc_dtype.itemsize)
    longest = memory.longest
    if plan.moves == len(plan.rounds):
        plan = plan._replace(moves=0)  # nothing to be added first: lanes as long as all of them together
    if plan.chunkwise and longest > elements:
        return _in_lanes(plan, memory, arithmetic, post, elements, longest)
    return _round_by_round(plan, memory, arithmetic, post, elements, longest)


class _Step(NamedTuple):
    """A round, its spans cut into segments: None from where a chunk is shorter than the longest."""

    messages: list[tuple[bool, int, Sequence[torch.Tensor | None]]]  # sends, peer, segments
    sums: list[tuple[Sequence[torch.Tensor | None], list[Sequence[Any]], bool]]  # into, terms, whether into is OUT

    def start(self, j: int, post: Post) -> Posted | None:
        """Post segment ``j``'s messages."""
        ops = [P2P(sends, tensor, peer) for sends, peer, cut in self.messages if (tensor := cut[j]) is not None]
        return post(ops) if ops else None


def _in_lanes(
    plan: Plan, memory: Memory, arithmetic: Arithmetic, post: Post, elements: int, longest: int
) -> Iterator[Posted]:
    """Where every span is one chunk, segment j of a round depends only on segment j of the rounds before.

    So segments go through the rounds in LANES, each posted as soon as it is done with the round before: a ring keeps
    sending, receiving and adding at the same time, in scratch that stays in the cache. Rounds at the end that only move
    take all lanes' segments as one message. All ranks post in one order.
    """
    resolver = _Resolver(plan, memory, min(longest, LANES * elements))
    segments, together = -(-longest // elements), LANES * elements

    def cut(span: Span, elements: int) -> Sequence[torch.Tensor | None]:
        (place,) = resolver.places(span)
        if span.buf in (IN, OUT):
            tensor = resolver.tensor(place)
            cuts: list[torch.Tensor | None] = [*torch.split(tensor, elements)] if tensor.numel() else []
        else:
            whole, rest = divmod(resolver.length(place), elements)
            lanes = torch.split(resolver.slot(place), elements)
            cuts = [lanes[j % LANES] for j in range(whole)]
            cuts += [lanes[whole % LANES][:rest]] if rest else []
        return cuts + [None] * (segments - len(cuts))

    steps = []
    for number, round in enumerate(plan.rounds):
        size = elements if number < len(plan.rounds) - plan.moves else together
        messages = [(True, peer, cut(span, size)) for peer, span in round.sends]
        resolver.measure(round)
        # Receives first: they are awaited in this order, and when one has come its send has mostly gone too.
        messages = [*((False, peer, cut(span, size)) for peer, span in round.recvs), *messages]
        sums = [(cut(t.into, size), [cut(term, size) for term in t.terms], t.into.buf is OUT) for t in round.then]
        steps.append(_Step(messages, sums))
    adding, moving = steps[: len(steps) - plan.moves], steps[len(steps) - plan.moves :]
    flying = [adding[0].start(lane, post) for lane in range(min(LANES, segments))]
    for first in range(0, segments, LANES):
        for k, step in enumerate(adding):
            for j in range(first, min(first + LANES, segments)):
                if (posted := flying[j % LANES]) is not None:
                    yield posted
                for into, terms, is_out in step.sums:
                    if (target := into[j]) is not None:
                        arithmetic.combine(target, [term[j] for term in terms], is_out)
                following, then = (k + 1, j) if k + 1 < len(adding) else (0, j + LANES)
                flying[j % LANES] = adding[following].start(then, post) if then < segments else None
        for step in moving:
            if (posted := step.start(first // LANES, post)) is not None:
                yield posted


def _round_by_round(
    plan: Plan, memory: Memory, arithmetic: Arithmetic, post: Post, elements: int, longest: int
) -> Iterator[Posted]:
    """Where spans are several chunks, or nothing is worth cutting: all of a round's messages, then its sums.

    A message that is not in one piece in memory is packed and unpacked.
    """
    resolver = _Resolver(plan, memory, longest)
    for round in plan.rounds:
        sends = []
        for peer, span in round.sends:
            pieces = resolver.joined(span)
            sends.append(P2P(True, pieces[0] if len(pieces) == 1 else torch.cat(pieces), peer))
        resolver.measure(round)
        ops, unpack = [], []
        for peer, span in round.recvs:
            pieces = resolver.joined(span)
            wire = pieces[0] if len(pieces) == 1 else pieces[0].new_empty(sum(piece.numel() for piece in pieces))
            ops.append(P2P(False, wire, peer))
            if len(pieces) > 1:
                unpack.append((wire, pieces))
        ops = [op for op in (*ops, *sends) if op.tensor.numel()]
        if ops:
            yield post(ops)
        for wire, pieces in unpack:
            for piece, part in zip(pieces, torch.split(wire, [piece.numel() for piece in pieces]), strict=True):
                piece.copy_(part)
        for total in round.then:
            for into, *terms in zip(*map(resolver.places, (total.into, *total.terms)), strict=True):
                target, sources = resolver.tensor(into), [resolver.tensor(term) for term in terms]
                # In cache-sized parts, because each addition reads again what the one before wrote.
                for start in range(0, target.numel(), elements):
                    cut = slice(start, start + elements)
                    arithmetic.combine(target[cut], [source[cut] for source in sources], into[0] is OUT)
