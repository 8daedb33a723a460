"""What is cast and what never is; autocast; the scaler's one decision; offload where there is nothing to offload to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from collectives import Communicator
from fsdp import CPUOffloadPolicy, DistributedDataParallel, MixedPrecisionPolicy, fully_shard, summon_full_params
from fsdp.unit import unit_of
from tests.fsdp.models import (
    OddBlock,
    OddNet,
    adamw,
    difference,
    filled,
    full_state,
    loss_of,
    reference,
    same_bits,
    train,
    words,
)  # fmt: skip
from tests.ranks import Run, grid, run_ranks, world_sizes

stages = pytest.mark.parametrize("stage", [1, pytest.param(2, marks=pytest.mark.full), 3])
BF16 = torch.bfloat16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("mean", torch.ones(4))
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("rotary", torch.full((4,), 1 / 3), persistent=False)
        self.seen: dict[str, str] = {}

    def forward(self, x: torch.Tensor, index: torch.Tensor, *, mask: torch.Tensor) -> dict[str, torch.Tensor]:
        tensors = {"x": x, "index": index, "mask": mask, "weight": self.weight, **dict(self.named_buffers())}
        self.seen = {name: str(t.dtype).removeprefix("torch.") for name, t in tensors.items()}
        return {"y": self.weight * x + mask, "index": index}


def cast(comm: Communicator, stage: int | str, policy: MixedPrecisionPolicy) -> dict[str, str]:
    if stage == "ddp":
        model: Any = DistributedDataParallel(Block(), comm, mp_policy=policy)
        block = model.module
    else:
        model = block = fully_shard(Block(), comm, stage=int(stage), mp_policy=policy)
    out = model(torch.ones(4, requires_grad=True), torch.arange(4), mask=torch.zeros(4))
    out["y"].float().sum().backward()
    seen = {**block.seen, "y": str(out["y"].dtype).removeprefix("torch."), "out": str(out["index"].dtype)}
    assert all(p.dtype == torch.float32 and p.grad.dtype == torch.float32 for p in model.parameters())
    return seen


@pytest.mark.parametrize("stage", ["ddp", 0, 1, pytest.param(2, marks=pytest.mark.full), 3])
@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (MixedPrecisionPolicy(), {}),
        (MixedPrecisionPolicy(param_dtype=BF16), {"x": "bfloat16", "mask": "bfloat16", "weight": "bfloat16",
                                                  "y": "bfloat16"}),
        (MixedPrecisionPolicy(param_dtype=BF16, cast_forward_inputs=False), {"weight": "bfloat16"}),
        (MixedPrecisionPolicy(output_dtype=torch.float64), {"y": "float64"}),
        (MixedPrecisionPolicy(param_dtype=BF16, output_dtype=torch.float32),
         {"x": "bfloat16", "mask": "bfloat16", "weight": "bfloat16"}),
        (MixedPrecisionPolicy(buffer_dtype=BF16), {"mean": "bfloat16"}),
    ],
    ids=["nothing", "param", "no inputs", "output", "param and output", "buffer"],
)  # fmt: skip
@world_sizes(2)
def test_param_reduce_dtype_casts_what_it_says(
    run: Run, world_size: int, stage: int | str, policy: MixedPrecisionPolicy, expected: Any
) -> None:
    usual = {
        "x": "float32", "index": "int64", "mask": "float32", "weight": "float32", "mean": "float32", "count": "int64",
        "rotary": "float32", "y": "float32", "out": "torch.int64",
    }  # fmt: skip
    for seen in run(cast, stage, policy, n=world_size):
        assert seen == {**usual, **expected}


class Recomputed(OddNet):
    """Blocks run under checkpointing, and the first one also without gradients before that."""

    reentrant: bool | None = None

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        x = F.embedding(batch, self.embedding)
        with torch.no_grad():
            self.blocks[0](x)
        for block in self.blocks:
            plain = self.reentrant is None or not torch.is_grad_enabled()
            x = block(x) if plain else checkpoint(block, x, use_reentrant=self.reentrant)
        return F.linear(x, self.head)


def lowered(comm: Communicator, stage: int | str, units: bool, reentrant: bool | None) -> Any:
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32)
    inner = filled(Recomputed(2), comm.rank, torch.float32)
    inner.reentrant = reentrant
    held = dict(inner.named_parameters())
    if stage == "ddp":
        model: Any = DistributedDataParallel(inner, comm, mp_policy=policy)
    else:
        model = fully_shard(inner, comm, stage=int(stage), units=[OddBlock] if units else None, mp_policy=policy)
    state, losses = train(comm, model, 3, adamw)
    with torch.no_grad():
        model(words(comm.rank, 0))
    assert all(held[name] is p for name, p in inner.named_parameters())
    assert all(not group._copies._tensors for group in unit_of(model).runtime.groups if group._copies is not None)
    return {name.removeprefix("module."): value for name, value in state.items()}, losses


@pytest.mark.parametrize("reentrant", [None, True, False], ids=["plain", "reentrant", "non-reentrant"])
@pytest.mark.parametrize("units", [False, True], ids=["whole", "units"])
@world_sizes(2)
def test_param_dtype_gives_the_same_bits_at_every_stage(
    run: Run, world_size: int, units: bool, reentrant: bool | None
) -> None:
    expected, losses = run(lowered, 1, units, None, n=world_size)[0]
    for stage in ("ddp", 0, 1, 3):
        state, found = run(lowered, stage, units, reentrant, n=world_size)[0]
        assert found == losses, stage
        assert all(value.dtype == torch.float32 for value in state.values())
        assert same_bits(state, expected), stage


class Scale(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(3, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w * x


def half(comm: Communicator, stage: int, value: float, reduce_dtype: torch.dtype | None) -> list[float]:
    model = fully_shard(Scale(torch.float16), comm, stage=stage, mp_policy=MixedPrecisionPolicy(None, reduce_dtype))
    model(torch.full((3,), value, dtype=torch.float16)).sum().backward()
    with summon_full_params(model, with_grads=True):
        return model.w.grad.tolist()


@grid(world_sizes=(4, 2, 3), threads=(), full=lambda backend, n: backend != "threads" or n != 4)
@pytest.mark.parametrize("reduce_dtype", [None, torch.float32])
@pytest.mark.parametrize("value", [30000.0, 2.0**-24])
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_f21_half_precision_neither_overflows_nor_vanishes(
    backend: str, world_size: int, stage: int, value: float, reduce_dtype: torch.dtype | None
) -> None:
    """Sums are in float32 and divided before they are rounded, also where float16 travels."""
    for grad in run_ranks(half, stage, value, reduce_dtype, world_size=world_size, backend=backend):
        assert grad == [value] * 3


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6))
        self.norm = nn.LayerNorm(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.layers(x))


def mlp() -> nn.Module:
    return filled(nn.Sequential(Mlp(), Mlp(), nn.Linear(6, 1)), dtype=torch.float32)


def rows(rank: int, step: int) -> torch.Tensor:
    return torch.sin(torch.arange(24.0).view(4, 6) + rank + 7 * step)


def under_autocast(comm: Communicator | None, stage: int, world_size: int, scaling: bool) -> Any:
    model = mlp()
    if comm is not None:
        fully_shard(model, comm, stage=stage, units=[Mlp])
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0, enabled=scaling)
    scales = []
    for step in range(4):
        optim.zero_grad()
        for rank in range(world_size) if comm is None else [comm.rank]:
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.mse_loss(model(rows(rank, step)).float(), torch.ones(4, 1))
            if scaling and step == 2 and rank == world_size - 1:
                loss = loss * float("inf")
            scaler.scale(loss / (world_size if comm is None else 1)).backward()
        scaler.step(optim)
        scaler.update()
        scales.append(scaler.get_scale())
    return (full_state(model) if comm is not None else model.state_dict()), scales


@pytest.mark.parametrize("scaling", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@world_sizes(3)
def test_autocast_and_grad_scaler_equal_one_process(run: Run, world_size: int, stage: int, scaling: bool) -> None:
    expected, scales = under_autocast(None, stage, world_size, scaling)
    assert not scaling or scales == [16.0, 16.0, 8.0, 8.0]
    for state, found in run(under_autocast, stage, world_size, scaling, n=world_size):
        assert found == scales
        assert difference(state, expected) < 2e-3  # bfloat16 gradients
        assert all(bool(value.isfinite().all()) for value in state.values())


def offloaded(comm: Communicator, stage: int, pin: bool) -> float:
    model = fully_shard(
        filled(OddNet(2), comm.rank), comm, stage=stage, units=[OddBlock], offload_policy=CPUOffloadPolicy(pin)
    )
    assert all(p.device.type == "cpu" for p in model.parameters())
    return difference(train(comm, model, 3, adamw)[0], reference(filled(OddNet(2)), comm.world_size, 3, adamw)[0])


@pytest.mark.parametrize("stage", [0, 1, 3])
@world_sizes(2)
def test_cpu_offload(run: Run, world_size: int, stage: int) -> None:
    assert max(run(offloaded, stage, True, n=world_size)) < 1e-10


def reduced_low(comm: Communicator, stage: int) -> tuple[int, bool]:
    """Gradients travel in the reduction's dtype, and arrive in the parameter's."""
    model = fully_shard(
        filled(OddNet(1), dtype=torch.float32), comm, stage=stage, mp_policy=MixedPrecisionPolicy(reduce_dtype=BF16)
    )
    name = "reduce_scatter" if stage else "all_reduce"
    before = comm.stats().operations.get(name)
    sent = before.sent_bytes if before else 0
    loss_of(model, words(comm.rank, 0)).backward()
    grads = [p.grad for p in model.parameters()]
    return comm.stats().operations[name].sent_bytes - sent, all(g.dtype == torch.float32 for g in grads)


@pytest.mark.parametrize("stage", [1, 3])
def test_reduce_dtype_halves_the_bytes(run: Run, stage: int) -> None:
    elements = sum(-(-p.numel() // 16) * 16 for p in OddNet(1).parameters())
    for sent, wide in run(reduced_low, stage):
        assert wide
        assert 2 * elements / 2 <= sent <= 2 * (elements / 2 + 16)
