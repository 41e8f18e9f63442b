"""Puts a fault into a step such that nothing but the values tells of it, and says where it was put."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from benchmarks.dump_pairs.cases import Fault
from benchmarks.dump_pairs.models import Prepared, leaves
from trainermon.dump.function_modes import put_in, take_out

_COMPUTE = frozenset(
    (
        "linear",
        "conv1d",
        "conv2d",
        "conv_transpose2d",
        "matmul",
        "bmm",
        "embedding",
        "softmax",
        "silu",
        "gelu",
        "relu",
        "tanh",
        "exp",
        "softplus",
        "layer_norm",
        "rms_norm",
        "group_norm",
        "batch_norm",
        "scaled_dot_product_attention",
        "lstm",
        "mean",
        "pow",
        "rsqrt",
        "mul",
        "add",
        "sub",
        "sum",
    )
)


class Place(NamedTuple):
    """The `occurrence`-th call of the function `name` that the module `module` makes itself."""

    module: str
    name: str
    occurrence: int


class Truth(NamedTuple):
    """Where a fault is: the module, and the function or the parameter in it; `sharing` are modules that have it too."""

    kind: str
    module: str = ""
    name: str = ""
    sharing: tuple[str, ...] = ()


class _Watched(TorchFunctionMode):
    """Tells of each call of a function within a forward which one it is, and may change what it returns.

    Only of those whose result takes a gradient: a dump calls functions of its own, which do not count.
    """

    def __init__(self, model: nn.Module, change: Callable[[Place, Any], Any]) -> None:
        super().__init__()
        self._change = change
        self._running: list[str] = []
        self._counts: dict[tuple[str, str], int] = {}
        self._handles: list[Any] = []
        for name, module in model.named_modules():
            self._handles.append(module.register_forward_pre_hook(self._begins(name)))
            self._handles.append(module.register_forward_hook(self._ends))

    def _begins(self, name: str) -> Callable[..., None]:
        return lambda *_: self._running.append(name)

    def _ends(self, *_: Any) -> None:
        self._running.pop()

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensor = result[0] if isinstance(result, tuple) and result else result
        if not self._running or not self._running[-1] or not (isinstance(tensor, Tensor) and tensor.requires_grad):
            return result
        key = self._running[-1], getattr(func, "__name__", "").strip("_")
        self._counts[key] = self._counts.get(key, -1) + 1
        return self._change(Place(*key, self._counts[key]), result)


class _Scaled(torch.autograd.Function):
    """Returns what it takes, and passes on another gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient * ctx.factor, None


@contextlib.contextmanager
def broken(
    prepared: Prepared, fault: Fault | None, run: Callable[[], None], start: Callable[[], None]
) -> Iterator[Truth]:
    """Put `fault` into what runs within the block, which a dump sees that is begun by `start`.

    `run` runs the step, which tells the places there are.
    """
    if fault is None or fault.kind in ("input", "weight"):
        truth = _broken_before(prepared, fault)
        start()
        yield truth
        return
    place = _choose(prepared, fault, run)
    mode = _Watched(prepared.model, lambda at, result: _broken(result, fault) if at == place else result)
    start()
    put_in(mode)  # to the bottom: what the function returns to the dump is broken already
    yield Truth(fault.kind, place.module.removeprefix("module."), place.name)
    take_out(mode)
    mode.remove()


def _broken_before(prepared: Prepared, fault: Fault | None) -> Truth:
    if fault is None:
        return Truth("")
    if fault.kind == "weight":
        return _other_weight(prepared.model, fault)
    _other_input(prepared)
    return Truth("input")


def _choose(prepared: Prepared, fault: Fault, run: Callable[[], None]) -> Place:
    places: list[Place] = []
    given_back: set[Place] = set()

    def note(place: Place, result: Any) -> Any:
        tensor = result[0] if isinstance(result, tuple) else result
        if _is_computed(place, tensor) and tensor.numel() > 1:
            places.append(place)
            tensor.register_hook(lambda _: given_back.add(place))
        return result

    mode = _Watched(prepared.model, note)
    state = copy.deepcopy(prepared.model.state_dict())
    with mode:
        run()
    mode.remove()
    prepared.model.load_state_dict(state)
    for parameter in prepared.model.parameters():
        parameter.grad = None
    at = min(int(fault.place * len(places)), len(places) - 1)
    if fault.kind == "backward":  # of some results only an order is taken, through which no gradient goes back
        return next(place for place in (*places[at:], *reversed(places)) if place in given_back)
    return places[at]


def _is_computed(place: Place, result: Any) -> bool:
    """Return whether a function computes something, and is there however attention is computed."""
    is_attention = any(word in place.name for word in ("attention", "softmax")) or place.module.endswith("attn")
    return place.name in _COMPUTE and isinstance(result, Tensor) and result.is_floating_point() and not is_attention


def _broken(result: Any, fault: Fault) -> Any:
    if isinstance(result, tuple):
        return (_broken(result[0], fault), *result[1:])
    if fault.kind == "backward":
        return _Scaled.apply(result, 1 + fault.size)  # type: ignore[no-untyped-call]
    return result * _factor(result, fault)


def _factor(like: Tensor, fault: Fault) -> Tensor:
    noise = torch.ones(like.shape, dtype=torch.float64)
    if fault.is_noise:
        noise = torch.randn(like.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    return (1 + fault.size * noise).to(like.dtype)


def _other_weight(model: nn.Module, fault: Fault) -> Truth:
    found = [(name, module) for name, module in leaves(model) if getattr(module, "weight", None) is not None]
    name, module = found[min(int(fault.place * len(found)), len(found) - 1)]
    with torch.no_grad():
        module.weight.mul_(_factor(module.weight, fault))
    sharing = [other for other, each in found if each.weight is module.weight and other != name]
    return Truth("weight", name, "weight", tuple(sharing))


def _other_input(prepared: Prepared) -> None:
    """Change one element of what the model is given."""
    name = next(name for name in prepared.batch if name not in ("targets", "labels", "clean", "latents"))
    value = prepared.batch[name].clone()
    flat = value.view(-1)
    flat[1] = flat[1] + 1 if value.is_floating_point() else (flat[1] + 3) % 40
    prepared.batch[name] = value
