"""Models that people use: GPT-2 with tied weights, Llama with rotary buffers, a convolutional net with BatchNorm."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from collectives import Communicator
from fsdp import DistributedDataParallel, fully_shard, summon_full_params
from tests.fsdp.models import difference, filled, full_state
from tests.ranks import Run, run_ranks, world_sizes

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed: pip install -e .[test]"
)
STEPS, VOCABULARY = 5, 40
MODELS = ["gpt2", "llama", "resnet"]


FULL = {("gloo", 2), ("mpi", 3)}
PLACES = [
    pytest.param(
        b, n, marks=() if b == "threads" and n == 2 else pytest.mark.full if (b, n) in FULL else pytest.mark.exhaustive
    )
    for b in ("threads", "gloo", "mpi", "ring+gloo", "shm+gloo")
    for n in (1, 2, 3, 4)
]


def build(kind: str, seed: int = 0) -> Any:
    import transformers  # here, and not while tests are collected: it takes seconds

    if kind == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=VOCABULARY, n_positions=24, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )  # fmt: skip
        model: nn.Module = transformers.GPT2LMHeadModel(config)
    elif kind == "llama":
        config = transformers.LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=24, bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
        model = transformers.LlamaForCausalLM(config)
    else:
        model = ResNet()
    tables = {name: b.clone() for name, b in model.named_buffers()}
    filled(model, seed, torch.float64)
    for name, buffer in model.named_buffers():  # what comes from the configuration keeps its dtype
        if buffer.is_floating_point() and "inv_freq" in name:
            module, _, last = name.rpartition(".")
            setattr(model.get_submodule(module), last, tables[name])
    return model


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(x + self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3, bias=False)
        self.blocks = nn.Sequential(Residual(4), Residual(4))
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


def units_of(kind: str) -> list[type[nn.Module]]:
    if kind == "gpt2":
        from transformers.models.gpt2.modeling_gpt2 import GPT2Block

        return [GPT2Block]
    if kind == "llama":
        from transformers.models.llama.modeling_llama import LlamaDecoderLayer

        return [LlamaDecoderLayer]
    return [Residual]


def loss_on(kind: str, model: nn.Module, rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(31 * step + rank)
    if kind == "resnet":
        images = torch.randn(4, 1, 8, 8, generator=generator, dtype=torch.float64)
        return F.cross_entropy(model(images), torch.randint(0, 3, (4,), generator=generator))
    words = torch.randint(0, VOCABULARY, (2, 9), generator=generator)
    return model(input_ids=words, labels=words).loss  # type: ignore[no-any-return]


def wrap(kind: str, model: nn.Module, comm: Communicator, strategy: str | int) -> nn.Module:
    if strategy == "ddp":
        return DistributedDataParallel(model, comm)
    return fully_shard(model, comm, stage=int(strategy), units=units_of(kind))


def five_steps(comm: Communicator, kind: str, strategy: str | int) -> tuple[dict[str, torch.Tensor], list[float]]:
    model = wrap(kind, build(kind, comm.rank), comm, strategy)
    optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(STEPS):
        optim.zero_grad()
        loss = loss_on(kind, model, comm.rank, step)
        loss.backward()
        optim.step()
        losses.append(float(loss.detach()))
    return full_state(model), losses


def one_process(kind: str, world_size: int) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Every rank's batch in turn; buffers that a batch changes are rank 0's, as the ranks see them."""
    model = build(kind)
    optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(STEPS):
        optim.zero_grad()
        total = 0.0
        start = {name: b.clone() for name, b in model.named_buffers()}
        first: dict[str, torch.Tensor] = {}
        for rank in range(world_size):
            for name, buffer in model.named_buffers():
                buffer.copy_(start[name])
            loss = loss_on(kind, model, rank, step)
            loss.backward()
            total += float(loss.detach())
            first = first or {name: b.clone() for name, b in model.named_buffers()}
        for name, buffer in model.named_buffers():
            buffer.copy_(first[name])
        for p in model.parameters():
            if p.grad is not None:
                p.grad.div_(world_size)  # as the ranks do: parts of these models compute in float32 and show any ulp
        optim.step()
        losses.append(total / world_size)
    return dict(model.state_dict()), losses


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("strategy", ["ddp", pytest.param(0, marks=pytest.mark.full), 1, 2, 3])
@pytest.mark.parametrize(("backend", "world_size"), PLACES)
def test_five_steps_equal_one_process(backend: str, world_size: int, strategy: str | int, kind: str) -> None:
    expected, losses = one_process(kind, world_size)
    results = run_ranks(five_steps, kind, strategy, world_size=world_size, backend=backend, timeout=120.0)
    assert difference(results[0][0], expected) < 1e-9
    for step in range(STEPS):
        mean = sum(found[step] for _, found in results) / world_size
        assert mean == pytest.approx(losses[step], rel=1e-10)


def generate(model: Any, rank: int) -> list[int]:
    """3 more tokens on rank 0, 5 on rank 1, and so on."""
    start = torch.tensor([[1 + rank, 7]])
    found = model.generate(
        start, attention_mask=torch.ones_like(start), max_new_tokens=3 + 2 * rank, min_new_tokens=3 + 2 * rank,
        do_sample=False, pad_token_id=0,
    )  # fmt: skip
    return found[0].tolist()  # type: ignore[no-any-return]


def generated(comm: Communicator, kind: str, stage: int, how: str) -> list[int]:
    model = fully_shard(build(kind, comm.rank).eval(), comm, stage=stage, units=units_of(kind))
    if how == "whole":
        with summon_full_params(model, writeback=False), torch.no_grad():
            return generate(model, comm.rank)
    from fsdp import synced_forwards

    with synced_forwards(model), torch.no_grad():
        return generate(model, comm.rank)


@pytest.mark.parametrize("how", ["whole", "synced"])
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@world_sizes(3)
def test_f23_generate_with_different_lengths(run: Run, world_size: int, kind: str, stage: int, how: str) -> None:
    expected = [generate(build(kind).eval(), rank) for rank in range(world_size)]
    assert run(generated, kind, stage, how, n=world_size) == expected
