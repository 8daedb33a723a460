"""Checks of send, recv and exchange."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from collectives.communicator import Communicator
from collectives.conformance.case import MOVED, Case, Check, blank, place, raises, same, still_works
from collectives.conformance.grids import every_dtype, shapes_and_layouts
from collectives.conformance.reference import data
from collectives.messages import spread
from collectives.types import P2P


def check_send_and_recv(comm: Communicator, case: Case) -> None:
    """Round a ring in both directions."""
    w, r = comm.world_size, comm.rank
    for seed in case.seeds:
        for step in (1, w - 1):
            to, source = (r + step) % w, (r - step) % w
            mine = place(comm, case, data(r, case.shape, case.dtype, seed), seed)
            got = blank(comm, case, case.shape, seed + 1)
            if comm._transport.tags:
                sent = comm.send(mine.tensor, to, async_op=True)
                comm.recv(got.tensor, source, async_op=case.async_op).wait()
                sent.wait()
            else:  # a queue of messages, in which a receive would wait behind this rank's own send
                comm.exchange([P2P.send(mine.tensor, to), P2P.recv(got.tensor, source)])
            got.expect(data(source, case.shape, case.dtype, seed), f"a message from rank {source} to rank {r}")
            mine.expect(data(r, case.shape, case.dtype, seed), "the tensor that was sent")


def check_tags(comm: Communicator, case: Case) -> None:
    """Messages with other tags wait for their own receive, those with one tag come in the order sent."""
    w, r = comm.world_size, comm.rank
    if not comm._transport.tags:
        return
    to, source = (r + 1) % w, (r - 1) % w
    tags = [0, 1, 5, comm._transport.max_tag // spread(comm._transport) - 1]
    for turn in range(2):
        sent = [
            comm.send(data(r, (9,), seed=100 * tag + number + turn).to(comm.device), to, tag, async_op=True)
            for tag in tags
            for number in range(3)
        ]
        for tag in reversed(tags):
            for number in range(3):
                got = torch.zeros(9, device=comm.device)
                comm.recv(got, source, tag)
                same(got, data(source, (9,), seed=100 * tag + number + turn), f"message {number} with tag {tag}")
        for work in sent:
            work.wait()


def check_exchange(comm: Communicator, case: Case) -> None:
    """Everyone sends something of its own length to everyone, itself included, all at once."""
    w, r = comm.world_size, comm.rank
    for seed in case.seeds:
        outgoing = [place(comm, case, data(r, (3 * r + peer + 1,), case.dtype, seed + peer), seed) for peer in range(w)]
        incoming = [blank(comm, case, (3 * peer + r + 1,), seed + 1) for peer in range(w)]
        messages = [P2P.send(mine.tensor, peer) for peer, mine in enumerate(outgoing)]
        messages += [P2P.recv(got.tensor, peer) for peer, got in enumerate(incoming)]
        comm.exchange(messages, tag=seed % 3, async_op=case.async_op).wait()
        for peer, got in enumerate(incoming):
            got.expect(data(peer, (3 * peer + r + 1,), case.dtype, seed + r), f"what rank {peer} sent to rank {r}")
    comm.exchange([])
    still_works(comm)


def check_long_messages(comm: Communicator, case: Case) -> None:
    """Sends that no buffer can hold, in both directions at once."""
    w, r = comm.world_size, comm.rank
    to, source = (r + 1) % w, (r - 1) % w
    mine, got = torch.full((2**18 + 3,), r + 1.0), torch.zeros(2**18 + 3, device=comm.device)
    comm.exchange([P2P.send(mine.to(comm.device), to), P2P.recv(got, source)])
    same(got, torch.full((2**18 + 3,), source + 1.0), f"a long message from rank {source}")


def check_message_before_collective(comm: Communicator, case: Case) -> None:
    """A message is not held up by a collective that was started before it and cannot end without it."""
    w, r = comm.world_size, comm.rank
    if w == 1 or not comm._transport.tags:
        return
    for turn in range(2):
        total, token = torch.ones(2000, device=comm.device), torch.zeros(1, device=comm.device)
        if r == 0:
            pending = comm.all_reduce(total, async_op=True)
            for peer in range(1, w):
                comm.send(token + 7 + turn, peer)
            pending.wait()
        else:
            comm.recv(token, 0)
            comm.all_reduce(total)
            same(token, torch.tensor([7.0 + turn]), "a message beside a collective")
        same(total, torch.full((2000,), float(w)), "a collective beside a message")


def check_self_without_send(comm: Communicator, case: Case) -> None:
    got = torch.zeros(3, device=comm.device)
    raises(ValueError, ["itself"], lambda: comm.recv(got, comm.rank, tag=9))
    comm.send(got + 5, comm.rank, tag=9)
    comm.recv(got, comm.rank, tag=9)
    same(got, torch.full((3,), 5.0), "a message of a rank to itself")
    still_works(comm)


def _cases() -> Iterator[Case]:
    yield from every_dtype(MOVED)
    yield from shapes_and_layouts()


CHECKS = (
    Check("messages", check_send_and_recv, tuple(_cases())),
    Check("messages", check_tags),
    Check(
        "messages",
        check_exchange,
        tuple(Case(layout=layout, async_op=a) for layout, a in (("plain", True), ("mixed", False))),
    ),
    Check("messages", check_long_messages),
    Check("messages", check_message_before_collective),
    Check("messages", check_self_without_send),
)
