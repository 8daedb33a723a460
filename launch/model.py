"""A small GPT over bytes: pre-norm blocks, rotary positions, no biases in its matrices."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

VOCABULARY = 256
ROTARY_BASE = 1000.0  # the usual 10,000 is for longer contexts than a laptop trains


@dataclass(frozen=True)
class GPTConfig:
    """``context`` is the longest sequence in bytes; ``width`` is an even multiple of ``heads``."""

    layers: int = 4
    width: int = 128
    heads: int = 4
    context: int = 128

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "context"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, found {getattr(self, name)}")
        if self.width % (2 * self.heads):
            raise ValueError(
                f"width: expected an even number for each of {self.heads} heads, found {self.width} in all; "
                f"{2 * self.heads * max(1, self.width // (2 * self.heads))} would do"
            )


def rotary_angles(context: int, head_width: int) -> torch.Tensor:
    """Cosines and sines for every position, float32 (2, context, head_width / 2) (Su et al., RoFormer, 2021)."""
    frequencies = ROTARY_BASE ** -(torch.arange(0, head_width, 2) / head_width)
    angles = torch.arange(context)[:, None] * frequencies
    return torch.stack([angles.cos(), angles.sin()])


def rotate(heads: torch.Tensor, rotary: torch.Tensor) -> torch.Tensor:
    """Turn pairs of ``heads``, (..., time, head_width), by their position's angles."""
    cos, sin = rotary
    a, b = heads.chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


class Block(nn.Module):
    """Attention, then a two-layer perceptron, each added to its input: (batch, time, width) to the same."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.norm1 = nn.LayerNorm(config.width)
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)
        self.norm2 = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, 4 * config.width, bias=False)
        self.down = nn.Linear(4 * config.width, config.width, bias=False)

    def forward(self, x: torch.Tensor, rotary: torch.Tensor) -> torch.Tensor:
        batch, time, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, time, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        query, key = rotate(qkv[:2], rotary)
        attended = F.scaled_dot_product_attention(query, key, qkv[2], is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, time, width))
        added: torch.Tensor = self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))
        return x + added


class GPT(nn.Module):
    """Bytes, int64 (batch, time), to the next byte's logits, (batch, time, 256)."""

    rotary: torch.Tensor

    def __init__(self, config: GPTConfig, *, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(VOCABULARY, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, VOCABULARY, bias=False)
        self.register_buffer("rotary", rotary_angles(config.context, config.width // config.heads), persistent=False)
        self._initialize(torch.Generator().manual_seed(seed))

    @torch.no_grad()
    def _initialize(self, generator: torch.Generator) -> None:
        """From its own generator: ranks may be threads of one process, which share the global one."""
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                scale = 0.02
                if name.endswith(("out.weight", "down.weight")):  # each block adds two of these to its input
                    scale /= (2 * self.config.layers) ** 0.5
                parameter.normal_(0, scale, generator=generator)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        rotary = self.rotary[:, : tokens.shape[1]]
        for block in self.blocks:
            x = block(x, rotary)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


@torch.no_grad()
def generate(model: nn.Module, prompt: bytes, length: int, *, context: int, seed: int, device: torch.device) -> bytes:
    """``prompt`` continued by ``length`` bytes drawn from ``model``, a GPT or a wrapped one.

    Every rank of a sharded model must call it, and draws the same bytes: the generator runs on the CPU with one seed.
    """
    generator = torch.Generator().manual_seed(seed)
    text = list(prompt)
    for _ in range(length):
        logits = model(torch.tensor([text[-context:]], device=device))[0, -1].float().cpu()
        text.append(int(torch.multinomial((logits / 0.8).softmax(0), 1, generator=generator)))
    return bytes(text)
