"""The table of operations: what torch.distributed asks of a process group, by calls of a ``Communicator``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from collectives.communicator import Communicator
from collectives.communicator import Options as Keywords
from collectives.errors import UnsupportedError
from collectives.torch_backend.features import ALIASES
from collectives.torch_backend.futures import Futures
from collectives.torch_backend.reduce_ops import divide, op_of, reduce_op, root_of
from collectives.torch_backend.tensor_list import Tensors, elements, join, listed, listed_twice
from collectives.torch_backend.work import FINISHED, GroupWork, seconds
from collectives.types import P2P, ReduceOp, Work

_c10d: Any = dist  # the type stubs leave out some public names
_CPU = torch.device("cpu")


class CollectivesProcessGroup(dist.ProcessGroup):
    """A process group of torch's whose operations a communicator carries out.

    torch calls these methods, from Python and, those that its trampoline knows, from C++. Each takes torch's options,
    or what its short form has in their place, and returns torch's ``Work``. ``asyncOp`` being false, as it is in
    ``torch.distributed``'s calls without ``async_op=True``, the operation is done on return. The communicator is closed
    by ``shutdown``, so by ``destroy_process_group``.

    Args:
        comm: the ranks, in the group's order.
        store: the group's own part of the job's key-value store.
        name: the backend's name with torch.
        stack: its full name with us.
        nodes: the host of each rank, where groups of some of them may be asked for.
    """

    def __init__(self, comm: Communicator, store: Any, name: str, stack: str, nodes: Sequence[int] = ()) -> None:
        super().__init__(comm.rank, comm.world_size)  # type: ignore[call-arg]  # with a store it is not for Python
        self.comm = comm
        self.stack = stack
        self._store = store
        self.nodes = nodes
        self._backend_name = name
        self._group_name = self._description = ""
        self._batch: list[GroupWork] | None = None  # what was started since _start_coalescing
        self._futures = Futures()

    # Who this is

    def getBackendName(self) -> str:  # noqa: N802 (torch's names, called from C++)
        return self._backend_name

    def getRank(self) -> int:  # noqa: N802
        return self.comm.rank

    def getSize(self) -> int:  # noqa: N802
        return self.comm.world_size

    def getGroupName(self) -> str:  # noqa: N802
        return self._group_name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._group_name = name

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._description

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        self._description = description

    def rank(self) -> int:
        return self.comm.rank

    def size(self) -> int:
        return self.comm.world_size

    def name(self) -> str:
        return self._backend_name

    def get_group_store(self) -> Any:
        return self._store

    _get_backend_name = name
    keeps_contract = True  # of a communicator: what from_process_group may rely on
    supports_splitting = False
    supports_coalescing = False

    @property
    def _device_types(self) -> list[torch.device]:
        return [_CPU]

    def _get_backend(self, device: torch.device) -> CollectivesProcessGroup:  # type: ignore[override]
        """Itself: there is no other object behind a process group written in Python."""
        if torch.device(device).type != _CPU.type:
            raise UnsupportedError(
                f"process group {self._backend_name} serves CPU tensors, not {device}; use nccl there"
            )
        return self

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self.comm.timeout = timeout.total_seconds()

    set_timeout = _set_default_timeout

    def subgroup(self, members: Sequence[int], name: str) -> CollectivesProcessGroup:
        """A group of ``members``, called by them alone; ``name`` is one that no other part of this group has."""
        nodes = self.nodes or [self.comm.node] * self.comm.world_size
        comm = self.comm._subgroup(members, nodes, name, self.comm.timeout)
        store = PrefixStore(f"{name}/", self._store)
        return CollectivesProcessGroup(comm, store, self._backend_name, self.stack)

    def shutdown(self) -> None:
        """Finish what is pending and close the communicator, unless it has failed: then there is nothing to finish."""
        self.comm.close()

    def abort(self) -> None:
        self.comm.abort("its process group was aborted")

    # Reductions

    def allreduce(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None) -> dist.Work:
        """In place; several tensors one after another."""
        tensors = listed(tensors)
        how = self._how(opts, timeout)
        op, divide = self._divided(op_of(opts), tensors)
        return self._started(how, [self.comm.all_reduce(tensor, op, **how) for tensor in tensors], tensors, divide)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Any, opts: Any = None, op: Any = None, timeout: timedelta | None = None) -> dist.Work:
        """Into rank ``rootRank``'s tensor; the others' stay unchanged."""
        tensors = listed(tensors)
        how, root = self._how(opts, timeout), root_of(opts)
        results = tensors if self.comm.rank == root else []
        ours, divide = self._divided(op_of(opts) if op is None else reduce_op(op), results, tensors[0].dtype)
        works = [self.comm.reduce(tensor, root, ours, **how) for tensor in tensors]
        return self._started(how, works, tensors, divide)

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> dist.Work:
        """Part r of ``input``, combined, into rank r's ``output``."""
        how = self._how(opts)
        op, divide = self._divided(op_of(opts), [output])
        return self._started(how, [self.comm.reduce_scatter(output, input, op, **how)], [output], divide)

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work:
        how, (op, divide) = self._how(opts), self._divided(op_of(opts), outputs)
        pairs = zip(outputs, inputs, strict=True)
        return self._started(how, [self.comm.reduce_scatter(o, i, op, **how) for o, i in pairs], outputs, divide)

    def reduce_scatter(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None
    ) -> dist.Work:
        """Tensor r of each of ``inputs``, combined, into rank r's output; the tensors may differ in size."""
        outputs, lists = listed(outputs), listed_twice(inputs)
        how, works, (op, divide) = self._how(opts, timeout), [], self._divided(op_of(opts), outputs)
        for output, parts in zip(outputs, lists, strict=True):
            joined = join(parts, written=False)
            works.append(self.comm.reduce_scatter_v(output, joined.tensor, joined.sizes, op, **how))
        return self._started(how, works, outputs, divide)

    # Movements

    def broadcast(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None) -> dist.Work:
        """Rank ``rootRank``'s tensors into everyone's."""
        tensors = listed(tensors)
        how, root = self._how(opts, timeout), root_of(opts)
        return self._started(how, [self.comm.broadcast(tensor, root, **how) for tensor in tensors], tensors)

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> dist.Work:
        """Every rank's ``input``, in rank order, into ``output``."""
        how = self._how(opts)
        return self._started(how, [self.comm.all_gather(output, input, **how)], [output])

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work:
        how = self._how(opts)
        pairs = zip(outputs, inputs, strict=True)
        return self._started(how, [self.comm.all_gather(o, i, **how) for o, i in pairs], outputs)

    def allgather(  # type: ignore[override]
        self, output_lists: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None
    ) -> dist.Work:
        """Rank r's input into tensor r of the output list; the tensors may differ in size, alike on all ranks."""
        lists, inputs = listed_twice(output_lists), listed(inputs)
        how, works, finishes = self._how(opts, timeout), [], []
        for outputs, input in zip(lists, inputs, strict=True):
            joined = join(outputs, written=True)
            works.append(self.comm.all_gather_v(joined.tensor, input, joined.sizes, **how))
            finishes.append(joined.unpack)
        return self._started(how, works, [tensor for outputs in lists for tensor in outputs], finishes)

    def allgather_coalesced(self, output_lists: Any, inputs: Tensors, opts: Any = None) -> dist.Work:
        """``output_lists[r]`` holds rank r's ``inputs``."""
        return self.allgather([list(outputs) for outputs in output_lists], inputs, opts)

    def gather(self, output_lists: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None) -> dist.Work:
        """Rank r's input into tensor r of rank ``rootRank``'s list."""
        input = listed(inputs)[0]
        how, root = self._how(opts, timeout), root_of(opts)
        if self.comm.rank != root:
            return self._started(how, [self.comm.gather(None, input, root, **how)], [])
        outputs = listed_twice(output_lists)[0]
        joined = join(outputs, written=True)
        return self._started(how, [self.comm.gather(joined.tensor, input, root, **how)], outputs, [joined.unpack])

    def scatter(self, outputs: Any, input_lists: Any, opts: Any = None, timeout: timedelta | None = None) -> dist.Work:
        """Tensor r of rank ``rootRank``'s list into rank r's output."""
        output = listed(outputs)[0]
        how, root, input = self._how(opts, timeout), root_of(opts), None
        if self.comm.rank == root:
            input = join(listed_twice(input_lists)[0], written=False).tensor
        return self._started(how, [self.comm.scatter(output, input, root, **how)], [output])

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: Sequence[int] | None = None,
        input_splits: Sequence[int] | None = None,
        opts: Any = None,
    ) -> dist.Work:
        """Part d of ``input`` to rank d, part s of ``output`` from rank s; splits count rows, none are equal parts."""
        how = self._how(opts)
        splits = [elements(tensor, rows) for tensor, rows in ((output, output_splits), (input, input_splits))]
        return self._started(how, [self.comm.all_to_all(output, input, *splits, **how)], [output])

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work:
        """Tensor d of ``inputs`` to rank d, tensor s of ``outputs`` from rank s."""
        how, sent, got = self._how(opts), join(inputs, written=False), join(outputs, written=True)
        work = self.comm.all_to_all(got.tensor, sent.tensor, got.sizes, sent.sizes, **how)
        return self._started(how, [work], outputs, [got.unpack])

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> dist.Work:  # type: ignore[override]
        how = self._how(opts, timeout)
        return self._started(how, [self.comm.barrier(**how)], [])  # type: ignore[misc]

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier; who does not come is named by the error of any."""
        self.comm.barrier(timeout=seconds(timeout))

    # Messages

    def send(self, tensors: Any, dst: int, tag: int) -> dist.Work:
        return self._message([P2P.send(tensor, dst) for tensor in listed(tensors)], tag)

    def recv(self, tensors: Any, src: int, tag: int) -> dist.Work:
        return self._message([P2P.recv(tensor, src) for tensor in listed(tensors)], tag)

    def _message(self, ops: list[P2P], tag: int) -> dist.Work:
        return self._under_way([self.comm.exchange(ops, tag, async_op=True)], [op.tensor for op in ops])

    # Several at once

    def _start_coalescing(self, device: torch.device) -> None:
        """Everything is started at once anyway; what is started from here on is waited for together."""
        self._batch = []

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        batch, self._batch = self._batch or [], None
        works = [work for each in batch for work in each.works]
        return GroupWork(works, [], [each.finish for each in batch], futures=self._futures)

    # What there is not

    def recv_anysource(self, *_: object) -> NoReturn:
        self._refuse("recv_anysource", "name the source: recv(tensor, src)")

    def split_group(self, *_: object, **__: object) -> NoReturn:
        self._refuse("split_group", "torch.distributed.new_group(ranks)")

    def merge_remote_group(self, *_: object, **__: object) -> NoReturn:
        self._refuse("merge_remote_group", "start all ranks as one job")

    def _refuse(self, what: str, instead: str) -> NoReturn:
        raise UnsupportedError(f"process group {self._backend_name} has no {what}; instead: {instead}")

    # How calls are made

    def _how(self, opts: Any, timeout: timedelta | None = None) -> Keywords:
        """The keywords of a communicator's call for torch's options. A call without any may be the fast one."""
        how: Keywords = {}
        if isinstance(opts, timedelta):  # in a short form
            opts, timeout = None, opts
        limit = seconds(getattr(opts, "timeout", timeout))
        if limit is not None:
            how["timeout"] = limit
        if self._batch is not None or getattr(opts, "asyncOp", True):
            how["async_op"] = True
        return how

    def _divided(
        self, op: ReduceOp, results: Tensors, dtype: torch.dtype | None = None
    ) -> tuple[ReduceOp, list[Callable[[], None]]]:
        """The operation to ask for, and what then remains: AVG of integers is their sum, divided towards zero, as NCCL
        has it and as frameworks rely on."""
        dtype = results[0].dtype if dtype is None else dtype
        if op is not ReduceOp.AVG or dtype.is_floating_point or dtype.is_complex or dtype is torch.bool:
            return op, []
        return ReduceOp.SUM, [functools.partial(divide, tensor, self.comm.world_size) for tensor in results]

    def _started(
        self, how: Keywords, works: list[Work], result: Tensors, finishes: Sequence[Callable[[], None] | None] = ()
    ) -> dist.Work:
        needed = [finish for finish in finishes if finish is not None]
        if "async_op" not in how:
            for finish in needed:
                finish()
            return FINISHED
        return self._under_way(works, result, needed)

    def _under_way(self, works: list[Work], result: Tensors, finishes: Sequence[Callable[[], None]] = ()) -> GroupWork:
        work = GroupWork(works, result, finishes, futures=self._futures)
        if self._batch is not None:
            self._batch.append(work)
        return work


for _name, _others in ALIASES.items():
    for _other in _others:
        setattr(CollectivesProcessGroup, _other, getattr(CollectivesProcessGroup, _name))
