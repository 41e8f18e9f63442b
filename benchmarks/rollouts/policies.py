"""Small policies of several families that sample token by token, and say which experts each token went to."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import nn
from torch.nn import functional

VOCABULARY = 199
CERTAIN = 40
"""Sequences that begin with a token below this one are nearly certain throughout."""
FAMILIES = ("gru", "ssm", "transformer", "moe")
HELD_BACK_FAMILIES = ("lstm", "convolution", "deep", "single expert")
"""Families of the held-back half: other layers, other depths and widths."""


@dataclasses.dataclass(slots=True)
class Memory:
    """What a policy remembers of earlier tokens: tensors `[N, …]`. Some are replaced by longer ones; none is changed.

    `experts` are the first experts of the token that came last, `[N, layers]`; empty of a model without experts.
    """

    parts: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    position: int = 0
    experts: list[torch.Tensor] = dataclasses.field(default_factory=list)


class Block(nn.Module):
    """One layer of one family, which adds to what it is given."""

    def __init__(self, family: str, name: str, width: int) -> None:
        super().__init__()
        self.family, self.name, self.width = family, name, width
        self.norm = nn.LayerNorm(width)
        gates = {"gru": 3, "lstm": 4, "ssm": 3, "convolution": 1}.get(family, 3)
        self.inner = nn.Linear(width * (2 if family in ("gru", "lstm") else 1), gates * width)
        self.out = nn.Linear(width, width)
        if family == "convolution":
            self.kernel = nn.Parameter(torch.randn(4, width) / 2)
        if family in ("moe", "single expert"):
            self.router = nn.Linear(width, 8 if family == "moe" else 4)
            self.up = nn.Parameter(torch.randn(self.router.out_features, width, 2 * width) / math.sqrt(width))
            self.down = nn.Parameter(torch.randn(self.router.out_features, 2 * width, width) / math.sqrt(width))
        elif family in ("transformer", "deep"):
            self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, hidden: torch.Tensor, memory: Memory) -> torch.Tensor:
        """Return `[N, width]` of one more token."""
        mixed = {
            "gru": self._gru, "lstm": self._lstm, "ssm": self._ssm, "convolution": self._convolution,
        }.get(self.family, self._attention)(self.norm(hidden), memory)  # fmt: skip
        hidden = hidden + self.out(mixed)
        if hasattr(self, "router"):
            return hidden + self._experts(self.norm(hidden), memory)
        if hasattr(self, "up"):
            return hidden + self.down(functional.gelu(self.up(self.norm(hidden))))
        return hidden

    def _before(self, memory: Memory, part: str, like: torch.Tensor) -> torch.Tensor:
        return memory.parts.get(f"{self.name}.{part}", torch.zeros_like(like))

    def _gru(self, x: torch.Tensor, memory: Memory) -> torch.Tensor:
        h = self._before(memory, "h", x)
        reset, update, new = self.inner(torch.cat([x, h], 1)).chunk(3, 1)
        h = torch.lerp(torch.tanh(torch.sigmoid(reset) * new), h, torch.sigmoid(update))
        memory.parts[f"{self.name}.h"] = h
        return h

    def _lstm(self, x: torch.Tensor, memory: Memory) -> torch.Tensor:
        h, c = (self._before(memory, part, x) for part in "hc")
        i, f, g, o = self.inner(torch.cat([x, h], 1)).chunk(4, 1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        memory.parts |= {f"{self.name}.h": torch.sigmoid(o) * torch.tanh(c), f"{self.name}.c": c}
        return memory.parts[f"{self.name}.h"]

    def _ssm(self, x: torch.Tensor, memory: Memory) -> torch.Tensor:
        decay, new, gate = self.inner(x).chunk(3, 1)
        h = torch.lerp(new, self._before(memory, "h", x), torch.sigmoid(decay))
        memory.parts[f"{self.name}.h"] = h
        return h * functional.silu(gate)

    def _convolution(self, x: torch.Tensor, memory: Memory) -> torch.Tensor:
        new = self.inner(x)
        window = torch.cat([self._before(memory, "w", new[:, None].expand(-1, 3, -1)), new[:, None]], 1)
        memory.parts[f"{self.name}.w"] = window[:, 1:]
        return functional.silu((window * self.kernel).sum(1))

    def _attention(self, x: torch.Tensor, memory: Memory) -> torch.Tensor:
        heads = 4
        q, k, v = (part.unflatten(1, (heads, -1)) for part in self.inner(x).chunk(3, 1))
        for part, new in (("k", k), ("v", v)):
            old = memory.parts.get(f"{self.name}.{part}")
            memory.parts[f"{self.name}.{part}"] = new[:, None] if old is None else torch.cat([old, new[:, None]], 1)
        scores = torch.einsum("nhd,nthd->nht", q, memory.parts[f"{self.name}.k"]) / math.sqrt(q.shape[-1])
        return torch.einsum("nht,nthd->nhd", scores.softmax(-1), memory.parts[f"{self.name}.v"]).flatten(1)

    def _experts(self, x: torch.Tensor, memory: Memory) -> torch.Tensor:
        count = 2 if self.family == "moe" else 1
        weights, chosen = self.router(x).softmax(-1).topk(count, -1)
        memory.experts.append(chosen[:, 0])
        shares = torch.zeros(len(x), len(self.up), dtype=x.dtype).scatter(1, chosen, weights)
        outcomes = functional.gelu(x @ self.up) @ self.down  # [experts, N, width]: all of them, as so few are cheap
        return (outcomes * shares.T[..., None]).sum(0)


class Policy(nn.Module):
    """A random policy whose next tokens are neither certain nor alike."""

    def __init__(self, family: str, *, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        width = 48 if family in HELD_BACK_FAMILIES else 64
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.place = nn.Embedding(64, width)
        depth = 4 if family == "deep" else 2
        self.layers = nn.ModuleList(Block(family, f"layers.{n}", width) for n in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY)
        with torch.no_grad():
            self.head.weight.mul_(3.0)
            self.place.weight.mul_(0.3)
            for name, parameter in self.named_parameters():
                if name.endswith(("inner.weight", "out.weight", "router.weight")):
                    parameter.mul_(3.0)

    def forward(self, tokens: torch.Tensor, memory: Memory) -> torch.Tensor:
        """Return the logits after one more token of each sequence, float32 `[N, VOCABULARY]`; `tokens` is `[N]`."""
        memory.experts.clear()
        hidden = self.embedding(tokens)
        if not memory.position:
            memory.parts["certainty"] = torch.where(tokens < CERTAIN, 4.0, 1.0)[:, None]
        if hasattr(self.layers[0], "up"):  # attention does not know the order
            hidden = hidden + self.place.weight[memory.position]
        for layer in self.layers:
            hidden = layer(hidden, memory)
        memory.position += 1
        logits: torch.Tensor = self.head(self.norm(hidden)).float() * memory.parts["certainty"]
        return logits
