"""Checks of sub-groups: who is in them, in what order, and that they do not hear each other."""

from __future__ import annotations

import torch

from collectives.communicator import Communicator
from collectives.conformance.case import Case, Check, raises, require, same, still_works
from collectives.errors import CommClosedError


def check_split_order(comm: Communicator, case: Case) -> None:
    """Ranks are the group's own, in the order of the keys; who gives no colour gets no group."""
    w, r = comm.world_size, comm.rank
    pairs = [[2 % w, 3 % w], [3 % w, 1 % w], [w - 1, 0]]
    for members in (*(pair for pair in pairs if pair[0] != pair[1]), list(range(w))[::-1], [w // 2]):
        group = comm.split(0 if r in members else None, members.index(r) if r in members else 0)
        if group is None:
            require(r not in members, f"rank {r} is in {members}, but got no group")
        else:
            require(r in members, f"rank {r} is not in {members}, but got a group")
            require(
                (group.rank, group.world_size) == (members.index(r), len(members)),
                f"rank {r} of {members} became rank {group.rank} of {group.world_size}",
            )
            for root in range(len(members)):
                value = torch.tensor([float(r)], device=comm.device)
                group.broadcast(value, root)
                same(value, torch.tensor([float(members[root])]), f"broadcast from member {root} of {members}")
            gathered = torch.zeros(len(members), device=comm.device)
            group.all_gather(gathered, torch.tensor([float(r)], device=comm.device))
            same(gathered, torch.tensor([float(member) for member in members]), f"all_gather in {members}")
        still_works(comm)
        if group is not None:
            still_works(group)
            group.close()
            raises(CommClosedError, ["closed"], group.barrier)
    require(comm.split(None) is None, "split without a colour gave a group")
    still_works(comm)


def check_nested_groups(comm: Communicator, case: Case) -> None:
    r = comm.rank
    halves = comm.split(r % 2, -r)
    assert halves is not None
    quarter = halves.split(halves.rank // 2)
    assert quarter is not None
    for turn in range(2):
        for group, what in ((quarter, "a quarter"), (comm, "everybody"), (halves, "a half"), (comm, "everybody")):
            still_works(group, f"{what}, turn {turn}")
    halves.close()  # and with it what was split from it
    raises(CommClosedError, ["closed"], quarter.barrier)
    still_works(comm)


def check_interleaved_groups(comm: Communicator, case: Case) -> None:
    """Operations under way in overlapping groups at the same time, waited for in another order."""
    w, r = comm.world_size, comm.rank
    again, parity = comm.split(0, -r), comm.split(r % 2)
    assert again is not None
    assert parity is not None
    alike = [float(rank) for rank in range(w) if rank % 2 == r % 2]
    for turn in range(2):
        sums = [torch.full((500,), float(r + turn), device=comm.device) for _ in range(4)]
        groups = [comm, again, parity, comm]
        works = [group.all_reduce(total, async_op=True) for group, total in zip(groups, sums, strict=True)]
        for i in (2, 3, 0, 1):
            works[i].wait()
            members = alike if i == 2 else [float(rank) for rank in range(w)]
            same(sums[i], torch.full((500,), sum(members) + turn * len(members)), f"a sum in group {i}")
    again.close()
    parity.close()
    still_works(comm)


def check_messages_in_groups(comm: Communicator, case: Case) -> None:
    """The same peers and the same tag in two groups: no message goes astray."""
    w, r = comm.world_size, comm.rank
    again = comm.split(0)
    assert again is not None
    if w > 1 and comm._transport.tags:
        to, source = (r + 1) % w, (r - 1) % w
        works = [
            group.send(torch.tensor([r, number], device=comm.device), to, tag=2, async_op=True)
            for number, group in enumerate((comm, again))
        ]
        for number, group in ((1, again), (0, comm)):
            got = torch.zeros(2, dtype=torch.int64, device=comm.device)
            group.recv(got, source, tag=2)
            same(got, torch.tensor([source, number]), "a message in one of two groups")
        for work in works:
            work.wait()
    again.close()
    still_works(comm)


CHECKS = (
    Check("groups", check_split_order),
    Check("groups", check_nested_groups),
    Check("groups", check_interleaved_groups),
    Check("groups", check_messages_in_groups),
)
