"""Run a schedule over tensors: cut chunks into segments, post them, and add one while the next is on its way.

The executor is a generator. It yields whatever must be done before it can go on, and the caller decides how to wait for
that: by polling, or by blocking with a deadline. So it serves both kinds of transport, and asynchronous calls for free.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from collectives.schedules.arithmetic import Arithmetic
from collectives.schedules.round import ACC, IN, OUT, RX, Buf, Round, Span
from collectives.types import P2P

# Small enough that a segment is still in the cache when it is added, large enough that a message's fixed cost is small.
SEGMENT_BYTES = 512 * 1024


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


@dataclass
class Memory:
    """The four buffers of one execution. Scratch slots are made when first written, as long as the longest chunk."""

    size: int
    input: Chunks | None
    output: Chunks | None
    dtype: torch.dtype
    acc_dtype: torch.dtype
    device: torch.device
    lengths: dict[tuple[Buf, int], int] = field(default_factory=dict)
    slots: dict[tuple[Buf, int], torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        tables = [chunks.cuts for chunks in (self.input, self.output) if chunks is not None]
        self.longest = max((b - a for cuts in tables for a, b in itertools.pairwise(cuts)), default=0)

    def length(self, buf: Buf, chunk: int) -> int | None:
        """Elements in a chunk; None for scratch that nothing was put into."""
        chunks = self.input if buf is IN else self.output if buf is OUT else None
        if chunks is not None:
            return chunks.cuts[chunk + 1] - chunks.cuts[chunk]
        return self.lengths.get((buf, chunk))

    def chunk(self, buf: Buf, chunk: int) -> torch.Tensor:
        if buf is IN or buf is OUT:
            chunks = self.input if buf is IN else self.output
            assert chunks is not None, f"{buf.name} does not exist on this rank"
            return chunks.view(chunk)
        if (buf, chunk) not in self.slots:
            dtype = self.acc_dtype if buf is ACC else self.dtype
            self.slots[buf, chunk] = torch.empty(self.longest, dtype=dtype, device=self.device)
        return self.slots[buf, chunk][: self.lengths[buf, chunk]]

    def views(self, span: Span) -> list[torch.Tensor]:
        """A span's chunks, neighbours in memory joined."""
        if span.count == 1:
            return [self.chunk(span.buf, span.first % self.size)]
        joined: list[torch.Tensor] = []
        for chunk in (self.chunk(span.buf, (span.first + i) % self.size) for i in range(span.count)):
            if joined and joined[-1].data_ptr() + joined[-1].nbytes == chunk.data_ptr() and span.buf in (IN, OUT):
                joined[-1] = joined[-1].as_strided((joined[-1].numel() + chunk.numel(),), (1,))
            else:
                joined.append(chunk)
        return joined


class Message(NamedTuple):
    """One message: where it lies, and what it is packed from or unpacked into if that is not one piece."""

    sends: bool
    peer: int
    wire: torch.Tensor
    pieces: list[torch.Tensor]


class Step(NamedTuple):
    """A round, its spans resolved to tensors."""

    messages: list[Message]
    sums: list[tuple[torch.Tensor, list[torch.Tensor], bool]]  # into, terms, whether into is OUT

    def post(self, segment: slice, post: Post) -> Posted | None:
        """Start this round's messages, one segment of each; None where all of them end before it."""
        ops = [P2P(message.sends, message.wire[segment], message.peer) for message in self.messages]
        ops = [op for op in ops if op.tensor.numel()]
        return post(ops) if ops else None

    def add(self, segment: slice, arithmetic: Arithmetic) -> None:
        for into, terms, is_out in self.sums:
            if into[segment].numel():
                arithmetic.combine(into[segment], [term[segment] for term in terms], is_out)

    def unpack(self) -> None:
        for message in self.messages:
            if not message.sends and len(message.pieces) > 1:
                parts = torch.split(message.wire, [piece.numel() for piece in message.pieces])
                for piece, part in zip(message.pieces, parts, strict=True):
                    piece.copy_(part)


def _measure(round: Round, memory: Memory) -> dict[tuple[Buf, int], int]:
    """The lengths that this round's sums give to scratch: what is received for them, and what they write."""
    received = {(s.buf, (s.first + i) % memory.size) for _, s in round.recvs for i in range(s.count)}
    found: dict[tuple[Buf, int], int] = {}
    for total in round.then:
        for i in range(total.into.count):
            places = [(span.buf, (span.first + i) % memory.size) for span in (total.into, *total.terms)]
            known = [memory.length(*p) for p in places[:1] if p[0] in (IN, OUT)]
            known += [found.get(p, None if p in received else memory.length(*p)) for p in places[1:]]
            length = next(n for n in known if n is not None)
            found.update((place, length) for place in places if place[0] in (ACC, RX))
    return found


def _resolve(round: Round, memory: Memory) -> Step:
    messages = [_message(True, peer, memory.views(span)) for peer, span in round.sends]
    memory.lengths.update(_measure(round, memory))
    messages += [_message(False, peer, memory.views(span)) for peer, span in round.recvs]
    sums = []
    for total in round.then:
        for i in range(total.into.count):
            into, *terms = (
                memory.chunk(span.buf, (span.first + i) % memory.size) for span in (total.into, *total.terms)
            )
            sums.append((into, terms, total.into.buf is OUT))
    return Step(messages, sums)


def _message(sends: bool, peer: int, pieces: list[torch.Tensor]) -> Message:
    if len(pieces) == 1:
        return Message(sends, peer, pieces[0], pieces)
    wire = torch.cat(pieces) if sends else pieces[0].new_empty(sum(piece.numel() for piece in pieces))
    return Message(sends, peer, wire, pieces)


def execute(
    rounds: Sequence[Round], memory: Memory, arithmetic: Arithmetic, post: Post, segment_bytes: int = SEGMENT_BYTES
) -> Iterator[Posted]:
    """Carry out ``rounds`` over ``memory``. Yields what must be done before it continues.

    Where every span is one chunk, segment j of a round depends only on segment j of the rounds before, so it is posted
    as soon as that one is done: a ring then keeps sending, receiving and adding at the same time.
    """
    elements = max(1, segment_bytes // memory.acc_dtype.itemsize)
    if memory.longest > elements and all(_one_chunk(round) for round in rounds):
        segments = _segments(memory.longest, elements)
        steps = [_resolve(round, memory) for round in rounds]
        flying = [steps[0].post(segment, post) for segment in segments]
        for step, following in zip(steps, [*steps[1:], None], strict=True):
            for j, segment in enumerate(segments):
                if (posted := flying[j]) is not None:
                    yield posted
                step.add(segment, arithmetic)
                flying[j] = following.post(segment, post) if following is not None else None
        return
    for round in rounds:
        step = _resolve(round, memory)
        longest = max([m.wire.numel() for m in step.messages] + [into.numel() for into, _, _ in step.sums], default=0)
        segments = _segments(longest, elements)
        for posted in [step.post(segment, post) for segment in segments]:
            if posted is not None:
                yield posted
        step.unpack()
        for segment in segments:
            step.add(segment, arithmetic)


def _segments(longest: int, elements: int) -> list[slice]:
    return [slice(start, start + elements) for start in range(0, longest, elements)]


def _one_chunk(round: Round) -> bool:
    spans = [span for _, span in (*round.sends, *round.recvs)] + [total.into for total in round.then]
    return all(span.count == 1 for span in spans)
