"""Checks of wrong arguments, of how much fits into one message, and of what a backend says that it can do."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from collectives.capabilities import Key
from collectives.communicator import Communicator
from collectives.conformance import reference
from collectives.conformance.case import MOVED, Case, Check, everyone, raises, require, same, still_works
from collectives.conformance.grids import algorithms
from collectives.conformance.reference import data
from collectives.errors import UnsupportedError
from collectives.types import P2P, ReduceOp

_LIMIT = 1000


def check_wrong_arguments(comm: Communicator, case: Case) -> None:
    """Refused alike on every rank, before anything is sent: the communicator stays usable."""
    w = comm.world_size
    one = torch.ones(3, device=comm.device)

    def zeros(numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.zeros(numel, dtype=dtype, device=comm.device)

    wrong: list[tuple[type[Exception], list[str], Callable[[], object]]] = [
        (ValueError, ["output", "3"], lambda: comm.all_gather(zeros(3 * w + 1), one)),
        (TypeError, ["float64", "float32"], lambda: comm.all_gather(zeros(3 * w, torch.float64), one)),
        (ValueError, ["input"], lambda: comm.reduce_scatter(zeros(2), zeros(2 * w + 1))),
        (TypeError, ["bfloat16"], lambda: comm.reduce_scatter(zeros(2), zeros(2 * w, torch.bfloat16))),
        (ValueError, ["sizes"], lambda: comm.all_gather_v(zeros(3 * w), one, [3] * (w + 1))),
        (ValueError, ["sizes", "negative"], lambda: comm.all_gather_v(zeros(3 * w), one, [-3] * w)),
        (ValueError, ["output"], lambda: comm.all_gather_v(zeros(3 * w + 2), one, [3] * w)),
        (ValueError, ["input"], lambda: comm.reduce_scatter_v(one, zeros(3 * w + 2), [3] * w)),
        (ValueError, ["input"], lambda: comm.all_to_all(zeros(w), zeros(w), [1] * w, [2] * w)),
        (ValueError, ["src", str(w)], lambda: comm.broadcast(one, w)),
        (ValueError, ["src", "-1"], lambda: comm.broadcast(one, -1)),
        (TypeError, ["src"], lambda: comm.broadcast(one, 0.0)),  # type: ignore[arg-type]
        (ValueError, ["dst", str(w)], lambda: comm.reduce(one, w)),
        (ValueError, ["dst", str(w)], lambda: comm.gather(None, one, w)),
        (ValueError, ["src", "-1"], lambda: comm.scatter(one, None, -1)),
        (ValueError, ["dst", str(w)], lambda: comm.send(one, w)),
        (ValueError, ["src", "-2"], lambda: comm.recv(one, -2)),
        (ValueError, ["tag", "-1"], lambda: comm.send(one, 0, -1)),
        (ValueError, ["no-such"], lambda: comm.all_reduce(one, algorithm="no-such")),
        (TypeError, ["ReduceOp"], lambda: comm.all_reduce(one, "sum")),  # type: ignore[arg-type]
        (TypeError, ["tensor"], lambda: comm.all_reduce([1.0, 2.0])),  # type: ignore[arg-type]
        (TypeError, ["dense"], lambda: comm.all_reduce(torch.eye(3, device=comm.device).to_sparse())),
        (ValueError, ["overlap"], lambda: comm.all_reduce(one[:1].expand(3))),
        (ValueError, ["overlap"], lambda: comm.all_reduce(one.as_strided((2, 2), (1, 1)))),
    ]
    for kind, words, call in wrong:
        raises(kind, words, call)
        same(one, torch.ones(3), "the tensor of a refused call")
    still_works(comm)


def check_count_limit(comm: Communicator, case: Case) -> None:
    """More elements than one message may hold are cut; the answer is the same, and the limit is kept."""
    w, r = comm.world_size, comm.rank
    inputs = everyone(comm, case, case.seed, (2501,))
    wholes = everyone(comm, case, case.seed, (w, 2501))
    mine, whole = inputs[r].to(comm.device, copy=True), wholes[r].to(comm.device)
    options: dict[str, Any] = {"algorithm": case.algorithm}
    with limited(comm, _LIMIT):
        total = mine.clone()
        comm.all_reduce(total, **options)
        same(total, reference.all_reduce(inputs), f"all_reduce of 2501 elements with a limit of {_LIMIT}")
        gathered = torch.zeros_like(whole)
        comm.all_gather(gathered, mine, **options)
        same(gathered, torch.stack(inputs), f"all_gather of 2501 elements with a limit of {_LIMIT}")
        piece = torch.zeros_like(mine)
        comm.reduce_scatter(piece, whole, **options)
        same(piece, reference.reduce_scatter(wholes)[r], f"reduce_scatter with a limit of {_LIMIT}")
        if case.algorithm is None:
            copy = mine.clone()
            comm.broadcast(copy, w - 1)
            same(copy, inputs[-1], f"broadcast of 2501 elements with a limit of {_LIMIT}")
            comm.reduce(mine, 0)
            same(mine, reference.all_reduce(inputs) if r == 0 else inputs[r], f"reduce with a limit of {_LIMIT}")
            comm.all_to_all(gathered, whole)
            same(gathered, torch.stack([rows[r] for rows in wholes]), f"all_to_all with a limit of {_LIMIT}")
            comm.exchange([P2P.send(whole, (r + 1) % w), P2P.recv(gathered, (r - 1) % w)])
            same(gathered, wholes[(r - 1) % w], f"a long message with a limit of {_LIMIT}")
    still_works(comm)


@contextlib.contextmanager
def limited(comm: Communicator, count: int) -> Iterator[None]:
    """Lower the transport's ``max_count``, and raise where something longer reaches it."""
    transport: Any = comm._transport

    def guarded(call: Callable[..., Any]) -> Callable[..., Any]:
        def checked(*args: Any) -> Any:
            tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
            messages: Sequence[Any] = args[0] if args and not tensors else ()
            longest = max((t.numel() for t in [*tensors, *(op.tensor for op in messages)]), default=0)
            require(longest <= count, f"{longest} elements reached a transport that takes {count} at a time")
            return call(*args)

        return checked

    names = ("_post", "_all_reduce", "_all_gather", "_reduce_scatter", "_broadcast")
    replaced = {name: guarded(getattr(transport, name)) for name in names}
    vars(transport).update(replaced, max_count=count)
    try:
        yield
    finally:
        for name in (*names, "max_count"):
            vars(transport).pop(name)


