"""Small models on which no constant of the checker was chosen, and one sound step of any model in any precision."""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional

from benchmarks.checks.recorded import dumped
from benchmarks.families.catalogue import FAMILIES
from benchmarks.families.family import Batch, Family
from trainermon.accuracy.judge import Status
from trainermon.analysis.check.checking import check_dump

ROWS, TOKENS, WIDTH, WORDS = 16, 12, 32, 40
SCALE = 4096.0
PRECISIONS = ("fp32", "bf16", "fp16", "fp16 scaled", "autocast bf16", "autocast fp16", "autocast fp16 scaled")
_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class SoundStep(NamedTuple):
    """What was said of the calls of one sound step.

    Attributes:
        family: The model.
        precision: One of `PRECISIONS`.
        counts: Calls by direction (whether it is a backward) and verdict; empty if torch cannot run it.
        errors: The calls that are said to be wrong, with the reasons.
    """

    family: str
    precision: str
    counts: Counter[tuple[bool, str]]
    errors: tuple[str, ...]


def sound_steps(name: str) -> list[SoundStep]:
    """Return the result of one sound step of a family in each precision."""
    family = {**FAMILIES, **{one.name: one for one in HELD_BACK}}[name]
    return [_sound_step(family, precision) for precision in PRECISIONS]


def _sound_step(family: Family, precision: str) -> SoundStep:
    words = precision.split()
    is_autocast, dtype = words[0] == "autocast", next(_TYPES[word] for word in words if word in _TYPES)
    torch.manual_seed(0)
    model, batch = family.build(), family.draw(Generator().manual_seed(0))
    if not is_autocast:
        model = model.to(dtype)
        batch = {key: value.to(dtype) if value.is_floating_point() else value for key, value in batch.items()}

    def step() -> None:
        with torch.autocast("cpu", dtype, enabled=is_autocast):
            loss = family.loss(model, batch)
        (loss * (SCALE if "scaled" in words else 1.0)).backward()

    try:
        step()
    except (RuntimeError, NotImplementedError):
        return SoundStep(family.name, precision, Counter(), ())
    with tempfile.TemporaryDirectory() as folder:
        check = check_dump(dumped(Path(folder), step))
    counts = Counter((call.is_backward, call.status.value) for call in check.calls)
    errors = tuple(f"{call.key}: {call.reason}" for call in check.of(Status.ERROR))
    return SoundStep(family.name, precision, counts, errors)


def _sequences(generator: Generator) -> Batch:
    words = torch.randint(WORDS, (ROWS, TOKENS), generator=generator)
    return {"words": words, "labels": words.roll(-1, 1)}


def _numbers(generator: Generator) -> Batch:
    x = torch.randn(ROWS, TOKENS, WIDTH, generator=generator)
    return {"x": x, "targets": x.cumsum(1).tanh()}


class _LinearAttention(nn.Module):
    """Attention without softmax: running sums of keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.project = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        query, key, value = self.project(self.embed(words)).chunk(3, -1)
        query, key = functional.elu(query) + 1, functional.elu(key) + 1
        state = torch.einsum("btd,bte->btde", key, value).cumsum(1)
        total = torch.einsum("btd,btd->bt", query, key.cumsum(1)) + 1e-3
        return self.head(self.norm(torch.einsum("btd,btde->bte", query, state) / total[..., None]))  # type: ignore[no-any-return]


class _Highway(nn.Module):
    """Gated convolutions over time, with weight norm."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.convolutions = nn.ModuleList(
            nn.utils.parametrizations.weight_norm(nn.Conv1d(WIDTH, 2 * WIDTH, 3, padding=2)) for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.embed(words).mT
        for convolution in self.convolutions:
            hidden = hidden + functional.glu(convolution(hidden)[..., :TOKENS], 1)
        return self.head(hidden.mT)  # type: ignore[no-any-return]


class _Encoder(nn.Module):
    """Torch's own encoder with dropout, and a causal mask."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 64, 0.1, "gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.full((TOKENS, TOKENS), float("-inf"), dtype=x.dtype).triu(1)
        return self.head(self.encoder(x, mask))  # type: ignore[no-any-return]


class _Mixer(nn.Module):
    """An MLP over tokens and one over channels, with dropout of channels."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.tokens = nn.Sequential(nn.Linear(TOKENS, 24), nn.Mish(), nn.Linear(24, TOKENS))
        self.channels = nn.Sequential(nn.Linear(WIDTH, 64), nn.Hardswish(), nn.Dropout(0.2), nn.Linear(64, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens(self.norm1(x).mT).mT
        return x + self.channels(self.norm2(x))  # type: ignore[no-any-return]


class _Recurrent(nn.Module):
    """A GRU cell called by hand, and an attention over its states."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.score = nn.GRUCell(WIDTH, WIDTH), nn.Bilinear(WIDTH, WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(len(x), WIDTH)
        states = []
        for at in range(TOKENS):
            state = self.cell(x[:, at], state)
            states.append(state)
        every = torch.stack(states, 1)
        weights = self.score(every, state[:, None].expand_as(every).contiguous()).softmax(1)
        return every * weights + every.mean(1, keepdim=True)


class _Autoencoder(nn.Module):
    """Strided convolutions with instance norms, a bottleneck drawn at random, and transposed ones back."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv1d(WIDTH, 24, 3, 2, 1), nn.InstanceNorm1d(24, affine=True), nn.SELU())
        self.mean, self.spread = nn.Conv1d(24, 8, 1), nn.Conv1d(24, 8, 1)
        self.up = nn.Sequential(nn.ConvTranspose1d(8, 24, 4, 2, 1), nn.PReLU(), nn.Conv1d(24, WIDTH, 1))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.down(x.mT)
        mean, spread = self.mean(hidden), functional.softplus(self.spread(hidden))
        return self.up(mean + spread * torch.randn_like(spread)).mT  # type: ignore[no-any-return]


class _Graph(nn.Module):
    """Messages along edges, added up at their ends, with normalised features."""

    def __init__(self) -> None:
        super().__init__()
        self.message, self.update = nn.Linear(2 * WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        nodes = functional.normalize(x.flatten(0, 1), dim=-1)
        start, end = torch.arange(len(nodes)), (torch.arange(len(nodes)) * 7) % 31
        sent = functional.leaky_relu(self.message(torch.cat([nodes[start], nodes[end]], -1)), 0.2)
        total = torch.zeros_like(nodes).index_add(0, end, sent.to(nodes.dtype))
        return self.update(total).tanh().view(x.shape)


def _words_loss(model: nn.Module, batch: Batch) -> Tensor:
    return functional.cross_entropy(model(batch["words"]).flatten(0, 1), batch["labels"].flatten())


def _numbers_loss(model: nn.Module, batch: Batch) -> Tensor:
    return functional.smooth_l1_loss(model(batch["x"]), batch["targets"])


HELD_BACK = (
    Family(name="linear attention", build=_LinearAttention, draw=_sequences, loss=_words_loss),
    Family(name="gated convolutions", build=_Highway, draw=_sequences, loss=_words_loss),
    Family(name="torch's encoder", build=_Encoder, draw=_numbers, loss=_numbers_loss),
    Family(name="mixer", build=_Mixer, draw=_numbers, loss=_numbers_loss),
    Family(name="recurrent cells", build=_Recurrent, draw=_numbers, loss=_numbers_loss),
    Family(name="autoencoder", build=_Autoencoder, draw=_numbers, loss=_numbers_loss),
    Family(name="messages", build=_Graph, draw=_numbers, loss=_numbers_loss),
)
