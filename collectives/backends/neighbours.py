"""Which ranks share a host: each proves it by a file that only processes of one kernel can pass to each other.

Names and numbers of hosts prove nothing: containers may share a name and no memory, or memory and no name. So a rank
sends its file over a Unix socket to all ranks that might be near. Whoever receives it, from a process of the same user,
and finds in it the secret that the sender told everybody over the transport below, shares memory with the sender.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import secrets
import socket
import struct
import sys
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import torch

from collectives.backend import Backend
from collectives.backends.segment import PAGE, Heap, Segment
from collectives.collective import Collective
from collectives.errors import CommError, CommTimeoutError, UnsupportedError
from collectives.hosts import cgroup_cores
from collectives.schedules.executor import Chunks, Posted, Scratch

_NOTE = 1024  # bytes of a note that a rank tells all others
_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid
_SCM_CREDENTIALS = 2  # linux/socket.h


@dataclass
class Neighbours:
    """What this rank knows of the ranks of its job, and the memory that it shares with those on its host.

    Ranks are those of the job's first communicator. ``nodes`` are all hosts, each with its ranks in ascending order, in
    the order of their first ranks.
    """

    rank: int
    nodes: list[list[int]]
    heap: Heap
    segments: dict[int, Segment]  # of the ranks on this host, this rank's heap included
    pidfds: dict[int, int]
    crowded: bool  # more ranks than cores on this host

    @property
    def node(self) -> list[int]:
        """The ranks on this host."""
        return next(node for node in self.nodes if self.rank in node)

    def close(self) -> None:
        for fd in self.pidfds.values():
            os.close(fd)
        for segment in self.segments.values():
            segment.drop()
        self.pidfds = {}
        self.segments = {}


def finish(backend: Backend, posted: Posted, deadline: float) -> None:
    """Bring messages to their end, in the way that their transport offers."""
    if backend.waits:
        for i in range(posted.count):
            posted.pending.wait(i, deadline)
        return
    while not posted.pending.poll():
        if time.monotonic() > deadline:
            raise CommTimeoutError("nothing came in time from some rank")
        time.sleep(1e-5)


def exchange(backend: Backend, data: bytes, width: int, deadline: float) -> list[bytes]:
    """Every rank's ``data``, at most ``width`` bytes each. Collective over an idle transport."""
    size, rank = backend.size, backend.rank
    table = torch.zeros(size * width, dtype=torch.uint8)
    mine = table[rank * width : rank * width + len(data)]
    mine.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    cuts = range(0, size * width + 1, width)
    own = table[cuts[rank] : cuts[rank + 1]]
    call = Collective("all_gather", torch.uint8, Chunks(own, cuts, cuts[rank]), Chunks(table, cuts))
    steps = call.steps(backend, "circulant", lambda ops: Posted(backend._post(ops, 0), len(ops)), Scratch(), ())
    for posted in steps if size > 1 else ():
        finish(backend, posted, deadline)
    return [bytes(part.tolist()).rstrip(b"\0") for part in torch.split(table, width)]


def why_not() -> str:
    """What keeps this machine from sharing memory between ranks; empty where nothing does."""
    if not sys.platform.startswith("linux") or not hasattr(os, "memfd_create"):
        return f"{platform.system()} passes no anonymous memory between processes as Linux does"
    if platform.machine() not in ("x86_64", "AMD64"):
        return f"a {platform.machine()} processor does not promise the order of stores that this relies on"
    return ""


def meet(backend: Backend, timeout: float, neighbours: int, nodes: Sequence[int] | None = None) -> Neighbours:
    """Find the ranks on this host, and map their memory. Collective over ``backend``, which is idle.

    Args:
        timeout: seconds that this may take.
        neighbours: how many ranks the launcher started on this host.
        nodes: for each rank a number; ranks with different numbers count as ranks of different hosts.

    Raises:
        UnsupportedError: on every rank alike, saying which rank cannot share memory, and why.
    """
    deadline = time.monotonic() + timeout
    meeting = _Meeting(backend, deadline, neighbours, "" if nodes is None else str(nodes[backend.rank]))
    try:
        return meeting.hold()
    except BaseException:
        meeting.abandon()
        raise
    finally:
        meeting.socket.close()


