"""What is trained: a GPT whose blocks are units, and a chain of units that compute next to nothing."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    """Attention and a feed-forward layer, each added to what came in."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        heads = self.qkv(self.norm1(x)).view(rows, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Shape:
    """A GPT, and the batch of ``rows`` times ``length`` words that a rank sees in a step."""

    words: int
    width: int
    blocks: int
    heads: int
    rows: int
    length: int


SHAPES = {
    "29M": Shape(words=8192, width=512, blocks=8, heads=8, rows=4, length=128),
    "91M": Shape(words=8192, width=768, blocks=12, heads=12, rows=2, length=256),
    "tiny": Shape(words=64, width=32, blocks=2, heads=2, rows=2, length=16),
}


class GPT(nn.Module):
    """Word ids (rows, length) in, the loss of predicting each one's successor out. The head is the embedding."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(shape.words, shape.width), nn.Embedding(shape.length, shape.width)
        self.blocks = nn.ModuleList(Block(shape.width, shape.heads) for _ in range(shape.blocks))
        self.norm = nn.LayerNorm(shape.width)
        for table in (self.words, self.places):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids) + self.places.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        scores = F.linear(self.norm(x), self.words.weight)
        return F.cross_entropy(scores[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class TinyUnit(nn.Module):
    """Computes so little that what surrounds it can be measured."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


class Chain(nn.Module):
    """Tiny units, one after another."""

    def __init__(self, units: int, width: int = 16) -> None:
        super().__init__()
        self.units = nn.Sequential(*(TinyUnit(width) for _ in range(units)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.units(x).sum()  # type: ignore[no-any-return]
