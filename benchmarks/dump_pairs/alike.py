"""Two families of models, and what two that are built alike may differ by: a layer, a function, a name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


class Attention(nn.Module):
    """Attention of two heads."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        query, key, value = self.qkv(hidden).chunk(3, -1)
        weights = torch.softmax(query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5, -1)
        return cast("Tensor", self.out(weights @ value))


class Feed(nn.Module):
    """Two products with an activation between them, which may be a module or a function."""

    def __init__(self, make: Callable[[int, int], nn.Module], width: int) -> None:
        super().__init__()
        self.inner, self.act, self.outer = make(width, 2 * width), nn.GELU(), make(2 * width, width)
        self.function: Callable[[Tensor], Tensor] | None = None

    def forward(self, hidden: Tensor) -> Tensor:
        made = self.inner(hidden)
        return cast("Tensor", self.outer(self.act(made) if self.function is None else self.function(made)))


class Layer(nn.Module):
    """A mixing part and a feeding part, both added to what came in; `feeding` is the name of the latter."""

    def __init__(self, mix: nn.Module, norms: tuple[nn.Module, nn.Module], feed: Feed, feeding: str) -> None:
        super().__init__()
        self.before, self.between = norms
        self.mix = mix
        self.add_module(feeding, feed)
        self.feeding = feeding

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.mix(self.before(hidden))
        return cast("Tensor", hidden + self.get_submodule(self.feeding)(self.between(hidden)))


def _convolution(given: int, made: int) -> nn.Module:
    return nn.Conv2d(given, made, 1)


def reader_layer(feeding: str = "feed") -> Layer:
    """Return a layer of the reader."""
    return Layer(Attention(16), (nn.LayerNorm(16), nn.LayerNorm(16)), Feed(nn.Linear, 16), feeding)


def painter_layer(feeding: str = "feed") -> Layer:
    """Return a layer of the painter."""
    norms = nn.GroupNorm(2, 8), nn.GroupNorm(2, 8)
    return Layer(nn.Conv2d(8, 8, 3, padding=1), norms, Feed(_convolution, 8), feeding)


class Stack(nn.Module):
    """Layers between what reads the batch and what is learned; `recompute` says how they run."""

    def __init__(self, first: nn.Module, layers: list[Layer], last: nn.Module) -> None:
        super().__init__()
        self.first, self.layers, self.last = first, nn.ModuleList(layers), last
        self.recompute = ""

    def forward(self, batch: Tensor) -> Tensor:
        hidden = self.first(batch)
        for layer in self.layers:
            run = {"use_reentrant": self.recompute == "reentrant"}
            hidden = checkpoint(layer, hidden, **run) if self.recompute else layer(hidden)
        return cast("Tensor", self.last(hidden).float().pow(2).mean())


def reader(feeding: str = "feed") -> Stack:
    """Return a reader of words: attention, layer norms, products."""
    torch.manual_seed(2)
    return Stack(nn.Embedding(50, 16), [reader_layer(feeding) for _ in range(4)], nn.Linear(16, 50))


def painter(feeding: str = "feed") -> Stack:
    """Return a painter of images: convolutions and group norms."""
    torch.manual_seed(2)
    return Stack(nn.Conv2d(3, 8, 3, padding=1), [painter_layer(feeding) for _ in range(4)], nn.Conv2d(8, 3, 1))