def check_capabilities(comm: Communicator, case: Case) -> None:
    """What the communicator says that its backend does by itself, by schedules and not at all is so."""
    for key, support in comm.capabilities().items():
        if key.op is not None or key.operation in ("all_gather", "broadcast"):
            _try(comm, key, support)
    still_works(comm)


def _try(comm: Communicator, key: Key, support: str) -> None:
    def call(algorithm: str | None) -> None:
        w, r = comm.world_size, comm.rank
        inputs = [data(rank, (5,), key.dtype, 1) for rank in range(w)]
        mine = inputs[r].to(comm.device, copy=True)
        wide = torch.stack(inputs).to(comm.device)
        what = f"{key} by {algorithm or 'choice'}"
        op = key.op or ReduceOp.SUM
        if key.operation == "all_reduce":
            comm.all_reduce(mine, op, algorithm=algorithm)
            same(mine, reference.all_reduce(inputs, op), what)
        elif key.operation == "reduce":
            comm.reduce(mine, 0, op, algorithm=algorithm)
            same(mine, reference.all_reduce(inputs, op) if r == 0 else inputs[r], what)
        elif key.operation == "reduce_scatter":
            whole = torch.stack([inputs[r]] * w).to(comm.device)
            comm.reduce_scatter(mine, whole, op, algorithm=algorithm)
            same(mine, reference.all_reduce(inputs, op), what)
        elif key.operation == "all_gather":
            comm.all_gather(torch.zeros_like(wide), mine, algorithm=algorithm)
        else:
            comm.broadcast(mine, w - 1, algorithm=algorithm)
            same(mine, inputs[-1], what)

    if support == "no":
        raises(TypeError, [str(key.dtype)], lambda: call(None))
        return
    require(support in ("native", "emulated"), f"{key} is {support!r}")
    call(None)
    if support == "native":
        call("native")
    else:
        raises(UnsupportedError, [key.operation], lambda: call("native"))


CHECKS = (
    Check("arguments", check_wrong_arguments),
    Check(
        "limits",
        check_count_limit,
        tuple(
            Case(dtype, algorithm=name)
            for name in (None, *algorithms("all_reduce", "all_gather", "reduce_scatter"))
            for dtype in (torch.float32, torch.bfloat16)
        ),
    ),
    Check("capabilities", check_capabilities),
)

__all__ = ["CHECKS", "MOVED"]
