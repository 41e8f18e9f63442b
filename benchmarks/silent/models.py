"""Tiny models of different families."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

VOCABULARY, LENGTH, WIDTH, HEADS, CLASSES, SIDE, NUMBERS = 32, 12, 16, 2, 6, 8, 12
NODES, EXPERTS = 8, 4


class CausalAttention(nn.Module):
    """Self-attention; `mask` says who sees whom."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.qkv, self.proj, self.drop = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(dropout)
        self.is_causal = True

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal)
        return self.drop(self.proj(y.transpose(1, 2).reshape(batch, length, width)))


class FeedForward(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.fc, self.out, self.drop = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.out(functional.gelu(self.fc(x))))


class SwitchExperts(nn.Module):
    """Each token goes to the expert that the router likes best; `imbalance` is the auxiliary loss."""

    imbalance: Tensor

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(FeedForward(dropout) for _ in range(EXPERTS))
        self.is_weighted = True

    def forward(self, x: Tensor) -> Tensor:
        probability = self.router(x).softmax(-1)
        chosen = functional.one_hot(probability.argmax(-1), EXPERTS)
        self.imbalance = EXPERTS * (chosen.float().mean((0, 1)) * probability.mean((0, 1))).sum()
        weight = chosen * probability if self.is_weighted else chosen
        every = torch.stack([expert(x) for expert in self.experts], -1)
        return (every * weight[..., None, :]).sum(-1)


class PreNormBlock(nn.Module):
    def __init__(self, dropout: float = 0.0, *, experts: bool = False) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn = CausalAttention(dropout)
        self.mlp: nn.Module = SwitchExperts(dropout) if experts else FeedForward(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class TinyTransformer(nn.Module):
    """A decoder over `[batch, LENGTH]` ids; `recompute` runs each block through a checkpoint."""

    def __init__(
        self,
        layers: int = 2,
        dropout: float = 0.0,
        *,
        tied: bool = False,
        experts: bool = False,
        recompute: bool = False,
    ) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(PreNormBlock(dropout, experts=experts) for _ in range(layers))
        self.ln_f, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.recompute = recompute
        nn.init.normal_(self.embed.weight, std=0.3)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.position(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        logits: Tensor = self.head(self.ln_f(x))
        return logits

    @property
    def imbalance(self) -> Tensor:
        """Mean over all blocks of how unevenly their experts were used."""
        return torch.stack([block.mlp.imbalance for block in self.blocks]).mean()  # type: ignore[union-attr]


class ConvNet(nn.Module):
    """Convolutions with batch norm over `[batch, 1, SIDE, SIDE]`."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.stem, self.bn1 = nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.body, self.bn2 = nn.Conv2d(8, 16, 3, 2, 1), nn.BatchNorm2d(16)
        self.drop, self.fc = nn.Dropout(dropout), nn.Linear(16, CLASSES)

    def features(self, x: Tensor) -> Tensor:
        x = self.bn1(self.stem(x)).relu()
        y: Tensor = self.bn2(self.body(x)).relu().mean((2, 3))
        return y

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.fc(self.drop(self.features(x)))
        return logits


class TinyLstm(nn.Module):
    """A recurrent model over `[batch, LENGTH]` ids."""

    def __init__(self, *, batch_first: bool = True) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(2 * WIDTH, VOCABULARY)
        self.lstm = nn.LSTM(WIDTH, 2 * WIDTH, batch_first=batch_first)
        nn.init.normal_(self.embed.weight, std=0.5)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.lstm(self.embed(ids))[0])
        return logits


class MixerLayer(nn.Module):
    def __init__(self, patches: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.across, self.within = nn.Linear(patches, patches), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + functional.gelu(self.across(self.ln_1(x).mT)).mT
        return x + functional.gelu(self.within(self.ln_2(x)))


class MixerNet(nn.Module):
    """An MLP-mixer over images in 2 × 2 patches."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Linear(4, WIDTH)
        self.layers = nn.Sequential(*(MixerLayer(SIDE * SIDE // 4) for _ in range(2)))
        self.ln_f, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        patches = functional.unfold(x, 2, stride=2).mT
        logits: Tensor = self.head(self.ln_f(self.layers(self.patch(patches))).mean(1))
        return logits


class TinyMlp(nn.Module):
    """A perceptron over `[batch, NUMBERS]`."""

    def __init__(self, outputs: int = CLASSES) -> None:
        super().__init__()
        self.fc1, self.fc2, self.out = nn.Linear(NUMBERS, 32), nn.Linear(32, 32), nn.Linear(32, outputs)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.out(functional.relu(self.fc2(functional.relu(self.fc1(x)))))
        return y


class MessagePassing(nn.Module):
    """A graph network over nodes `[batch, NODES, NUMBERS]` and edges `[batch, NODES, NODES]`; one number per graph."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.readout = nn.Linear(NUMBERS, WIDTH), nn.Linear(WIDTH, 1)
        self.rounds = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(2))
        self.pass_on: Callable[[Tensor], Tensor] = _normalised

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        x = self.encode(nodes)
        for turn in self.rounds:
            x = x + torch.tanh(turn(torch.cat([x, self.pass_on(edges) @ x], -1)))
        y: Tensor = self.readout(x).mean(1)
        return y


def _normalised(edges: Tensor) -> Tensor:
    return edges / edges.sum(-1, keepdim=True).clamp(min=1)
