"""Somebody else's process group of ``torch.distributed`` as a backend: gloo's, NCCL's, ours, or a third party's.

gloo's and NCCL's do what our backends of that name do. Of a third party's only ``send`` and ``recv`` are relied on, and
collectives run by schedules over them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from collectives.backend import SCHEDULE_TAGS, Backend, Pending
from collectives.backends.torch_dist import GlooBackend, NcclBackend
from collectives.errors import CommError, CommTimeoutError, PeerLostError, UnsupportedError
from collectives.messages import spread
from collectives.types import P2P, ReduceOp

_c10d: Any = dist  # the type stubs leave out some public names
_CPU, _CUDA = torch.device("cpu"), torch.device("cuda")


def backend_of(group: Any) -> Backend:
    """The backend for a group; raises what ``collectives.from_process_group`` raises."""
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"expected a torch.distributed.ProcessGroup, found {group!r}; ranks outside of a new_group() have none"
        )
    if getattr(group, "keeps_contract", False):
        return OwnGroup(group, owns=False)
    kinds = [torch.device(device.type) for device in group._device_types]
    served = next((kind for kind in (_CPU, _CUDA) if kind in kinds), None)
    if served is None:
        raise UnsupportedError(f"expected a group that serves CPU or CUDA tensors, found one for {kinds or 'none'}")
    library = group._get_backend(served) if type(group) is dist.ProcessGroup else group
    if isinstance(library, _c10d.ProcessGroupGloo):
        return BorrowedGloo(group, library)
    if dist.is_nccl_available() and isinstance(library, _c10d.ProcessGroupNCCL):
        return BorrowedNccl(group, library)
    return AnyGroup(group, served)


class _Works:
    """Works of somebody else's, posted together; ``peers`` are theirs, -1 for a collective."""

    def __init__(self, backend: AnyGroup, works: list[Any], peers: list[int]) -> None:
        self._backend = backend
        self._works = works
        self._peers = peers

    def poll(self) -> bool:
        if not all(work.is_completed() for work in self._works):
            return False
        for i in range(len(self._works)):
            self.wait(i, time.monotonic() + 1.0)
        return True

    def wait(self, i: int, deadline: float) -> None:
        left = timedelta(seconds=max(0.001, deadline - time.monotonic()))
        try:
            self._works[i].wait(left)
        except CommError:
            raise
        except RuntimeError as error:
            raise self._backend.explain(error, self._peers[i], deadline) from error


class AnyGroup(Backend):
    """Messages by ``send`` and ``recv`` of a process group."""

    polls = False
    waits = True

    def __init__(self, group: Any, device: torch.device) -> None:
        self.name = f"group of {group.name()}"
        self.rank = group.rank()
        self.size = group.size()
        self.device = torch.device(device.type, torch.cuda.current_device()) if device.type == "cuda" else device
        self._group = group
        self._stopped = False

    def _post(self, ops: Sequence[P2P], tag: int) -> Pending:
        works, peers = [], []
        for sends, tensor, peer in ops:
            try:
                works.append((self._group.send if sends else self._group.recv)([tensor], peer, tag))
            except CommError:
                raise
            except RuntimeError as error:
                raise self.explain(error, peer, None) from error
            peers.append(peer)
        return _Works(self, works, peers)

    def explain(self, error: RuntimeError, peer: int, deadline: float | None) -> CommError:
        who = f"rank {self.rank}, {self.name}" + (f", message to or from rank {peer}" if peer >= 0 else "")
        text = str(error).partition("\n")[0]
        if self._stopped:
            return CommError(f"{who}: the group was aborted")
        if deadline is not None and time.monotonic() >= deadline:
            return CommTimeoutError(f"{who}: nothing came in time ({text}); is the peer making the same calls?")
        return PeerLostError(f"{who}: the group failed ({text}); see the peer's own output", peer)

    def _split(self, members: Sequence[int], name: str) -> Backend:
        raise UnsupportedError(
            f"{self.name} cannot be split by us; call torch.distributed.new_group({list(members)}) on all ranks, and "
            "collectives.from_process_group of what it returns"
        )

    def _kill(self) -> None:
        self._stopped = True
        self._group.abort()

    def _close(self) -> None:
        return


class OwnGroup(AnyGroup):
    """A group of ``collectives.torch_backend``, whose own collectives keep the contract as ours do."""

    averages = True

    def __init__(self, group: Any, *, owns: bool) -> None:
        super().__init__(group, _CPU)
        self._owns = owns
        below = group.comm._transport
        self.tags = below.tags
        self.max_tag = below.max_tag // spread(below) - SCHEDULE_TAGS

    def supports(self, operation: str, dtype: torch.dtype, op: ReduceOp | None = None) -> bool:
        return operation in ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "barrier")

    def _all_reduce(self, tensor: torch.Tensor, op: ReduceOp) -> Pending:
        options = dist.AllreduceOptions()
        options.reduceOp = getattr(dist.ReduceOp, op.name)
        return self._collective(self._group.allreduce([tensor], options))

    def _all_gather(self, output: torch.Tensor, input: torch.Tensor) -> Pending:
        return self._collective(self._group.all_gather_single(output, input))

    def _reduce_scatter(self, output: torch.Tensor, input: torch.Tensor, op: ReduceOp) -> Pending:
        options = dist.ReduceScatterOptions()
        options.reduceOp = getattr(dist.ReduceOp, op.name)
        return self._collective(self._group.reduce_scatter_single(output, input, options))

    def _broadcast(self, tensor: torch.Tensor, src: int) -> Pending:
        options = dist.BroadcastOptions()
        options.rootRank = src
        return self._collective(self._group.broadcast([tensor], options))

    def _barrier(self) -> Pending:
        return self._collective(self._group.barrier())

    def _collective(self, work: Any) -> Pending:
        return _Works(self, [work], [-1])

    def _split(self, members: Sequence[int], name: str) -> Backend:
        return OwnGroup(self._group.subgroup(members, name), owns=True)

    def _close(self) -> None:
        if self._owns:
            self._group.shutdown()


class BorrowedGloo(GlooBackend):
    """The gloo of a process group that somebody else made."""

    def __init__(self, group: dist.ProcessGroup, gloo: Any) -> None:
        self.rank, self.size, self.device = group.rank(), group.size(), _CPU
        self._group = gloo
        self._store = group.get_group_store()
        self._gloo_device = gloo.options._devices[0]
        self._timeout = gloo.options._timeout.total_seconds()
        self._killed = threading.Event()


class BorrowedNccl(NcclBackend):
    """The NCCL of a process group that somebody else made."""

    def __init__(self, group: dist.ProcessGroup, nccl: Any) -> None:
        self.rank, self.size = group.rank(), group.size()
        self.device = torch.device("cuda", torch.cuda.current_device())
        self._group = nccl
        self._store = group.get_group_store()
        self._timeout = nccl.options._timeout.total_seconds()
        self._killed = threading.Event()

    def _close(self) -> None:
        return
