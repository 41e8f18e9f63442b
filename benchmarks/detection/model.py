"""The models that are trained: small GPTs over bytes of text, with places in them at which something can be broken."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

LENGTH = 16
VOCABULARY = 128

Change = Callable[[Tensor], Tensor]


@dataclasses.dataclass(frozen=True, slots=True)
class Size:
    """Width and depth of a model, and its batch."""

    width: int
    layers: int
    batch: int


SIZES = {"small": Size(24, 2, 32), "large": Size(48, 4, 32)}


class Wire(nn.Module):
    """Passes a tensor on; a fault may change what passes, or the gradient on its way back."""

    change: Change | None = None
    change_gradient: Change | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.change(x) if self.change else x
        if self.change_gradient and x.requires_grad:
            x = x * 1.0
            x.register_hook(self.change_gradient)
        return x


class Router(nn.Module):
    """Sends each token to one of some experts."""

    def __init__(self, width: int, num_experts: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.choice = nn.Linear(width, num_experts)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        probability = self.choice(x).softmax(-1)
        return probability, probability.argmax(-1)


class Experts(nn.Module):
    """Some experts, one of which each token goes to; `imbalance` is the auxiliary loss of Switch Transformers."""

    imbalance: Tensor | float = 0.0

    def __init__(self, width: int, num_experts: int = 4) -> None:
        super().__init__()
        self.router = Router(width, num_experts)
        self.experts = nn.ModuleList(Mlp(width) for _ in range(num_experts))

    def forward(self, x: Tensor) -> Tensor:
        probability, index = self.router(x)
        every = torch.stack([expert(x) for expert in self.experts], -1)
        chosen = nn.functional.one_hot(index, len(self.experts))
        load = chosen.flatten(0, 1).float().mean(0)
        self.imbalance = len(self.experts) * (load * probability.flatten(0, 1).mean(0)).sum()
        return (every * (chosen * probability)[..., None, :]).sum(-1)


class Mlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc, self.act, self.out = nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.act(self.fc(x)))


class Block(nn.Module):
    def __init__(self, width: int, dropout: float, *, experts: bool) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj, self.drop = nn.Linear(width, 3 * width), nn.Linear(width, width), nn.Dropout(dropout)
        self.mlp: nn.Module = Experts(width) if experts else Mlp(width)
        self.wire = Wire()

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.ln_1(x)).view(batch, length, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.proj(y.transpose(1, 2).reshape(batch, length, width)))
        return self.wire(x + self.drop(self.mlp(self.ln_2(x)))).float()


class Gpt(nn.Module):
    """A GPT whose weights depend on the torch seed alone."""

    def __init__(self, size: Size, *, dropout: float = 0.0, experts: bool = False) -> None:
        super().__init__()
        width = size.width
        self.embed, self.position = nn.Embedding(VOCABULARY, width), nn.Embedding(LENGTH, width)
        self.h = nn.ModuleList(Block(width, dropout, experts=experts) for _ in range(size.layers))
        self.ln_f, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        self.register_buffer("places", torch.arange(LENGTH), persistent=False)

    @property
    def imbalance(self) -> Tensor | float:
        """How unevenly the experts were used in the last forward, over all blocks; 0 without experts."""
        return sum(getattr(block.mlp, "imbalance", 0.0) for block in self.h)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.position(self.places)
        for block in self.h:
            x = block(x)
        logits: Tensor = self.head(self.ln_f(x))
        return logits


class Text:
    """Batches of a text that every Python has; `seed` says which."""

    def __init__(self, seed: int, batch: int) -> None:
        raw = Path(argparse.__file__).read_bytes()
        self._text = torch.tensor(list(raw)).clamp(max=VOCABULARY - 1)
        self._generator = torch.Generator().manual_seed(seed)
        self._batch = batch

    def draw(self) -> tuple[Tensor, Tensor]:
        """Return inputs and targets, each `[batch, LENGTH]`."""
        starts = torch.randint(len(self._text) - LENGTH - 1, (self._batch,), generator=self._generator)
        rows = self._text[starts[:, None] + torch.arange(LENGTH + 1)]
        return rows[:, :-1], rows[:, 1:]

    def noise(self) -> tuple[Tensor, Tensor]:
        """Return inputs and targets that have nothing to do with each other, nor with the text."""
        drawn = torch.randint(VOCABULARY, (2, self._batch, LENGTH), generator=self._generator)
        return drawn[0], drawn[1]

    def outlier(self) -> tuple[Tensor, Tensor]:
        """Return a batch as training data have them now and then: a quarter of it is another kind of text."""
        inputs, targets = self.draw()
        strange, rest = self.noise()
        few = self._batch // 4
        return torch.cat((inputs[few:], strange[:few])), torch.cat((targets[few:], rest[:few]))