class _Meeting:
    def __init__(self, backend: Backend, deadline: float, neighbours: int, node: str) -> None:
        self.backend = backend
        self.deadline = deadline
        self.heap: Heap | None = None
        self.files: dict[int, tuple[int, int]] = {}  # rank -> its memory and process, or -1
        self.segments: dict[int, Segment] = {}  # made of the former
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.note: dict[str, Any] = {"why": why_not()}
        if not self.note["why"]:
            try:
                self.note |= self._prepare(neighbours, node)
            except (OSError, CommError) as error:
                self.note["why"] = f"the system refuses shared memory: {error}"

    def _prepare(self, neighbours: int, node: str) -> dict[str, Any]:
        """Make this rank's memory and its socket, and say what others must know of them."""
        secret, address = secrets.token_bytes(16), f"collectives-{secrets.token_hex(16)}"
        self.heap = Heap(neighbours)
        self.heap.reserve(PAGE)
        self.heap.tensor(0, len(secret), torch.uint8).copy_(torch.tensor(list(secret)))
        self.socket.bind("\0" + address)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self.socket.setblocking(False)
        cores = sum(1 << core for core in os.sched_getaffinity(0))
        quota = min(cgroup_cores(), 1e6)
        return {
            "address": address,
            "secret": secret.hex(),
            "host": f"{_host()} {node}",
            "cores": f"{cores:x}",
            "quota": quota,
            "size": self.heap.size,
        }

    def hold(self) -> Neighbours:
        me, size = self.backend.rank, self.backend.size
        notes = [json.loads(told) for told in self._tell(self.note)]
        self._require([note["why"] for note in notes])
        assert self.heap is not None
        near = [rank for rank in range(size) if rank != me and notes[rank]["host"] == notes[me]["host"]]
        reached = [rank for rank in near if self._reaches(notes[rank]["address"])]
        reachers = self._who_reaches(reached)
        mutual = [rank for rank in reached if rank in reachers]
        why = ""
        segments = self.segments
        try:
            self._pass_files({rank: notes[rank]["address"] for rank in mutual})
            for rank in mutual:
                segments[rank] = Segment(self.files[rank][0], notes[rank]["size"])
                found = bytes(segments[rank].tensor(0, 16, torch.uint8).tolist()).hex()
                if found != notes[rank]["secret"]:
                    why = f"rank {rank} sent memory in which another number stands than it told"
        except (OSError, CommError) as error:
            why = str(error)
        node = sorted([me, *mutual])
        answers = [json.loads(told) for told in self._tell({"why": why, "first": node[0], "count": len(node)})]
        self._require([answer["why"] for answer in answers])
        nodes = [[r for r in range(size) if answers[r]["first"] == first] for first in range(size)]
        nodes = [ranks for ranks in nodes if ranks]
        if any(len(ranks) != answers[rank]["count"] for ranks in nodes for rank in ranks):
            raise UnsupportedError("some ranks of one host reach each other and others do not")
        cores = reduce(int.__or__, (int(notes[rank]["cores"], 16) for rank in node))
        allowed = min(cores.bit_count(), max(notes[rank]["quota"] for rank in node))
        pidfds = {rank: process for rank, (_, process) in self.files.items() if process >= 0}
        return Neighbours(me, nodes, self.heap, {me: self.heap, **segments}, pidfds, crowded=len(node) > allowed)

    def abandon(self) -> None:
        for segment in (self.heap, *self.segments.values()):
            if segment is not None:
                segment.drop()
        for rank, (memory, process) in self.files.items():
            if rank not in self.segments:
                os.close(memory)
            if process >= 0:
                os.close(process)

    def _tell(self, note: dict[str, Any]) -> list[bytes]:
        note["why"] = note["why"][: _NOTE // 4]
        return exchange(self.backend, json.dumps(note).encode(), _NOTE, self.deadline)

    def _require(self, whys: list[str]) -> None:
        for rank, why in enumerate(whys):
            if why:
                raise UnsupportedError(f"rank {rank}: {why}")

    def _reaches(self, address: str) -> bool:
        """Whether there is such a socket in this network namespace."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect("\0" + address)
            except OSError:
                return False
            return True

    def _who_reaches(self, reached: list[int]) -> set[int]:
        """The ranks that reach this one."""
        size, me = self.backend.size, self.backend.rank
        bits = sum(1 << rank for rank in reached)
        width = size // 8 + 2  # the last byte is not zero, so that none is lost
        rows = exchange(self.backend, bits.to_bytes(width - 1, "little") + b"\1", width, self.deadline)
        return {rank for rank, row in enumerate(rows) if int.from_bytes(row, "little") >> me & 1}

    def _pass_files(self, addresses: dict[int, str]) -> None:
        """Send this rank's memory and process to the ranks at these addresses, and receive theirs.

        Sending and receiving alternate, because a socket holds only some messages that nobody has received.
        """
        assert self.heap is not None
        me = str(self.backend.rank).encode()
        process = _own_pidfd()
        mine = [self.heap.fd, *([process] if process >= 0 else [])]
        unsent = dict(addresses)
        try:
            while unsent or len(self.files) < len(addresses):
                for rank, address in list(unsent.items()):
                    with contextlib.suppress(BlockingIOError):
                        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", mine))]
                        self.socket.sendmsg([me], ancillary, 0, "\0" + address)
                        del unsent[rank]
                if not self._receive(set(addresses)):
                    if time.monotonic() > self.deadline:
                        raise CommTimeoutError(
                            f"ranks {sorted(set(addresses) - set(self.files))} sent no memory in time"
                        )
                    time.sleep(1e-4)
        finally:
            if process >= 0:
                os.close(process)

    def _receive(self, expected: set[int]) -> bool:
        """Take a message if there is one. One from another user, or from a stranger, is dropped."""
        space = socket.CMSG_SPACE(2 * array("i").itemsize) + socket.CMSG_SPACE(_CREDENTIALS.size)
        try:
            data, ancillary, _, _ = self.socket.recvmsg(64, space, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return False
        fds = array("i")
        user = -1
        for level, kind, content in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
            elif level == socket.SOL_SOCKET and kind == _SCM_CREDENTIALS:
                _, user, _ = _CREDENTIALS.unpack(content)
        rank = int(data) if data.isdigit() else -1
        if rank not in expected or rank in self.files or user != os.getuid() or not fds:
            for fd in fds:
                os.close(fd)
        else:
            self.files[rank] = fds[0], fds[1] if len(fds) > 1 else -1
        return True


def _own_pidfd() -> int:
    """A descriptor that becomes readable when this process ends; -1 where the kernel has none."""
    try:
        return os.pidfd_open(os.getpid())
    except (AttributeError, OSError):
        return -1


def _host() -> str:
    """Alike for ranks that may share memory: a boot of a kernel, and a network namespace, which Unix names have."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts = [Path("/proc/sys/kernel/random/boot_id").read_text().strip()]
    with contextlib.suppress(OSError):
        parts.append(str(Path("/proc/self/ns/net").stat().st_ino))
    return " ".join(parts)
