"""Checks of the operations that move without reducing: gathers, scatters, broadcasts, all_to_all, objects."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from collectives.communicator import Communicator
from collectives.conformance import reference
from collectives.conformance.case import (
    MOVED,
    Case,
    Check,
    blank,
    everyone,
    place,
    raises,
    require,
    same,
    still_works,
)
from collectives.conformance.grids import algorithms, every_dtype, shapes_and_layouts, uneven
from collectives.conformance.reference import data


def check_all_gather(comm: Communicator, case: Case) -> None:
    for seed in case.seeds:
        inputs = everyone(comm, case, seed)
        mine = place(comm, case, inputs[comm.rank], seed)
        output = blank(comm, case, (comm.world_size, *case.shape), seed + 1)
        comm.all_gather(output.tensor, mine.tensor, async_op=case.async_op, algorithm=case.algorithm).wait()
        output.expect(torch.stack(inputs), f"all_gather on rank {comm.rank}")
        mine.expect(inputs[comm.rank], "the input of all_gather")


def check_all_gather_v(comm: Communicator, case: Case) -> None:
    for seed in case.seeds:
        sizes = uneven(comm.world_size, seed)
        inputs = [data(rank, (size,), case.dtype, seed) for rank, size in enumerate(sizes)]
        mine = place(comm, case, inputs[comm.rank], seed)
        output = blank(comm, case, (sum(sizes),), seed + 1)
        comm.all_gather_v(output.tensor, mine.tensor, sizes, async_op=case.async_op, algorithm=case.algorithm).wait()
        output.expect(reference.all_gather(inputs), f"all_gather_v of {sizes} on rank {comm.rank}")
        mine.expect(inputs[comm.rank], "the input of all_gather_v")


def check_broadcast(comm: Communicator, case: Case) -> None:
    for seed in case.seeds:
        src = seed % comm.world_size
        inputs = everyone(comm, case, seed)
        mine = place(comm, case, inputs[comm.rank], seed)
        comm.broadcast(mine.tensor, src, async_op=case.async_op, algorithm=case.algorithm).wait()
        mine.expect(inputs[src], f"broadcast from rank {src} on rank {comm.rank}")


def check_gather(comm: Communicator, case: Case) -> None:
    for seed in case.seeds:
        dst = seed % comm.world_size
        inputs = everyone(comm, case, seed)
        mine = place(comm, case, inputs[comm.rank], seed)
        output = blank(comm, case, (comm.world_size, *case.shape), seed + 1) if comm.rank == dst else None
        tensor = None if output is None else output.tensor
        comm.gather(tensor, mine.tensor, dst, async_op=case.async_op, algorithm=case.algorithm).wait()
        if output is not None:
            output.expect(torch.stack(inputs), f"gather to rank {dst}")
        mine.expect(inputs[comm.rank], "the input of gather")


def check_scatter(comm: Communicator, case: Case) -> None:
    for seed in case.seeds:
        src = seed % comm.world_size
        whole = data(src, (comm.world_size, *case.shape), case.dtype, seed)
        input = place(comm, case, whole, seed) if comm.rank == src else None
        output = blank(comm, case, case.shape, seed + 1)
        tensor = None if input is None else input.tensor
        comm.scatter(output.tensor, tensor, src, async_op=case.async_op, algorithm=case.algorithm).wait()
        output.expect(whole[comm.rank], f"scatter from rank {src} on rank {comm.rank}")
        if input is not None:
            input.expect(whole, "the input of scatter")


def check_all_to_all(comm: Communicator, case: Case) -> None:
    """Equal parts."""
    for seed in case.seeds:
        w, r = comm.world_size, comm.rank
        inputs = everyone(comm, case, seed, (w, *case.shape))
        mine, output = place(comm, case, inputs[r], seed), blank(comm, case, (w, *case.shape), seed + 1)
        comm.all_to_all(output.tensor, mine.tensor, async_op=case.async_op, algorithm=case.algorithm).wait()
        output.expect(torch.stack([tensor[r] for tensor in inputs]), f"all_to_all on rank {r}")
        mine.expect(inputs[r], "the input of all_to_all")


def check_all_to_all_splits(comm: Communicator, case: Case) -> None:
    """Parts of any size, zeros among them, another for each pair of ranks."""
    for seed in case.seeds:
        w, r = comm.world_size, comm.rank
        splits = [[(2 * src + 3 * dst + seed) % 5 for dst in range(w)] for src in range(w)]
        inputs = [data(rank, (sum(splits[rank]),), case.dtype, seed) for rank in range(w)]
        received = [splits[src][r] for src in range(w)]
        mine, output = place(comm, case, inputs[r], seed), blank(comm, case, (sum(received),), seed + 1)
        comm.all_to_all(
            output.tensor, mine.tensor, received, splits[r], async_op=case.async_op, algorithm=case.algorithm
        ).wait()
        output.expect(reference.all_to_all(inputs, splits)[r], f"all_to_all of {splits} on rank {r}")
        mine.expect(inputs[r], "the input of all_to_all")


def check_own_slot(comm: Communicator, case: Case) -> None:
    """The smaller tensor may be this rank's own part of the larger one."""
    w, r = comm.world_size, comm.rank
    for seed in case.seeds:
        sizes = uneven(w, seed)
        start = sum(sizes[:r])
        inputs, wholes = everyone(comm, case, seed), everyone(comm, case, seed, (w, *case.shape))
        pieces = [data(rank, (size,), case.dtype, seed) for rank, size in enumerate(sizes)]

        output = blank(comm, case, (w, *case.shape), seed)
        output.tensor[r] = inputs[r].to(comm.device)
        comm.all_gather(output.tensor, output.tensor[r], algorithm=case.algorithm)
        output.expect(torch.stack(inputs), "all_gather into the tensor that its input is a part of")

        joined = blank(comm, case, (sum(sizes),), seed)
        own = joined.tensor[start : start + sizes[r]]
        own.copy_(pieces[r])
        comm.all_gather_v(joined.tensor, own, sizes, algorithm=case.algorithm)
        joined.expect(torch.cat(pieces), f"all_gather_v of {sizes} into the tensor that its input is a part of")

        whole = place(comm, case, wholes[r], seed)
        comm.reduce_scatter(whole.tensor[r], whole.tensor, algorithm=case.algorithm)
        expected = wholes[r].clone()
        expected[r] = reference.reduce_scatter(wholes)[r].reshape(case.shape)
        whole.expect(expected, "reduce_scatter into its own input")

        root = seed % w
        output = blank(comm, case, (w, *case.shape), seed)
        output.tensor[r] = inputs[r].to(comm.device)
        comm.gather(output.tensor if r == root else None, output.tensor[r], root)
        if r == root:
            output.expect(torch.stack(inputs), "gather into the tensor that its input is a part of")
        dealt = place(comm, case, wholes[root], seed)
        comm.scatter(dealt.tensor[r], dealt.tensor if r == root else None, root)
        same(dealt.tensor[r], wholes[root][r], "scatter into its own input")


