"""PyTorch's own transports: gloo on TCP sockets and NCCL on GPUs, and the key-value stores that bring ranks together.

Process groups are built directly over a store of the job's own. There is no default group, so a program that uses
``torch.distributed`` beside this one is left alone.
"""

from __future__ import annotations

import contextlib
import re
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from collectives.backend import SCHEDULE_TAGS, Backend, Bootstrap, LibraryCall, Pending
from collectives.backends.sockets import await_listener, listen, within
from collectives.errors import CommError, CommTimeoutError, PeerLostError, RendezvousError, UnsupportedError
from collectives.types import P2P, ReduceOp

# Time-outs are the communicator's business, given to each wait; the library's own must never come first.
_FOREVER = timedelta(days=365)
_c10d: Any = dist  # the type stubs leave out some public names
_INTEGERS = frozenset({torch.int8, torch.uint8, torch.int32, torch.int64})


def open_store(
    host: str,
    port: int,
    *,
    is_server: bool,
    world_size: int,
    timeout: float,
    listen_fd: int | None = None,
    prefix: str = "",
) -> Store:
    """Open the job's key-value store; rank 0 serves it.

    Args:
        host: name or address that all ranks reach the server at. The server listens on that address alone, if it is
            one of this host's, else on all.
        port: TCP port; a server may give 0 for any free one (see ``store_port``).
        is_server: whether this process serves the store.
        world_size: how many ranks will use it.
        timeout: seconds to wait for the server, and later for a key.
        listen_fd: server only: a bound and listening socket, whose port is used instead of ``port``; the store owns
            it afterwards.
        prefix: separates the keys of jobs that share a store.

    Raises:
        RendezvousError: the port is in use, or no store answered at ``host``:``port`` within ``timeout``.
    """
    deadline = time.monotonic() + timeout
    if is_server:
        if listen_fd is None:
            listen_fd = listen(host, port)
        with socket.socket(fileno=listen_fd) as listener:
            port = listener.getsockname()[1]
            listener.detach()
    else:
        await_listener(host, port, deadline, timeout)

    def connect() -> Store:
        store: Store = _c10d.TCPStore(
            host,
            port,
            world_size,
            is_server,
            timedelta(seconds=timeout),
            wait_for_workers=False,
            master_listen_fd=listen_fd,
        )
        return store

    try:
        store = within(deadline, connect)
    except (RuntimeError, TimeoutError) as error:
        raise RendezvousError(
            f"expected a key-value store at {host}:{port} within {timeout:g} s, but what listens there did not answer "
            f"as one ({_first_line(error)}); choose another port, or start rank 0 first"
        ) from error
    return PrefixStore(prefix, store) if prefix else store


