"""The small values that every layer shares."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch


class ReduceOp(enum.Enum):
    """How contributions are combined. AVG is SUM, divided by the world size before the one rounding."""

    SUM = "sum"
    AVG = "avg"
    PRODUCT = "product"
    MIN = "min"
    MAX = "max"
    BAND = "band"
    BOR = "bor"
    BXOR = "bxor"

    __hash__ = object.__hash__  # members are unique, and an enum's own hash is slow


class P2P(NamedTuple):
    """One message of an ``exchange``: a whole tensor to or from one peer."""

    sends: bool
    tensor: torch.Tensor
    peer: int

    @staticmethod
    def send(tensor: torch.Tensor, dst: int) -> P2P:
        """Send ``tensor`` to rank ``dst``; the caller leaves it alone until the exchange is done."""
        return P2P(True, tensor, dst)

    @staticmethod
    def recv(tensor: torch.Tensor, src: int) -> P2P:
        """Receive from rank ``src`` into ``tensor``, which must have the sender's numel and dtype."""
        return P2P(False, tensor, src)


class Work(ABC):
    """A started operation. It holds its tensors until it is done; results may be read after ``wait``."""

    @abstractmethod
    def wait(self, timeout: float | None = None) -> None:
        """Block until done (on CUDA: order the current stream behind it). May be called again, and in any order.

        Args:
            timeout: seconds from now; None keeps the time-out that the call was made with.

        Raises:
            CommError: what ended the operation, also on every later call.
        """

    @abstractmethod
    def is_completed(self) -> bool:
        """Whether the operation has ended, well or badly. Makes progress, never blocks."""

    @abstractmethod
    def exception(self) -> BaseException | None:
        """What ended the operation badly; None while it runs and after it ended well."""


class SharedBuffer(ABC):
    """One buffer a host, mapped by all its ranks, made by ``Communicator.allocate_shared``.

    ``tensor`` (1-D) is for reading: it may be the output of an all_gather, or what a broadcast carries, whole, and any
    other write to it ends the process. In an all_gather each rank writes its own part, or nothing where its input is
    that part already: ``part`` gives what a rank may write itself. ``one_host`` says that all ranks of the communicator
    have this one buffer.
    """

    tensor: torch.Tensor
    one_host: bool

    @abstractmethod
    def part(self, start: int, end: int) -> torch.Tensor:
        """Elements ``start`` to ``end``, to write, while every local rank has retired; no two ranks the same ones.

        The tensor has a storage of its own, so that to save or to measure it says nothing of the others' parts.
        """

    @property
    @abstractmethod
    def retired(self) -> bool:
        """Whether this rank has retired the last use. Only then may it start the next."""

    @abstractmethod
    def retire(self) -> None:
        """This rank has read what it needs; when all local ranks have, the buffer may be filled again."""

    @abstractmethod
    def wait_retired(self, timeout: float) -> None:
        """Return when every local rank has retired the last use. Raises ``CommError``, at the latest after ``timeout``
        seconds."""

    @abstractmethod
    def guard(self, start: int, end: int, on: bool) -> None:
        """For debugging: while ``on``, a write of this rank to these elements ends it, with a traceback of the writer.

        Whole pages of memory only.
        """

    @abstractmethod
    def release(self) -> None:
        """Let go of ``tensor``. The memory is free when every rank has, and nobody holds a part any more."""


@dataclass(frozen=True)
class RankInfo:
    """Who this process is in its job, and how that is known.

    ``node`` counts hosts from 0. ``launcher`` is the source that rank and size were read from, and ``variables`` the
    environment variables (or argument names) and values that were used. ``master_addr`` and ``master_port`` say where
    rank 0 keeps the job's key-value store, where the launcher fixes that; ``store_fd`` is a listening socket inherited
    from the launcher (rank 0 only); ``agent_store`` says that the launcher itself serves the store. ``mpi`` says that
    the launcher starts MPI worlds, and ``warnings`` what was strange about the environment without being wrong.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node: int = 0
    launcher: str = "single"
    variables: Mapping[str, str] = field(default_factory=dict)
    master_addr: str | None = None
    master_port: int | None = None
    store_fd: int | None = None
    agent_store: bool = False
    job: str = ""  # distinguishes jobs and restarts that share a store
    mpi: bool = False
    warnings: tuple[str, ...] = ()

    @property
    def hosts(self) -> int:
        """How many hosts the job spans, assuming as many ranks on each as on this one."""
        return -(-self.world_size // self.local_world_size)