def check_overlap_is_refused(comm: Communicator, case: Case) -> None:
    w, r = comm.world_size, comm.rank
    place = torch.zeros(3 * w + 2, device=comm.device)
    whole, shifted = place[: 3 * w], place[2 + 3 * r : 5 + 3 * r]
    before = place.clone()
    raises(ValueError, ["overlap"], lambda: comm.all_gather(whole, shifted))
    raises(ValueError, ["overlap"], lambda: comm.all_gather_v(whole, shifted, [3] * w))
    raises(ValueError, ["overlap"], lambda: comm.reduce_scatter(shifted, whole))
    raises(ValueError, ["overlap"], lambda: comm.reduce_scatter_v(shifted, whole, [3] * w))
    raises(ValueError, ["overlap"], lambda: comm.all_to_all(whole, whole))
    for other in (place[1 : 1 + 3 * w], place[2:]):
        raises(ValueError, ["overlap"], partial(comm.all_to_all, other, whole))
        raises(ValueError, ["overlap"], partial(comm.all_to_all, whole, other))
    same(place, before, "a tensor of refused calls")
    # Tensors that only lie between each other do not overlap.
    woven = torch.zeros(w, 3, 2, device=comm.device)
    woven[r, :, 1] = r + 1.0
    comm.all_gather(woven[:, :, 0], woven[r, :, 1])
    same(woven[:, :, 0], torch.arange(1.0, w + 1).reshape(w, 1).expand(w, 3), "all_gather between its inputs")
    still_works(comm)


def check_objects(comm: Communicator, case: Case) -> None:
    w, r = comm.world_size, comm.rank
    for turn in range(2):
        for src in range(w):
            for obj in (None, {"rank": src, "list": [turn, (2, "three")]}, b"x" * 100_000, ""):
                got = comm.broadcast_object(obj if r == src else "not this", src)
                require(got == obj, f"broadcast_object from rank {src}: expected {obj!r:.60}, got {got!r:.60}")
        mine = {"rank": r, "text": "x" * (1000 * r + turn)}
        expected = [{"rank": rank, "text": "x" * (1000 * rank + turn)} for rank in range(w)]
        require(comm.all_gather_object(mine) == expected, "all_gather_object: wrong objects, or a wrong order")
        for dst in range(w):
            gathered = comm.gather_object(mine, dst)
            require(gathered == (expected if r == dst else None), f"gather_object to rank {dst} on rank {r}")
    still_works(comm)


def _cases(operation: str, dtypes: tuple[torch.dtype, ...] = MOVED) -> Iterator[Case]:
    yield from every_dtype(dtypes)
    yield from shapes_and_layouts()
    for algorithm in algorithms(operation):
        yield Case(torch.float32, shape=(1023,), algorithm=algorithm, async_op=True)
        yield Case(torch.int16, shape=(7, 15), layout="mixed", algorithm=algorithm, seed=1)


CHECKS = (
    Check("all_gather", check_all_gather, tuple(_cases("all_gather"))),
    Check("all_gather", check_all_gather_v, tuple(_cases("all_gather"))),
    Check("broadcast", check_broadcast, tuple(_cases("broadcast"))),
    Check("gather and scatter", check_gather, tuple(_cases("gather"))),
    Check("gather and scatter", check_scatter, tuple(_cases("scatter"))),
    Check("all_to_all", check_all_to_all, tuple(_cases("all_to_all"))),
    Check("all_to_all", check_all_to_all_splits, tuple(_cases("all_to_all"))),
    Check(
        "overlap",
        check_own_slot,
        tuple(
            Case(dtype, shape=shape, algorithm=algorithm, layout=layout, seed=seed)
            for seed, algorithm in enumerate((None, *algorithms("all_gather", "reduce_scatter")))
            for dtype, shape, layout in (
                (torch.float32, (1,), "plain"),
                (torch.float32, (300,), "offset"),
                (torch.bfloat16, (2, 3), "gaps"),
            )
        ),
    ),
    Check("overlap", check_overlap_is_refused),
    Check("objects", check_objects),
)
