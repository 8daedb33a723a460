"""Collectives among ranks of several hosts: in each host by shared memory, between hosts by messages.

Nothing crosses a wire twice: what a host sends is summed or chosen in it first. The work of sending is spread over the
ranks of a host, which may be more on one host than on another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import torch

from collectives.backends.shared_buffer import HostBuffer
from collectives.backends.team import Call, Steps, Team
from collectives.collective import plan
from collectives.schedules import SCHEDULES
from collectives.schedules.arithmetic import Arithmetic
from collectives.schedules.executor import Chunks, Memory, Posted, Scratch, even_cuts, execute
from collectives.types import P2P, ReduceOp

_RING_FROM_BYTES = 32 * 1024


class Hosts:
    """All ranks of a communicator, host by host.

    Args:
        team: this host's.
        nodes: the ranks of each host, ascending.
        post: sends messages to ranks.
    """

    def __init__(self, team: Team, nodes: Sequence[Sequence[int]], post: Callable[[Sequence[P2P]], Posted]) -> None:
        self.team = team
        self.nodes = nodes
        self.post = post
        self.rank = team.ranks[team.me]
        self.size = sum(map(len, nodes))
        self.home = next(i for i, node in enumerate(nodes) if self.rank in node)
        self.lanes = min(map(len, nodes))  # so many ranks of each host can talk to their like on all others
        self._scratch = Scratch()
        self._index = {rank: i for node in nodes for i, rank in enumerate(node)}
        self._node_of = {rank: n for n, node in enumerate(nodes) for rank in node}

    def helper(self, node: int, rank: int) -> int:
        """Which rank on host ``node`` sends to, or receives for, ``rank`` of another host."""
        members = self.nodes[node]
        return members[self._index[rank] % len(members)]

    def helped(self, helper: int) -> list[int]:
        """The ranks of other hosts that ``helper`` is there for."""
        node = self._node_of[helper]
        return [r for r in self._index if self._node_of[r] != node and self.helper(node, r) == helper]

    def schedule(self, operation: str, name: str, data: torch.Tensor, arithmetic: Arithmetic) -> Iterator[Posted]:
        """Run a schedule among the ranks that have this rank's place on their hosts, in place over ``data``."""
        count = len(self.nodes)
        lane = [node[self.team.me] for node in self.nodes]
        chunks = Chunks(data, even_cuts(data.numel(), count))
        memory = Memory(count, chunks, chunks, data.dtype, data.dtype, data.device, self._scratch)
        planned = plan(SCHEDULES[operation, name].schedule, self.home, count, None)

        def post(ops: Sequence[P2P]) -> Posted:
            return self.post([op._replace(peer=lane[op.peer]) for op in ops])

        return execute(planned, memory, arithmetic, post)


def barrier(hosts: Hosts, call: Call) -> Steps:
    team = hosts.team
    team.announce(call)
    yield None
    team.verify(call)
    if team.me == 0:
        tokens = torch.zeros(len(hosts.nodes), dtype=torch.uint8)
        yield from hosts.schedule("barrier", "dissemination", tokens, Arithmetic(ReduceOp.SUM, torch.uint8, 1))
    team.signals.publish()
    yield None


