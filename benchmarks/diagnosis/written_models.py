"""Models that the families have not, with mistakes as people write them, for `benchmarks.bench_diagnosis_written`.

A selective state space model, a graph network with edge distances, and a U-net for segmentation. `broken` is the name
of a mistake that the model makes in the step that runs, "" for none.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

WIDTH = 8


class Mixer(nn.Module):
    """A selective scan: `h = exp(dt A) h + dt B x`, one element after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.broken = ""
        self.log_a, self.to_dt = nn.Parameter(torch.zeros(WIDTH)), nn.Linear(WIDTH, WIDTH)
        self.to_b, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return the mixed sequence: (batch, length, width) as given."""
        dt = nn.functional.softplus(self.to_dt(x))
        rate = self.log_a.exp() if self.broken == "sign of the rate" else -self.log_a.exp()
        decay = torch.exp(dt * rate * (300 if self.broken == "sign of the rate" else 1))
        given = dt * self.to_b(x) * x
        state, states = torch.zeros_like(x[:, 0]), []
        for step in range(x.shape[1]):
            state = decay[:, step] * state + given[:, step]
            states.append(state)
        mixed = torch.stack(states, 1)
        if self.broken == "gate that closes":
            gate = torch.relu(mixed - 1e6)
            mixed = mixed * gate / gate.sum(-1, keepdim=True)
        return self.out(mixed)


class StateSpaceModel(nn.Module):
    """Two residual blocks of `Mixer`, which predict the next token of 16."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(16, WIDTH), nn.Linear(WIDTH, 16)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.mixers = nn.ModuleList(Mixer() for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return a logit for each of 16 tokens at each place."""
        x = self.embed(tokens)
        for norm, mixer in zip(self.norms, self.mixers, strict=True):
            x = x + mixer(norm(x))
        return self.head(x)


class Messages(nn.Module):
    """Sums messages over the edges of a graph, by degree."""

    def __init__(self) -> None:
        super().__init__()
        self.broken = ""
        self.message, self.update = nn.Linear(WIDTH + 1, WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, edges: Tensor, length: Tensor) -> Tensor:
        """Return new features of each node; `edges` has two rows, `length` one number per edge."""
        source, target = edges
        sent = self.message(torch.cat([x[source], length[:, None]], 1))
        got = torch.zeros_like(x).index_add(0, target, sent)
        degree = torch.zeros(len(x)).index_add(0, target, torch.ones(len(target)))
        if self.broken == "node without edges":
            got = got / torch.where(torch.arange(len(x)) == 0, 0.0, degree)[:, None]
        else:
            got = got / degree.clamp(min=1)[:, None]
        if self.broken == "no neighbour to attend to":
            weight = torch.full((len(x), 3), -torch.inf).softmax(1)
            got = got * weight.sum(1, keepdim=True)
        return torch.relu(self.update(torch.cat([x, got], 1)))


class Distance(nn.Module):
    """Length of each edge between moved places."""

    def __init__(self) -> None:
        super().__init__()
        self.broken, self.move = "", nn.Linear(3, 3)

    def forward(self, places: Tensor, edges: Tensor) -> Tensor:
        """Return one length per edge; places are (nodes, 3)."""
        moved = self.move(places)
        if self.broken == "edge of no length":
            edges = torch.stack([edges[0], edges[0]])
        squared = (moved[edges[0]] - moved[edges[1]]).square().sum(1)
        return squared.sqrt()


class GraphNet(nn.Module):
    """Two rounds of messages, and one number per graph."""

    def __init__(self) -> None:
        super().__init__()
        self.distance, self.embed = Distance(), nn.Linear(3, WIDTH)
        self.rounds, self.readout = nn.ModuleList(Messages() for _ in range(2)), nn.Linear(WIDTH, 1)

    def forward(self, places: Tensor, edges: Tensor) -> Tensor:
        """Return the energy of the graph."""
        length, x = self.distance(places, edges), self.embed(places)
        for messages in self.rounds:
            x = messages(x, edges, length)
        return self.readout(x).mean()


class Contrast(nn.Module):
    """Normalises each channel of an image, as instance norm does, with no eps if it is broken."""

    def __init__(self) -> None:
        super().__init__()
        self.broken = ""

    def forward(self, x: Tensor) -> Tensor:
        """Return the channels with mean 0 and standard deviation 1."""
        if self.broken == "norm without eps":
            x = x * 0
            return (x - x.mean((2, 3), keepdim=True)) / x.std((2, 3), keepdim=True)
        return (x - x.mean((2, 3), keepdim=True)) / (x.std((2, 3), keepdim=True) + 1e-5)


class Bottleneck(nn.Module):
    """The innermost convolution, in half precision if it is broken."""

    def __init__(self) -> None:
        super().__init__()
        self.broken, self.conv = "", nn.Conv2d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """Return features of the same shape."""
        y = self.conv(x)
        return (y * 1e5).half().float() / 1e5 if self.broken == "half precision" else y


class SegmentationNet(nn.Module):
    """A U-net of two levels with one logit per pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.contrast = nn.Conv2d(1, WIDTH, 3, padding=1), Contrast()
        self.inner, self.up = Bottleneck(), nn.ConvTranspose2d(WIDTH, WIDTH, 2, stride=2)
        self.merge = nn.Conv2d(2 * WIDTH, 1, 1)

    def forward(self, image: Tensor) -> Tensor:
        """Return logits of the size of the image."""
        skip = torch.relu(self.contrast(self.down(image)))
        deep = self.up(torch.relu(self.inner(nn.functional.avg_pool2d(skip, 2))))
        return self.merge(torch.cat([skip, deep], 1))
