"""The model that is trained outside of Megatron: a GPT with a dense block and one of experts."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

VOCABULARY, WIDTH, LENGTH, BATCH = 31, 16, 8, 3

Change = Callable[[Tensor], Tensor]


def unchanged(x: Tensor) -> Tensor:
    """Return `x`: what stands where a fault may be put in."""
    return x


class Attention(nn.Module):
    """Causal attention; `own` is applied to a value of its own code."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.projection = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.own: Change = unchanged

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.transpose(-1, -2) / WIDTH**0.5 + mask
        mixed: Tensor = self.projection(self.own(scores.softmax(-1) @ v))
        return mixed


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.activation, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.activation(self.up(x)))
        return y


class Experts(nn.Module):
    """Two experts, mixed by a router."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(Mlp() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        shares = self.router(x).softmax(-1)
        mixed: Tensor = sum(shares[..., i, None] * expert(x) for i, expert in enumerate(self.experts))  # type: ignore[assignment]
        return mixed


class Block(nn.Module):
    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.norm1, self.attention, self.norm2, self.mlp = nn.LayerNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH), mlp
        self.dropout = nn.Dropout(0.1)
        self.own: Change = unchanged

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x), mask))
        return self.own(x + self.dropout(self.mlp(self.norm2(x))))


class Gpt(nn.Module):
    """Returns logits; `probe` looks at the embedded text, and nothing is made of what it says.

    Args:
        recompute: Blocks are computed again in the backward.
    """

    def __init__(self, *, recompute: bool = False) -> None:
        super().__init__()
        self.recompute = recompute
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.probe = nn.Identity()
        self.h = nn.ModuleList([Block(Mlp()), Block(Experts())])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.register_buffer("mask", torch.full((LENGTH, LENGTH), float("-inf")).triu(1))
        self.mask: Tensor
        self.register_buffer("places", torch.arange(LENGTH))
        self.places: Tensor

    def forward(self, tokens: Tensor, features: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(self.places) + features
        self.probe(x.detach())
        for block in self.h:
            x = checkpoint(block, x, self.mask, use_reentrant=False) if self.recompute else block(x, self.mask)
        logits: Tensor = self.head(self.norm(x))
        return logits