def all_reduce(hosts: Hosts, call: Call, tensor: torch.Tensor, op: ReduceOp) -> Steps:
    """Reduce-scatter in the host, all-reduce between hosts, all-gather in the host, a slot at a time."""
    team, me, dtype = hosts.team, hosts.team.me, tensor.dtype
    terms = Arithmetic(op, dtype, hosts.size)
    sums = Arithmetic(op, terms.acc_dtype, hosts.size)
    for k, block in enumerate(torch.split(tensor, team.slot_bytes // dtype.itemsize)):
        slots = team.slots(block.numel(), dtype)
        slots[team.next][me].copy_(block)
        yield from _begin(team, call, k)
        cuts = even_cuts(block.numel(), hosts.lanes)
        parts = [slice(start, end) for start, end in pairwise(cuts)]
        if me < hosts.lanes and cuts[me] < cuts[me + 1]:
            total = _partial(terms, [slot[parts[me]] for slot in slots[team.now]])
            name = "ring" if total.nbytes >= _RING_FROM_BYTES else "direct"
            yield from hosts.schedule("all_reduce", name, total, sums)
            slots[team.next][me][parts[me]].copy_(total)
        team.signals.publish()
        yield None
        for lane, part in enumerate(parts):
            block[part].copy_(slots[team.now][lane][part])


def reduce_scatter(
    hosts: Hosts, call: Call, output: torch.Tensor, input: torch.Tensor, cuts: Sequence[int], op: ReduceOp
) -> Steps:
    """Every host sums what it has for a rank elsewhere, and sends it there, where the hosts' sums are added."""
    team, me, dtype = hosts.team, hosts.team.me, input.dtype
    arithmetic = Arithmetic(op, dtype, hosts.size)
    length = max(1, team.slot_bytes // dtype.itemsize // hosts.size)
    slots = team.slots(length * hosts.size, dtype)
    helped = hosts.helped(hosts.rank)
    for k in range(_rounds(cuts, length)):
        spans = [_span(cuts, rank, k, length) for rank in range(hosts.size)]
        for rank, span in enumerate(spans):
            slots[team.next][me][rank * length :][: _length(span)].copy_(input[span])
        yield from _begin(team, call, k)
        now = slots[team.now]

        wanted = [rank for rank in (*helped, hosts.rank) if spans[rank].start < spans[rank].stop]
        sums = {
            rank: _partial(arithmetic, [slot[rank * length :][: _length(spans[rank])] for slot in now])
            for rank in wanted
        }
        ops = [P2P.send(total, rank) for rank, total in sums.items() if rank != hosts.rank]
        own = sums.get(hosts.rank)
        totals: list[torch.Tensor] = []
        if own is not None:
            totals = [own if node == hosts.home else torch.empty_like(own) for node in range(len(hosts.nodes))]
            ops += [
                P2P.recv(received, hosts.helper(node, hosts.rank))
                for node, received in enumerate(totals)
                if node != hosts.home
            ]
        if ops:
            yield hosts.post(ops)
        if own is not None:
            start = spans[hosts.rank].start - cuts[hosts.rank]
            arithmetic.combine(output[start : start + own.numel()], totals, True)


def all_gather(hosts: Hosts, call: Call, output: torch.Tensor, input: torch.Tensor, cuts: Sequence[int]) -> Steps:
    """A rank sends its part to one rank of every other host, which shares it there."""
    team, me = hosts.team, hosts.team.me
    lists = {rank: hosts.helped(rank) for node in hosts.nodes for rank in node}
    helped = lists[hosts.rank]
    most = max(map(len, lists.values()))
    length = max(1, team.slot_bytes // input.dtype.itemsize // most)
    slots = team.slots(length * most, input.dtype)
    for k in range(_rounds(cuts, length)):
        parts = [output[_span(cuts, rank, k, length)] for rank in range(hosts.size)]
        mine = input[k * length : (k + 1) * length]
        slots[team.next][me][: mine.numel()].copy_(mine)
        receivers = [hosts.helper(node, hosts.rank) for node in range(len(hosts.nodes)) if node != hosts.home]
        ops = [P2P.send(mine, receiver) for receiver in receivers if mine.numel()]
        ops += [P2P.recv(parts[rank], rank) for rank in helped if parts[rank].numel()]
        posted = hosts.post(ops) if ops else None
        yield from _begin(team, call, k)
        for member, rank in enumerate(team.ranks):
            if rank == hosts.rank and mine.data_ptr() == parts[rank].data_ptr():
                continue
            parts[rank].copy_(slots[team.now][member][: parts[rank].numel()])
        if posted is not None:
            yield posted
        for i, rank in enumerate(helped):
            slots[team.next][me][i * length : i * length + parts[rank].numel()].copy_(parts[rank])
        team.signals.publish()
        yield None
        for member in team.others:
            for i, rank in enumerate(lists[team.ranks[member]]):
                parts[rank].copy_(slots[team.now][member][i * length : i * length + parts[rank].numel()])


def broadcast(hosts: Hosts, call: Call, tensor: torch.Tensor, src: int) -> Steps:
    """The source sends to one rank of every other host, which shares a block while the next one comes."""
    team = hosts.team
    at_home = src in hosts.nodes[hosts.home]
    source = src if at_home else hosts.helper(hosts.home, src)
    receivers = [hosts.helper(n, src) for n, node in enumerate(hosts.nodes) if src not in node]
    blocks = torch.split(tensor, team.slot_bytes // tensor.dtype.itemsize)
    slots = team.slots(blocks[0].numel(), tensor.dtype)
    for k, block in enumerate(blocks):
        posted = None
        if hosts.rank == src:
            posted = hosts.post([P2P.send(block, receiver) for receiver in receivers])
        elif hosts.rank == source:
            yield hosts.post([P2P.recv(block, src)])
        if hosts.rank == source:
            slots[team.next][team.me][: block.numel()].copy_(block)
        yield from _begin(team, call, k)
        if hosts.rank != source:
            block.copy_(slots[team.now][team.ranks.index(source)][: block.numel()])
        if posted is not None:
            yield posted


def all_gather_shared(hosts: Hosts, call: Call, buffer: HostBuffer, input: torch.Tensor, cuts: Sequence[int]) -> Steps:
    """Into one buffer a host: everybody writes its own part, and what comes for it from other hosts.

    Where a rank's input is its part of the buffer, and there is one host, nothing is left but to meet.
    """
    mine = buffer.written(cuts[hosts.rank], cuts[hosts.rank + 1])
    same = (mine.data_ptr(), buffer.tensor[cuts[hosts.rank] :].data_ptr())
    writes = input.numel() > 0 and input.data_ptr() not in same
    if (writes or len(hosts.nodes) > 1) and not buffer.all_retired():
        yield buffer.all_retired
    buffer.fill()
    receivers = [hosts.helper(n, hosts.rank) for n in range(len(hosts.nodes)) if n != hosts.home]
    ops = [P2P.send(input, receiver) for receiver in receivers if input.numel()]
    parts = ((rank, buffer.written(cuts[rank], cuts[rank + 1])) for rank in hosts.helped(hosts.rank))
    ops += [P2P.recv(part, rank) for rank, part in parts if part.numel()]
    posted = hosts.post(ops) if ops else None
    if writes:
        mine.copy_(input)
    if posted is not None:
        yield posted
    yield from _begin(hosts.team, call, 0)


def broadcast_shared(hosts: Hosts, call: Call, buffer: HostBuffer, src: int) -> Steps:
    """From the source's host, where the buffer holds it already, to one rank of every other host."""
    at_home = src in hosts.nodes[hosts.home]
    if not at_home and not buffer.all_retired():
        yield buffer.all_retired
    buffer.fill()
    tensor = buffer.written(0, buffer.tensor.numel())
    if hosts.rank == src:
        receivers = [hosts.helper(n, src) for n, node in enumerate(hosts.nodes) if src not in node]
        if receivers:
            yield hosts.post([P2P.send(tensor, receiver) for receiver in receivers])
    elif not at_home and hosts.helper(hosts.home, src) == hosts.rank:
        yield hosts.post([P2P.recv(tensor, src)])
    yield from _begin(hosts.team, call, 0)


def _begin(team: Team, call: Call, k: int) -> Steps:
    """Publish a step of a call, the first with its header, and wait for it."""
    if k:
        team.signals.publish()
        yield None
    else:
        team.announce(call)
        yield None
        team.verify(call)


def _partial(arithmetic: Arithmetic, terms: Sequence[torch.Tensor]) -> torch.Tensor:
    """This host's sum, unrounded."""
    total = torch.empty_like(terms[0], dtype=arithmetic.acc_dtype)
    arithmetic.combine(total, terms, False)
    return total


def _rounds(cuts: Sequence[int], length: int) -> int:
    longest = max(cuts[rank + 1] - cuts[rank] for rank in range(len(cuts) - 1))
    return -(-longest // length)


def _length(span: slice) -> int:
    return int(span.stop - span.start)


def _span(cuts: Sequence[int], rank: int, k: int, length: int) -> slice:
    """Block ``k`` of a rank's part; empty beyond its end."""
    start = min(cuts[rank] + k * length, cuts[rank + 1])
    return slice(start, min(start + length, cuts[rank + 1]))