BATCHES: dict[str, Callable[[], Tensor]] = {
    "reader": lambda: torch.arange(24).reshape(2, 12) * 7 % 50,
    "painter": lambda: torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(4)),
}
BUILDERS: dict[str, tuple[Callable[..., Stack], Callable[[], Layer]]] = {
    "reader": (reader, reader_layer),
    "painter": (painter, painter_layer),
}
HELD_OUT = ("painter",)
"""Judged once, when all was mended on the other."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One thing that two models differ by.

    Attributes:
        what: In words.
        change: Changes the target.
        named: What the first line has to name, one of these; (): nothing is wrong, and nobody is to blame.
        feeding: The name of a part in the target's layers; `feed` in the golden dump's.
        recompute: Whether layers are recomputed, and how, on both sides.
        swapped: Whether the golden dump is the one that is changed.
        by_functions: Whether it can be seen in dumps that have functions, too, and in no others.
        is_layer: Whether whole layers are on one side alone: then dumps of functions alone tell, too.
    """

    what: str
    change: Callable[[Stack, Callable[[], Layer]], Any] = lambda *_: None
    named: tuple[str, ...] = ()
    feeding: str = "feed"
    recompute: str = ""
    swapped: bool = False
    by_functions: bool = False
    is_layer: bool = False


def _insert(*places: int) -> Callable[[Stack, Callable[[], Layer]], None]:
    def change(model: Stack, make: Callable[[], Layer]) -> None:
        for at in places:
            model.layers.insert(at, make())

    return change


def _part(model: Stack, path: str) -> Any:
    return model.get_submodule(path)


def _scale(path: str, factor: float) -> Callable[[Stack, Callable[[], Layer]], None]:
    def change(model: Stack, _: Callable[[], Layer]) -> None:
        with torch.no_grad():
            _part(model, path).weight.mul_(factor)

    return change


def _other_function(model: Stack, _: Callable[[], Layer]) -> None:
    _part(model, "layers.2.feed").function = functional.silu


def _adapter(model: Stack, _: Callable[[], Layer]) -> None:
    width = _part(model, "layers.1.mix")
    model.layers[1].mix = nn.Sequential(width, nn.Tanh())  # type: ignore[union-attr]


def _in_call(number: int) -> Callable[[Stack, Callable[[], Layer]], None]:
    def change(model: Stack, _: Callable[[], Layer]) -> None:
        calls = iter(range(100))
        hook = lambda _module, _given, made: 1.2 * made if next(calls) == number else None  # noqa: E731
        _part(model, "layers.2.feed.inner").register_forward_hook(hook)

    return change


def _freeze(model: Stack, _: Callable[[], Layer]) -> None:
    _part(model, "layers.1").requires_grad_(requires_grad=False)


def _other_class(model: Stack, _: Callable[[], Layer]) -> None:
    _part(model, "layers.1.feed").act = nn.ReLU()


DIFFERENCES: tuple[Difference, ...] = (
    Difference(what="nothing"),
    *(
        Difference(
            what=what, change=_insert(*places), named=(f"Module.layers.{places[0]}.Layer",), **more, is_layer=True
        )
        for what, places, more in (
            ("a layer more at the beginning", (0,), {}),
            ("a layer more within", (2,), {}),
            ("a layer more at the end", (4,), {}),
            ("a layer less", (1,), {"swapped": True}),
            ("two layers more", (1, 2), {}),
            ("layers more at two places", (1, 4), {}),
            ("three layers less", (0, 2, 6), {"swapped": True}),
            ("a layer more, recomputed", (2,), {"recompute": "reentrant"}),
        )
    ),
    Difference(what="another class", change=_other_class, named=("Module.layers.1.feed.act",)),
    Difference(what="another function", change=_other_function, named=("silu",), by_functions=True),
    Difference(what="an operation more", change=_adapter, named=("layers.1.mix",)),
    Difference(what="a part renamed", feeding="mlp"),
    Difference(
        what="a part renamed, another weight",
        feeding="mlp",
        change=_scale("layers.3.mlp.outer", 1.2),
        named=("layers.3.mlp.outer",),
    ),
    Difference(what="recomputed", recompute="reentrant"),
    Difference(
        what="the second forward, reentrant", recompute="reentrant", change=_in_call(1), named=("layers.2.Layer",)
    ),
    Difference(what="the second forward, other", recompute="other", change=_in_call(1), named=("layers.2.Layer",)),
    Difference(what="a layer frozen", change=_freeze, named=("layers.1 is frozen in the target",)),
)
