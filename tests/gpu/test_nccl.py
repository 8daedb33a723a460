"""NCCL, where there are GPUs: one GPU a rank, so a machine with one runs worlds of one."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from collectives import Communicator, ReduceOp
from tests import reference
from tests.collectives import seam
from tests.ranks import run_ranks

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
pytestmark = pytest.mark.skipif(
    GPUS == 0 or not dist.is_nccl_available(), reason="needs an NVIDIA GPU and a torch that was built with NCCL"
)
WORLD_SIZES = [pytest.param(n, marks=pytest.mark.skipif(n > GPUS, reason=f"needs {n} GPUs")) for n in (1, 2, 3, 4)]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_laws_of_the_transport(world_size: int) -> None:
    run_ranks(seam.all_laws, world_size=world_size, backend="nccl", timeout=120.0)


def law_collectives(comm: Communicator) -> None:
    """On a GPU tensor, and on one of the host, which is staged."""
    for device in (comm.device, torch.device("cpu")):
        for dtype in reference.DTYPES:
            inputs = [reference.data(rank, (7, 15), dtype) for rank in range(comm.world_size)]
            for op in (ReduceOp.SUM, ReduceOp.MAX):
                tensor = inputs[comm.rank].to(device)
                comm.all_reduce(tensor, op, async_op=True).wait()
                assert torch.equal(tensor.cpu(), reference.all_reduce(inputs, op)), (device, dtype, op)
            output = torch.zeros(comm.world_size * 105, dtype=dtype, device=device)
            comm.all_gather(output, inputs[comm.rank].to(device).flatten())
            assert torch.equal(output.cpu(), reference.all_gather(inputs))


def law_order_of_streams(comm: Communicator) -> None:
    """What is queued before a call is in its input, and what is queued after ``wait`` sees its result."""
    tensor = torch.zeros(2**22, device=comm.device)
    for _ in range(20):
        tensor.add_(1.0)
    work = comm.all_reduce(tensor, async_op=True)
    work.wait()
    assert torch.equal((tensor * 2).cpu(), torch.full((2**22,), 40.0 * comm.world_size))


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_collectives(world_size: int) -> None:
    run_ranks(law_collectives, world_size=world_size, backend="nccl", timeout=120.0)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_order_of_streams(world_size: int) -> None:
    run_ranks(law_order_of_streams, world_size=world_size, backend="nccl", timeout=120.0)