def store_port(store: Store) -> int:
    """The TCP port that ``open_store``'s result is really served at."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    port: int = store.port  # type: ignore[attr-defined]
    return port


def sub_store(store: Store, prefix: str) -> Store:
    """The part of ``store`` whose keys start with ``prefix``."""
    return PrefixStore(prefix, store)


def local_store() -> Store:
    """A store for ranks that are threads of this process. Share the one object among them."""
    store: Store = _c10d.HashStore()
    return store


def _first_line(error: BaseException) -> str:
    """What a C++ library said, without its source position and its general advice."""
    text = re.sub(r"^\[\S+:\d+\] ", "", str(error).partition("\n")[0])
    return text.partition(". This is")[0]


def _reduce_op(op: ReduceOp) -> Any:
    return getattr(dist.ReduceOp, op.name)


class _GlooPending:
    """Works of one post, or one collective; ``peers`` are theirs, -1 for a collective."""

    def __init__(self, backend: GlooBackend, works: list[Any], peers: list[int]) -> None:
        self._backend = backend
        self._works: list[Any | None] = works
        self._peers = peers

    def poll(self) -> bool:
        # A point-to-point work never turns completed by itself; a collective runs on a thread of gloo's and does.
        for i, work in enumerate(self._works):
            if work is not None:
                if not work.is_completed():
                    return False
                self.wait(i, time.monotonic() + 1.0)
        return True

    def wait(self, i: int, deadline: float) -> None:
        work = self._works[i]
        if work is None:
            return
        # Zero would mean no limit at all.
        remaining = timedelta(seconds=max(0.001, deadline - time.monotonic()))
        try:
            work.wait(remaining)
        except RuntimeError as error:
            raise self._backend._translate(error, self._peers[i], deadline) from error
        self._works[i] = None


class GlooBackend(Backend):
    """Messages over TCP sockets, on this host's ``address`` only.

    gloo's all_reduce pays where the schedule's sums cannot overlap; its all_gather copies everything twice, and its
    reduce_scatter is a whole all_reduce, so these are left to schedules.
    """

    name = "gloo"
    polls = False
    waits = True
    meets_from = 0

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        *,
        device: Any,
        timeout: float,
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        """Connect to the peers within ``timeout`` seconds; ``stopped`` says that it is no use any more."""
        self.rank = rank
        self.size = size
        self.device = torch.device("cpu")
        self._store = store
        self._gloo_device = device
        self._timeout = timeout
        self._killed = threading.Event()
        options = _c10d.ProcessGroupGloo._Options()
        options._devices = [device]
        options._timeout = timedelta(seconds=timeout)
        grace = 1.0  # gloo says more about what is missing than we could
        try:
            self._group: Any = within(
                time.monotonic() + timeout + grace,
                lambda: _c10d.ProcessGroupGloo(store, rank, size, options),
                stopped,
            )
        except (RuntimeError, TimeoutError) as error:
            raise RendezvousError(
                f"rank {rank} expected to connect to {size - 1} peers over gloo within {timeout:g} s: "
                f"{_first_line(error)}; check that all ranks are running and can reach each other"
            ) from error
        self._group.set_timeout(_FOREVER)

    def _post(self, ops: Sequence[P2P], tag: int) -> Pending:
        group = self._group
        peers: list[int] = []
        works: list[Any] = []
        for sends, tensor, peer in ops:
            peers.append(peer)
            try:
                works.append((group.send if sends else group.recv)([tensor], peer, tag))
            except RuntimeError as error:
                raise self._translate(error, peer) from error
        return _GlooPending(self, works, peers)

    def supports(self, operation: str, dtype: torch.dtype, op: ReduceOp | None = None) -> bool:
        if operation != "all_reduce":
            return operation in ("broadcast", "barrier")
        # 16-bit floats would be rounded at every addition, bool would be added as bytes, and gloo's MIN and MAX lose
        # NaN. The rest is reduced once, by one rank for each element, so all ranks get the same bits.
        if dtype in (torch.float32, torch.float64):
            return op in (ReduceOp.SUM, ReduceOp.PRODUCT)
        return dtype in _INTEGERS and op in (ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX)

    def _all_reduce(self, tensor: torch.Tensor, op: ReduceOp) -> Pending:
        options = dist.AllreduceOptions()
        options.reduceOp = _reduce_op(op)
        return self._collective(lambda: self._group.allreduce([tensor], options))

    def _broadcast(self, tensor: torch.Tensor, src: int) -> Pending:
        options = dist.BroadcastOptions()
        options.rootRank = src
        data = tensor.view(torch.uint8)  # gloo has no 16-bit integers and no float8
        return self._collective(lambda: self._group.broadcast([data], options))

    def _barrier(self) -> Pending:
        return self._collective(lambda: self._group.barrier(dist.BarrierOptions()))

    def _collective(self, start: Callable[[], Any]) -> Pending:
        try:
            return _GlooPending(self, [start()], [-1])
        except RuntimeError as error:
            raise self._translate(error, -1) from error

    def _library(self) -> Mapping[str, LibraryCall]:
        group, broadcast = self._group, dist.BroadcastOptions()
        return {
            "allreduce": LibraryCall("all_reduce", lambda output, _: group.allreduce([output]).wait()),
            "reduce_scatter": LibraryCall(
                "reduce_scatter", lambda output, input: group._reduce_scatter_base(output, input).wait()
            ),
            "allgather": LibraryCall("all_gather", lambda output, input: group._allgather_base(output, input).wait()),
            "broadcast": LibraryCall("broadcast", lambda output, _: group.broadcast([output], broadcast).wait()),
        }

    def _split(self, members: Sequence[int], name: str) -> Backend:
        return GlooBackend(
            PrefixStore(name, self._store),
            members.index(self.rank),
            len(members),
            device=self._gloo_device,
            timeout=self._timeout,
            stopped=self._killed.is_set,
        )

    def _kill(self) -> None:
        self._killed.set()
        group = self._group
        if self.size == 1 or group is None:
            return
        # An expired receive is the only thing that makes gloo close its connections, which wakes every waiter here
        # and, through the closed sockets, on the peers. Nobody sends with this tag, so it always expires.
        with contextlib.suppress(RuntimeError):
            receive = group.recv([torch.empty(1)], (self.rank + 1) % self.size, self.max_tag + SCHEDULE_TAGS)
            receive.wait(timedelta(milliseconds=1))

    def _close(self) -> None:
        self._group = None

    def _translate(self, error: RuntimeError, peer: int, deadline: float | None = None) -> CommError:
        who = f"rank {self.rank}, gloo" + (f", message to or from rank {peer}" if peer >= 0 else "")
        text = _first_line(error)
        if self._killed.is_set():
            return CommError(f"{who}: the transport was stopped")
        if deadline is not None and time.monotonic() >= deadline:
            return CommTimeoutError(f"{who}: nothing came in time ({text}); is the peer making the same calls?")
        return PeerLostError(f"{who}: the connection broke ({text}); see the peer's own output", peer)


class _NcclPending:
    def __init__(self, backend: NcclBackend, work: Any, tensors: tuple[torch.Tensor, ...]) -> None:
        self._backend = backend
        self._work = work
        self._tensors = tensors  # NCCL works on a stream of its own: the memory must outlive the launch

    def poll(self) -> bool:
        if self._backend._killed.is_set():
            raise self._backend._failure("the transport was stopped")
        if not self._work.is_completed():
            return False
        self.wait(0, 0.0)  # also raises what went wrong
        return True

    def wait(self, i: int, deadline: float) -> None:
        """Order the current stream behind the work. The host does not block, so ``deadline`` cannot pass here."""
        try:
            self._work.wait()
        except RuntimeError as error:
            raise self._backend._failure(_first_line(error)) from error


class NcclBackend(Backend):
    """Messages between GPUs. All work is queued on NCCL's stream; ``poll`` asks whether the GPU has finished it."""

    name = "nccl"
    waits = True
    tags = False

    def __init__(self, store: Store, rank: int, size: int, *, device: torch.device, timeout: float) -> None:
        self.rank = rank
        self.size = size
        self.device = device
        self._store = store
        self._timeout = timeout
        self._killed = threading.Event()
        options = _c10d.ProcessGroupNCCL.Options()
        options._timeout = _FOREVER  # at NCCL's own time-out a watchdog thread would end the process
        try:
            self._group: Any = _c10d.ProcessGroupNCCL(store, rank, size, options)
            # Connect here, where all ranks are: a first batch of messages may concern only some of them.
            self._group.eager_connect_single_device(device)
        except RuntimeError as error:
            raise RendezvousError(
                f"rank {rank} expected to connect {size} ranks over NCCL on {device}: {_first_line(error)}; check that "
                "every rank has a GPU of its own (set NCCL_DEBUG=INFO for details)"
            ) from error

    def _post(self, ops: Sequence[P2P], tag: int) -> Pending:
        group = self._group

        def start() -> Any:
            group._start_coalescing()
            try:
                for sends, tensor, peer in ops:
                    (group.send if sends else group.recv)([tensor.view(torch.uint8)], peer, 0)
            finally:
                work = group._end_coalescing()
            return work

        return self._start(start, *(op.tensor for op in ops))

    def supports(self, operation: str, dtype: torch.dtype, op: ReduceOp | None = None) -> bool:
        if operation in ("all_gather", "broadcast"):
            return True
        if operation not in ("all_reduce", "reduce_scatter"):
            return False
        # NCCL rounds 16-bit floats at every addition, and its MIN and MAX lose NaN.
        if dtype in (torch.float32, torch.float64):
            return op in (ReduceOp.SUM, ReduceOp.PRODUCT)
        exact = (ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX)
        return dtype in (torch.int32, torch.int64) and op in exact

    def _all_reduce(self, tensor: torch.Tensor, op: ReduceOp) -> Pending:
        options = dist.AllreduceOptions()
        options.reduceOp = _reduce_op(op)
        return self._start(lambda: self._group.allreduce([tensor], options), tensor)

    def _all_gather(self, output: torch.Tensor, input: torch.Tensor) -> Pending:
        out, mine = output.view(torch.uint8), input.view(torch.uint8)
        return self._start(lambda: self._group._allgather_base(out, mine), output, input)

    def _reduce_scatter(self, output: torch.Tensor, input: torch.Tensor, op: ReduceOp) -> Pending:
        options = dist.ReduceScatterOptions()
        options.reduceOp = _reduce_op(op)
        return self._start(lambda: self._group._reduce_scatter_base(output, input, options), output, input)

    def _broadcast(self, tensor: torch.Tensor, src: int) -> Pending:
        options = dist.BroadcastOptions()
        options.rootRank = src
        return self._start(lambda: self._group.broadcast([tensor.view(torch.uint8)], options), tensor)

    def _start(self, launch: Callable[[], Any], *tensors: torch.Tensor) -> Pending:
        try:
            with torch.cuda.device(self.device):
                return _NcclPending(self, launch(), tensors)
        except RuntimeError as error:
            raise self._failure(_first_line(error)) from error

    def _failure(self, text: str) -> CommError:
        if self._killed.is_set():
            return CommError(f"rank {self.rank}, nccl: the transport was stopped")
        return PeerLostError(f"rank {self.rank}, nccl: {text}; see the peers' output")

    def _split(self, members: Sequence[int], name: str) -> Backend:
        return NcclBackend(
            PrefixStore(name, self._store),
            members.index(self.rank),
            len(members),
            device=self.device,
            timeout=self._timeout,
        )

    def _kill(self) -> None:
        self._killed.set()
        self._group.abort()

    def _close(self) -> None:
        if not self._killed.is_set():
            self._group.shutdown()


