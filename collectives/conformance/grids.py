"""Which cases the checks run: every dtype, shape, layout and algorithm, though not every combination of them."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from collectives.conformance.case import LAYOUTS, Case
from collectives.schedules import SCHEDULES
from collectives.types import ReduceOp

SHAPES: tuple[tuple[int, ...], ...] = (
    (16, 15),
    (),
    (1, 2, 2),
    (3,),
    (1, 0, 2),
    (2, 1, 2),
    (1,),
    (1, 1, 5),
    (4, 3),
    (1023,),
    (0,),
    (1, 7),
)
_DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64)


def shapes_and_layouts() -> Iterator[Case]:
    """Every shape in two layouts, every layout several times; dtypes take turns."""
    layouts = [*LAYOUTS, "mixed"]
    for i, shape in enumerate(SHAPES):
        for j in (0, 3):
            layout = layouts[(i + j) % len(layouts)]
            yield Case(_DTYPES[(i + j) % len(_DTYPES)], shape=shape, layout=layout, async_op=(i + j) % 4 == 1, seed=i)


def algorithms(*operations: str) -> tuple[str, ...]:
    """The names of the schedules that all of these operations have."""
    names = [{name for of, name in SCHEDULES if of == operation} for operation in operations]
    return tuple(sorted(set.intersection(*names)))


def uneven(world_size: int, seed: int) -> list[int]:
    """Sizes by rank: all different, some zero, all but one zero, all zero, falling."""
    kinds = (
        [3 * rank + 1 for rank in range(world_size)],
        [(rank * 5 + 2) % 4 for rank in range(world_size)],
        [7 if rank == world_size - 1 else 0 for rank in range(world_size)],
        [0] * world_size,
        [2 * (world_size - rank) for rank in range(world_size)],
        [40 + rank % 2 for rank in range(world_size)],
    )
    return kinds[seed % len(kinds)]


def every_dtype(dtypes: tuple[torch.dtype, ...], shape: tuple[int, ...] = (5,)) -> Iterator[Case]:
    """Each dtype with SUM, in turn as an asynchronous call."""
    for i, dtype in enumerate(dtypes):
        yield Case(dtype, ReduceOp.SUM, shape, async_op=i % 3 == 1, seed=i)
