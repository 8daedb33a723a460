"""torch.compile of blocks, before or after they are wrapped, and of DDP."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from collectives import Communicator
from fsdp import DistributedDataParallel, fully_shard
from tests.fsdp.models import OddBlock, OddNet, adamw, difference, filled, full_state, loss_of, reference, train, words
from tests.ranks import PROCESSES, run_ranks, world_sizes

compilers = pytest.mark.parametrize("compiler", ["eager", pytest.param("aot_eager", marks=pytest.mark.full)])


def compiled_blocks(comm: Communicator, stage: int, compiler: str, before: bool) -> float:
    torch._dynamo.reset()
    model = filled(OddNet(2), comm.rank)
    if before:
        for block in model.blocks:
            block.compile(backend=compiler)
    fully_shard(model, comm, stage=stage, units=[OddBlock])
    if not before:
        for block in model.blocks:
            block.compile(backend=compiler)
    state, _ = train(comm, model, 3, adamw)
    return difference(state, reference(filled(OddNet(2)), comm.world_size, 3, adamw)[0])


@compilers
@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("stage", [1, 3])
@PROCESSES
@world_sizes(2)
def test_torch_compile_of_blocks(backend: str, world_size: int, stage: int, before: bool, compiler: str) -> None:
    found = run_ranks(compiled_blocks, stage, compiler, before, world_size=world_size, backend=backend, timeout=120.0)
    assert max(found) < 1e-10


def compiled_ddp(comm: Communicator, compiler: str) -> float:
    torch._dynamo.reset()
    model: Any = torch.compile(DistributedDataParallel(filled(OddNet(2), comm.rank), comm), backend=compiler)
    optim = adamw(model.parameters())
    for step in range(3):
        optim.zero_grad()
        loss_of(model, words(comm.rank, step)).backward()
        optim.step()
    return difference(full_state(model._orig_mod), reference(filled(OddNet(2)), comm.world_size, 3, adamw)[0])


@compilers
@PROCESSES
@world_sizes(2)
def test_torch_compile_of_ddp(backend: str, world_size: int, compiler: str) -> None:
    assert max(run_ranks(compiled_ddp, compiler, world_size=world_size, backend=backend, timeout=120.0)) < 1e-10


def block_graphs(comm: Communicator) -> None:
    """The compiled part of a block is one graph: compiling with fullgraph does not raise."""
    torch._dynamo.reset()
    model = filled(OddNet(2), comm.rank)
    for block in model.blocks:
        block.forward = torch.compile(block.forward, backend="eager", fullgraph=True)
    fully_shard(model, comm, units=[OddBlock])
    for step in range(2):
        loss_of(model, words(comm.rank, step)).backward()


@PROCESSES
@world_sizes(2)
def test_graph_breaks_only_at_unit_borders(backend: str, world_size: int) -> None:
    run_ranks(block_graphs, world_size=world_size, backend=backend, timeout=120.0)