def create_gloo(bootstrap: Bootstrap) -> GlooBackend:
    """Connect this rank to its peers over gloo, listening on ``bootstrap.address`` only.

    Raises:
        UnsupportedError: this build of torch has no gloo.
        RendezvousError: the peers did not come within ``bootstrap.timeout``.
    """
    if not (dist.is_available() and dist.is_gloo_available()):
        raise UnsupportedError(
            "backend 'gloo' needs a build of torch with gloo; install one, or use 'mpi' or 'threads'"
        )
    info = bootstrap.info
    return GlooBackend(
        PrefixStore("gloo", bootstrap.store()),
        info.rank,
        info.world_size,
        device=_c10d.ProcessGroupGloo.create_device(hostname=bootstrap.address),
        timeout=bootstrap.timeout,
    )


def create_nccl(bootstrap: Bootstrap) -> NcclBackend:
    """Connect this rank's GPU, ``bootstrap.device``, to its peers' over NCCL.

    Raises:
        UnsupportedError: torch sees no GPU, has no NCCL, or the device is not a GPU.
        RendezvousError: the peers did not come.
    """
    if not torch.cuda.is_available():
        raise UnsupportedError(
            "backend 'nccl' needs an NVIDIA GPU and a CUDA build of torch, and torch sees none "
            f"(torch {torch.__version__}); use backend 'gloo' or 'mpi' on CPUs"
        )
    if not (dist.is_available() and dist.is_nccl_available()):
        raise UnsupportedError(f"backend 'nccl' needs a torch built with NCCL (torch {torch.__version__}); use 'gloo'")
    if bootstrap.device.type != "cuda":
        raise UnsupportedError(f"backend 'nccl' needs a cuda device, got {bootstrap.device}; pass device='cuda'")
    info = bootstrap.info
    return NcclBackend(
        PrefixStore("nccl", bootstrap.store()),
        info.rank,
        info.world_size,
        device=bootstrap.device,
        timeout=bootstrap.timeout,
    )
