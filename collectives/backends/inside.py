"""Collectives among the ranks of one host, as steps (see ``signals``). Sums are made in rank order, each element once.

[Note: three ways]
A small tensor goes into the slot whole, everybody reads all slots, and one step is enough. A tensor that lies in shared
memory is read where it is. Any other travels through the slots piece by piece: what this rank owes to others is copied
in, and its own part stays where it is. Which of the last two holds is each rank's own affair, and said in its header.
A sum takes the first way for longer tensors too, up to where the bytes that everybody reads cost more than the steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from collectives.backends.team import Call, Combine, Place, Steps, Team

SMALL_BYTES = 64 * 1024  # up to here one step that reads everything beats several that read parts
_WHOLE_BYTES = {2: 2**20, 3: 2**17, 4: 2**17}  # the same for sums of private tensors, by members; each fits a slot
_ALIGNMENT = 64  # bytes, so that two ranks never write to one cache line

Blocks = Sequence[torch.Tensor]


def barrier(team: Team, call: Call) -> Steps:
    team.announce(call)
    yield None
    team.verify(call)


def all_reduce_small(
    team: Team, tensor: torch.Tensor, call: Call, combine: Combine, slots: Sequence[Sequence[torch.Tensor]]
) -> Steps:
    """``slots``: ``team.slots`` of this length. What calls have in common is looked up once, as microseconds count."""
    slots[team.next][team.me].copy_(tensor)
    team.announce(call)
    yield None
    team.verify(call)
    combine(tensor, slots[team.now])


def all_reduce(team: Team, call: Call, tensor: torch.Tensor, combine: Combine) -> Steps:
    """As steps that suit the length: the same for all members."""
    if tensor.nbytes <= _WHOLE_BYTES.get(team.size, 0):
        return _all_reduce_whole(team, call, tensor, combine)
    return _all_reduce_parts(team, call, tensor, combine)


def _all_reduce_whole(team: Team, call: Call, tensor: torch.Tensor, combine: Combine) -> Steps:
    """Everybody sums everything, unless all tensors are in reach; who has its own in reach copies nothing in."""
    numel, place = tensor.numel(), team.place(tensor)
    slots = team.slots(numel, tensor.dtype)
    if place is None:
        slots[team.next][team.me].copy_(tensor)
    team.announce(call, place)
    yield None
    team.verify(call)
    tensors = _direct(team, numel, tensor.dtype)
    if all(t is not None for t in tensors):
        tensors[team.me] = tensor
        cuts = _cuts(numel, team.size, tensor.dtype)
        terms = [_blocks(t, cuts, team.me, numel) for t in tensors if t is not None]
        yield from _all_reduce_in_place(team, terms[team.me], terms, combine)
        return
    terms_or_slots = [slot if t is None else t for t, slot in zip(tensors, slots[team.now], strict=True)]
    if all(t is None for t in tensors):
        combine(tensor, terms_or_slots)
        return
    total = torch.empty_like(tensor)  # what others read in place stays until everybody has read it
    combine(total, terms_or_slots)
    team.signals.publish()
    yield None
    tensor.copy_(total)


def _all_reduce_parts(team: Team, call: Call, tensor: torch.Tensor, combine: Combine) -> Steps:
    """Everybody sums a chunk; sums of one block are shared in the step that brings the terms of the next."""
    me, others, pieces = team.me, team.others, team.pieces(tensor.dtype)
    cuts = _cuts(tensor.numel(), team.size, tensor.dtype)
    place, chunks = team.place(tensor), list[Blocks]()
    if place is None:
        chunks = _chunks(tensor, cuts, pieces.numel)
    mine = _blocks(tensor, cuts, me, pieces.numel)
    rounds = _rounds(cuts, pieces.numel)
    direct: list[Blocks | None] = []
    for k in range(rounds + 1):
        if place is None:
            for member in others:
                _copy_block(chunks[member], k, into=pieces.to[team.next][member])
        if k:
            team.signals.publish()
        else:
            team.announce(call, place)
        yield None
        now = team.now
        if k == 0:
            team.verify(call)
            tensors = _direct(team, tensor.numel(), tensor.dtype)
            direct = [t if t is None else _blocks(t, cuts, me, pieces.numel) for t in tensors]
            direct[me] = mine
            if all(t is not None for t in tensors):
                yield from _all_reduce_in_place(team, mine, [blocks or () for blocks in direct], combine)
                return
            chunks = chunks or _chunks(tensor, cuts, pieces.numel)
        if k < len(mine):
            terms = [
                blocks[k] if blocks is not None else _fit(piece, mine[k])
                for blocks, piece in zip(direct, pieces.of[now], strict=True)
            ]
            combine(mine[k], terms)
            _fit(pieces.shared[team.next][me], mine[k]).copy_(mine[k])
        for member in others:
            if 0 < k <= len(chunks[member]):
                block = chunks[member][k - 1]
                block.copy_(_fit(pieces.shared[now][member], block))


def _all_reduce_in_place(team: Team, mine: Blocks, terms: Sequence[Blocks], combine: Combine) -> Steps:
    """All tensors are in reach: sum a block while it is in the cache, and write it to everybody."""
    others = [terms[member] for member in team.others]
    for k, block in enumerate(mine):
        combine(block, [blocks[k] for blocks in terms])
        for blocks in others:
            blocks[k].copy_(block)
    team.signals.publish()
    yield None


def reduce_scatter(
    team: Team, call: Call, output: torch.Tensor, input: torch.Tensor, cuts: Sequence[int], combine: Combine
) -> Steps:
    me, others, place = team.me, team.others, None
    if input.nbytes <= SMALL_BYTES:
        slots = team.slots(input.numel(), input.dtype)
        slots[team.next][me].copy_(input)
        team.announce(call)
        yield None
        team.verify(call)
        if output.numel():
            combine(output, [slot[cuts[me] : cuts[me + 1]] for slot in slots[team.now]])
        return
    pieces = team.pieces(input.dtype)
    place, chunks = team.place(input), list[Blocks]()
    if place is None:
        chunks = _chunks(input, cuts, pieces.numel)
    mine, results = _blocks(input, cuts, me, pieces.numel), torch.split(output, pieces.numel)
    direct: list[Blocks | None] = []
    tensors: list[torch.Tensor | None] = []
    for k in range(_rounds(cuts, pieces.numel)):
        if place is None:
            for member in others:
                _copy_block(chunks[member], k, into=pieces.to[team.next][member])
        if k:
            team.signals.publish()
        else:
            team.announce(call, place)
        yield None
        if k == 0:
            team.verify(call)
            tensors = _direct(team, input.numel(), input.dtype)
            direct = [t if t is None else _blocks(t, cuts, me, pieces.numel) for t in tensors]
            direct[me] = mine
            if all(t is not None for t in tensors):
                for i in range(len(mine)):
                    combine(results[i], [blocks[i] for blocks in direct if blocks is not None])
                break
        if k < len(mine):
            terms = [
                blocks[k] if blocks is not None else _fit(piece, mine[k])
                for blocks, piece in zip(direct, pieces.of[team.now], strict=True)
            ]
            combine(results[k], terms)
    if any(t is not None for t in tensors):  # what is read in place must stay until everybody has read it
        team.signals.publish()
        yield None


def all_gather(team: Team, call: Call, output: torch.Tensor, input: torch.Tensor, cuts: Sequence[int]) -> Steps:
    me, others = team.me, team.others
    parts = [output[cuts[member] : cuts[member + 1]] for member in range(team.size)]
    longest = max(cuts[member + 1] - cuts[member] for member in range(team.size))
    length = min(longest, team.slot_bytes // input.dtype.itemsize)
    slots = team.slots(length, input.dtype)
    blocks = torch.split(input, length)
    place = team.place(input) if longest * input.dtype.itemsize > SMALL_BYTES else None
    own, apart = torch.split(parts[me], length), input.numel() > 0 and parts[me].data_ptr() != input.data_ptr()
    sources: list[torch.Tensor | None] = []
    for k in range(-(-longest // length)):
        if place is None:
            _copy_block(blocks, k, into=slots[team.next][me])
        if k:
            team.signals.publish()
        else:
            team.announce(call, place)
        if k < len(own) and apart:
            own[k].copy_(blocks[k])  # while it is in the cache, and others are on their way
        yield None
        if k == 0:
            team.verify(call)
            sources = _direct_parts(team, cuts, input.dtype)
        for member in others:
            source, part = sources[member], parts[member]
            if source is None:
                part = part[k * length : (k + 1) * length]
                if part.numel():
                    part.copy_(_fit(slots[team.now][member], part))
            elif k == 0:
                part.copy_(source)
        if k == 0 and all(source is not None for source in sources):
            for block, source in zip(own[1:], blocks[1:], strict=True) if apart else ():
                block.copy_(source)
            break
    if any(source is not None for source in sources):
        team.signals.publish()
        yield None


def broadcast(team: Team, call: Call, tensor: torch.Tensor, src: int) -> Steps:
    """``src`` is a member. It writes a block while the others read the one before."""
    length = min(tensor.numel(), team.slot_bytes // tensor.dtype.itemsize)
    slots, blocks = team.slots(length, tensor.dtype), torch.split(tensor, length)
    sends = team.me == src
    place = team.place(tensor) if sends and tensor.nbytes > SMALL_BYTES else None
    for k, block in enumerate(blocks):
        if sends and place is None:
            _fit(slots[team.next][src], block).copy_(block)
        if k:
            team.signals.publish()
        else:
            team.announce(call, place)
        yield None
        if k == 0:
            team.verify(call)
            source = team.places()[src]
            if source is not None:
                if not sends:
                    tensor.copy_(team.at(source, tensor.numel(), tensor.dtype))
                team.signals.publish()
                yield None
                return
        if not sends:
            block.copy_(_fit(slots[team.now][src], block))


def _cuts(numel: int, parts: int, dtype: torch.dtype) -> list[int]:
    """Equal parts that start at cache lines; the last ones may be shorter, or empty."""
    unit = max(1, _ALIGNMENT // dtype.itemsize)
    length = -(-numel // (parts * unit)) * unit
    return [min(part * length, numel) for part in range(parts + 1)]


def _rounds(cuts: Sequence[int], length: int) -> int:
    """How many blocks the longest part has."""
    return -(-max(end - start for start, end in pairwise(cuts)) // length)


def _chunks(tensor: torch.Tensor, cuts: Sequence[int], length: int) -> list[Blocks]:
    return [_blocks(tensor, cuts, chunk, length) for chunk in range(len(cuts) - 1)]


def _blocks(tensor: torch.Tensor, cuts: Sequence[int], chunk: int, length: int) -> Blocks:
    """A chunk of a tensor in blocks of at most ``length`` elements."""
    start, end = cuts[chunk], cuts[chunk + 1]
    if start == end:
        return ()
    return torch.split(tensor[start:end], length) if end - start > length else (tensor[start:end],)


def _fit(piece: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
    """As much of a piece as a block has elements."""
    return piece if piece.numel() == block.numel() else piece[: block.numel()]


def _copy_block(blocks: Blocks, k: int, into: torch.Tensor) -> None:
    if k < len(blocks):
        _fit(into, blocks[k]).copy_(blocks[k])


def _direct(team: Team, numel: int, dtype: torch.dtype) -> list[torch.Tensor | None]:
    """Everybody's tensor, where it lies in shared memory."""
    return [None if place is None else team.at(place, numel, dtype) for place in team.places()]


def _direct_parts(team: Team, cuts: Sequence[int], dtype: torch.dtype) -> list[torch.Tensor | None]:
    """The same, where members have parts of different lengths."""
    lengths = [end - start for start, end in pairwise(cuts)]
    found: list[Place | None] = team.places()
    return [None if p is None else team.at(p, n, dtype) for p, n in zip(found, lengths, strict=True)]
