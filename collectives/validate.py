"""Mismatch detection: before a collective the ranks compare what they are about to call.

``agree`` is for programs under development: one small exchange a call, in which every rank learns every other's call. A
mismatch then raises on all ranks at once and says who called what, where otherwise wrong numbers or a time-out would
follow. ``meet`` is for every day: before a library's own collective, where a mismatch would be the end of the process.
Where it would only be a wrong result, of a small message, ``Unmet`` remembers what was called until ranks meet again.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Generator, Sequence
from itertools import groupby, pairwise
from typing import TypeAlias, TypeVar

import torch

from collectives.backend import Pending
from collectives.collective import Collective
from collectives.errors import CollectiveMismatchError, CommError
from collectives.schedules.dissemination import dissemination_barrier
from collectives.schedules.executor import Post, Posted
from collectives.types import P2P

_DIGEST = 16  # bytes
_TEXT = 240  # bytes; a longer description is compared in full by its digest, and shown cut
_MOST_UNMET = 128  # calls without a meeting, which costs more than the rest of a small one
_SHOWN = 4
_T = TypeVar("_T")
Steps: TypeAlias = Generator[Posted, None, _T]


def agree(
    call: Collective, what: str, number: int, rank: int, size: int, device: torch.device, post: Post
) -> Steps[None]:
    """The steps that compare this rank's ``call`` with everyone's; nothing else may be sent before they are done.

    Args:
        what: the call with its algorithm, as error messages show it.
        number: which collective of the communicator it is, from 1.
        post: starts messages that no others can be taken for.

    Raises:
        CollectiveMismatchError: naming each different call and who made it; the same on all ranks.
    """
    texts = yield from _gather_texts(_signature(call, what), rank, size, device, post)
    if len({digest for digest, _ in texts}) > 1:
        yield from _await_all(rank, size, device, post)
        raise CollectiveMismatchError(
            f"call {number} is not the same on all ranks: {_who_called_what([text for _, text in texts])}; make the "
            "same calls in the same order, with the same sizes, on all ranks"
        )
    if call.operation == "all_to_all":
        yield from _agree_on_splits(call, number, rank, size, device, post)


def meet(rank: int, size: int, device: torch.device, post: Post) -> Steps[None]:
    """The steps that end when every rank has come; ``post`` gives messages the tag of what is called.

    Ranks that call something else have other tags, so nobody gets through, and the control plane says who called what.
    """
    token = torch.zeros(2, dtype=torch.uint8, device=device)
    for sends, recvs, _ in dissemination_barrier(rank, size):
        ops = [P2P.send(token[:1], peer) for peer, _ in sends] + [P2P.recv(token[1:], peer) for peer, _ in recvs]
        yield post(ops)


class Unmet:
    """What was called since the ranks last met: they compare it when they do, by the tag of their messages."""

    def __init__(self) -> None:
        self._whats: list[Callable[[], str]] = []
        self.note = self._whats.append

    @property
    def full(self) -> bool:
        """Whether the ranks must meet before the next call."""
        return len(self._whats) >= _MOST_UNMET

    def __bool__(self) -> bool:
        return bool(self._whats)

    def take(self) -> str:
        """What was called, in words, or nothing; from now on that is forgotten."""
        calls = [f"{len(list(those))} x {text}" for text, those in groupby(what() for what in self._whats)]
        self._whats.clear()
        if len(calls) > _SHOWN:
            digest = hashlib.sha256("; ".join(calls).encode()).hexdigest()[:8]
            calls = [f"others ({digest})", *calls[-_SHOWN:]]
        return f", after {', then '.join(calls)}" if calls else ""


def _signature(call: Collective, what: str) -> str:
    if call.operation == "all_to_all":  # numbers of elements differ from rank to rank
        return f"all_to_all ({str(call.dtype).removeprefix('torch.')}) by {what.rpartition(' by ')[2]}"
    if call.even:
        return what
    sizes = [end - start for start, end in pairwise((call.input or call.output).cuts)]  # type: ignore[union-attr]
    return f"{what}, sizes {sizes}"


def _who_called_what(texts: Sequence[str]) -> str:
    ranks: dict[str, list[str]] = {}
    for rank, text in enumerate(texts):
        ranks.setdefault(text, []).append(str(rank))
    return "; ".join(f"rank{'s' * (len(who) > 1)} {', '.join(who)} called {text}" for text, who in ranks.items())


def _gather_texts(text: str, rank: int, size: int, device: torch.device, post: Post) -> Steps[list[tuple[bytes, str]]]:
    """Every rank's text, by rank, each after its digest."""
    encoded = text.encode()
    record = hashlib.sha256(encoded).digest()[:_DIGEST] + encoded[:_TEXT].ljust(_TEXT, b"\0")
    row = torch.tensor(list(record), dtype=torch.uint8)
    rows = yield from _exchange(row, rank, size, device, post)
    found = [bytes(row.tolist()) for row in rows]
    return [(data[:_DIGEST], data[_DIGEST:].rstrip(b"\0").decode(errors="replace")) for data in found]


def _exchange(row: torch.Tensor, rank: int, size: int, device: torch.device, post: Post) -> Steps[list[torch.Tensor]]:
    """Every rank's ``row``, by rank, on the CPU: each sends its own to each."""
    mine = row.to(device)
    rows = [mine if peer == rank else torch.empty_like(mine) for peer in range(size)]
    others = [peer for peer in range(size) if peer != rank]
    if others:
        yield post([*(P2P.send(mine, peer) for peer in others), *(P2P.recv(rows[peer], peer) for peer in others)])
    return [theirs.cpu() for theirs in rows]


class _Forgiving:
    """A pending exchange that ends well or badly without saying so."""

    def __init__(self, pending: Pending) -> None:
        self._pending = pending

    def poll(self) -> bool:
        try:
            return self._pending.poll()
        except CommError:
            return True

    def wait(self, i: int, deadline: float) -> None:
        with contextlib.suppress(CommError):
            self._pending.wait(i, deadline)


def _await_all(rank: int, size: int, device: torch.device, post: Post) -> Steps[None]:
    """Let every rank learn of the mismatch before the first one ends the communicator by raising it."""

    def forgiving(ops: Sequence[P2P]) -> Posted:
        posted = post(ops)
        return posted._replace(pending=_Forgiving(posted.pending))

    yield from _exchange(torch.zeros(1, dtype=torch.uint8), rank, size, device, forgiving)


def _agree_on_splits(
    call: Collective, number: int, rank: int, size: int, device: torch.device, post: Post
) -> Steps[None]:
    """What one rank sends to another must be what the other expects."""
    assert call.input is not None
    assert call.output is not None
    sent, expected = ([end - start for start, end in pairwise(side.cuts)] for side in (call.input, call.output))
    rows = yield from _exchange(torch.tensor([sent, expected]).view(-1), rank, size, device, post)
    tables = [row.view(2, size).tolist() for row in rows]
    wrong = [
        f"rank {src} sends {tables[src][0][dst]} elements to rank {dst}, which expects {tables[dst][1][src]}"
        for src in range(size)
        for dst in range(size)
        if tables[src][0][dst] != tables[dst][1][src]
    ]
    if wrong:
        yield from _await_all(rank, size, device, post)
        raise CollectiveMismatchError(
            f"call {number}, all_to_all: {'; '.join(wrong[:8])}; input_splits of the sender and output_splits of the "
            "receiver must agree"
        )
