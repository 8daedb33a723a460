"""Ranks without a launcher: run a function on threads of this process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from collectives import backends
from collectives.backend import Backend, Bootstrap
from collectives.backends.threads import ThreadsBackend, World
from collectives.communicator import Communicator
from collectives.errors import CommError, UnsupportedError
from collectives.selection import Table
from collectives.types import RankInfo


def run(
    fn: Callable[..., Any],
    *args: Any,
    n: int = 4,
    backend: str = "threads",
    timeout: float = 600.0,
    algorithm: str | None = None,
    table: Table | None = None,
    **kwargs: Any,
) -> list[Any]:
    """Call ``fn(comm, *args, **kwargs)`` on ``n`` ranks, which are threads of this process.

    Args:
        backend: "threads" or "gloo", also with layers ("ring+threads"). MPI ranks are processes: start those with
            ``mpirun``, or with ``python -m launch``.
        timeout: seconds that a call waits for its peers.
        algorithm: the default algorithm of the communicator.
        table: measured choices of algorithms; None: those that come with the package.

    Returns:
        What each rank returned, in rank order.

    Raises:
        What the first rank to fail raised; the other ranks' calls end with ``CommError``.
    """
    stack = backends.parse(backend)
    if "shm" in stack.layers:
        raise UnsupportedError(
            f"threads of one process share their memory anyway, so collectives.run has no use for {backend!r}; use "
            "'threads', or start processes with 'python -m launch' or mpirun"
        )
    transport = _transports(stack.base, n, timeout)
    choices = Table.shipped() if table is None else table
    results: list[Any] = [None] * n
    failures: list[tuple[int, BaseException]] = []

    def main(rank: int) -> None:
        try:
            info = RankInfo(rank=rank, world_size=n, local_rank=rank, local_world_size=n, launcher="threads")
            comm = Communicator(
                transport(info),
                info,
                name=backend,
                layers=stack.layers,
                timeout=timeout,
                algorithm=algorithm,
                table=choices,
            )
            with comm:
                results[rank] = fn(comm, *args, **kwargs)
        except BaseException as error:  # it is raised again below, in the caller's thread
            failures.append((rank, error))

    threads = [threading.Thread(target=main, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        # The cause is an error that a rank raised of itself, not one that its peers' leaving gave it.
        rank, error = next((f for f in failures if not isinstance(f[1], CommError)), failures[0])
        if hasattr(error, "add_note"):
            error.add_note(f"raised on rank {rank}; {len(failures)} of {n} ranks failed")
        raise error
    return results


def _transports(base: str, n: int, timeout: float) -> Callable[[RankInfo], Backend]:
    if base == "threads":
        world = World(n)
        return lambda info: ThreadsBackend(world, info.rank)
    if base != "gloo":
        raise UnsupportedError(
            f"collectives.run keeps its ranks in one process, which backend {base!r} cannot; use 'threads' or 'gloo', "
            "or start processes with 'python -m launch' or mpirun"
        )
    from collectives.backends.torch_dist import local_store

    store = local_store()
    device = torch.device("cpu")
    return lambda info: backends.create(base, Bootstrap(info, device, timeout, lambda: store))
