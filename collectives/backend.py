"""The seam between the public calls and a transport.

A backend moves contiguous 1-D tensors between ranks, and that is enough: every collective has a schedule over sends and
receives. Where a library's own collective is faster and keeps the contract, the backend may offer it as well.

Writing one takes a file with a subclass of ``Backend``, a ``create(bootstrap)`` function, and a line in
``collectives.backends.REGISTRY`` (or an entry point in the group ``collectives.backends``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch

from collectives.errors import UnsupportedError
from collectives.types import P2P, RankInfo, ReduceOp, SharedBuffer

# A message of one collective must never be taken for that of another, which a rank calls by mistake: transports write
# beyond the end of a receive that is too short, or stop. So schedules' tags depend on what is called.
SCHEDULE_TAGS = 4096


class Pending(Protocol):
    """Operations that were posted together."""

    def poll(self) -> bool:
        """Whether all are done. Makes progress, never blocks. Raises ``CommError`` for what failed."""

    def wait(self, i: int, deadline: float) -> None:
        """Block until operation ``i`` is done (on CUDA: order the current stream behind it).

        Raises ``CommTimeoutError`` at ``deadline``, a ``time.monotonic()`` value. Called only where ``waits`` is true.
        """


class LibraryCall(NamedTuple):
    """A blocking collective of the library itself: ``run(output, input)`` with SUM, and rank 0 as root.

    Where the operation works in place (all_reduce, broadcast) ``output`` is the tensor and ``input`` is not looked at.
    """

    operation: str
    run: Callable[[torch.Tensor, torch.Tensor], object]


@dataclass(frozen=True)
class Bootstrap:
    """What a backend is given to find its peers.

    ``store`` opens the job's key-value store on first use and returns the same one afterwards (a
    ``torch.distributed.Store``; MPI needs none). ``address`` is the address of this host that its peers can reach:
    loopback where the job has one host. ``timeout`` bounds set-up, in seconds.
    """

    info: RankInfo
    device: torch.device
    timeout: float
    store: Callable[[], Any]
    address: str = "127.0.0.1"
    warnings: list[str] = field(default_factory=list)


class Backend(ABC):
    """A transport among ``size`` ranks, of which this is ``rank``. One thread at a time calls it, except ``_kill``.

    Tensors are contiguous and 1-D, non-empty, on ``device``; peers are never the rank itself. Messages between two
    ranks with one tag arrive in the order sent. A send may block its ``Pending`` until it is received, but ``_post``
    and the native operations only start work and return.
    """

    name: str
    rank: int
    size: int
    device: torch.device  # where tensors must lie; the communicator stages those of other devices
    polls: bool = True  # Pending.poll() makes progress by itself; otherwise only wait() does
    waits: bool = False  # Pending.wait() sleeps (or orders a stream) instead of spinning
    tags: bool = True  # messages with different tags are told apart
    max_tag: int = 2**30  # of users' messages; schedules take SCHEDULE_TAGS more
    averages: bool = False  # its own reductions are asked for AVG too, and round once, after dividing
    uneven: bool = False  # its own all_gather and reduce_scatter also come for parts of different sizes
    by_address: bool = False  # its own collectives use tensors' memory only, whatever autograd knows of them
    shares: bool = False  # ranks of a host can have one buffer
    # Native operations of this many bytes and more end the process, or write where they should not, if ranks call them
    # with different sizes: so the ranks meet first, which they do only if all call the same. Shorter ones may end with
    # a wrong result: so when they meet the next time, they compare those too.
    meets_from: int = 2**63 - 1
    max_count: int = 2**31 - 1  # elements in one message or native operation; longer ones are cut above

    @abstractmethod
    def _post(self, ops: Sequence[P2P], tag: int) -> Pending:
        """Start sends and receives together. The tensors stay alive and untouched until they are done.

        ``tag`` is from 0 to ``max_tag + SCHEDULE_TAGS - 1``.
        """

    @abstractmethod
    def _split(self, members: Sequence[int], name: str) -> Backend:
        """A backend among ``members`` (ranks of this one, in the new order), called by the members only.

        ``name`` is unique among the splits of the job and the same on all members.
        """

    @abstractmethod
    def _kill(self) -> None:
        """Give up at once, from any thread: whoever waits here wakes within 100 ms with a ``CommError``."""

    @abstractmethod
    def _close(self) -> None:
        """Release everything. No operation is pending."""

    def supports(self, operation: str, dtype: torch.dtype, op: ReduceOp | None = None) -> bool:
        """Whether the native ``operation`` ("all_reduce", ...) handles this and keeps the contract. AVG is never asked
        about: where ``averages`` is false it is SUM, divided above."""
        return False

    def _all_reduce(self, tensor: torch.Tensor, op: ReduceOp) -> Pending:
        """In place over ``tensor``."""
        raise UnsupportedError(f"{self.name} has no all_reduce of its own")

    def _all_gather(self, output: torch.Tensor, input: torch.Tensor) -> Pending:
        """``output`` has size * input.numel() elements; ``input`` may be its own slot of it."""
        raise UnsupportedError(f"{self.name} has no all_gather of its own")

    def _reduce_scatter(self, output: torch.Tensor, input: torch.Tensor, op: ReduceOp) -> Pending:
        """``input`` has size * output.numel() elements and stays unchanged."""
        raise UnsupportedError(f"{self.name} has no reduce_scatter of its own")

    def _all_gather_v(self, output: torch.Tensor, input: torch.Tensor, cuts: Sequence[int]) -> Pending:
        """Rank r's ``input`` becomes elements ``cuts[r]`` to ``cuts[r + 1]`` of ``output``; empty parts allowed."""
        raise UnsupportedError(f"{self.name} has no all_gather of uneven parts of its own")

    def _reduce_scatter_v(
        self, output: torch.Tensor, input: torch.Tensor, cuts: Sequence[int], op: ReduceOp
    ) -> Pending:
        """Rank r gets elements ``cuts[r]`` to ``cuts[r + 1]``; empty parts allowed."""
        raise UnsupportedError(f"{self.name} has no reduce_scatter of uneven parts of its own")

    def _broadcast(self, tensor: torch.Tensor, src: int) -> Pending:
        """From rank ``src``, in place."""
        raise UnsupportedError(f"{self.name} has no broadcast of its own")

    def _barrier(self) -> Pending:
        """Done when every rank has started it."""
        raise UnsupportedError(f"{self.name} has no barrier of its own")

    def _library(self) -> Mapping[str, LibraryCall]:
        """The library's own calls by the names it gives them, for benchmarks: neither guarded nor checked.

        Of the calls for one operation the usual one comes first.
        """
        return {}

    def _allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """The buffer that this backend reaches fastest."""
        return torch.empty(numel, dtype=dtype, device=self.device)

    def _offer_shared(self, numel: int, dtype: torch.dtype) -> int:
        """Make this rank's share of a buffer that its host has once: a number that all ranks are told. Only where
        ``shares``."""
        raise UnsupportedError(f"{self.name} shares no memory")

    def _map_shared(self, numel: int, dtype: torch.dtype, offers: Sequence[int]) -> SharedBuffer:
        """The buffer, once every rank has made its offer; offers by rank."""
        raise UnsupportedError(f"{self.name} shares no memory")
