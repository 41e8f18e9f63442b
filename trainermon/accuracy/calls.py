"""A call of an operation, and how it is run again on the CPU in another type."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils import _pytree as pytree

_EPS = 3  # its place among the arguments of RMS norm
_WITH_IMAGINARY = {torch.float64: torch.complex128, torch.float32: torch.complex64}


class OperationCall(NamedTuple):
    """An operation with its inputs as they were before the call, to be run again.

    Attributes:
        function: The operation.
        args: Positional arguments.
        kwargs: Keyword arguments.
        is_custom: It is not torch's own: a result that is not finite in float64 either may be its kernel's fault too.
        is_random: It draws random numbers: two calls differ in which elements they change.
    """

    function: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    is_custom: bool = False
    is_random: bool = False

    @property
    def tensors(self) -> list[Tensor]:
        """Every tensor among the arguments, those in lists and keywords included."""
        found: list[Tensor] = []
        mapped(lambda leaf: found.append(leaf) if isinstance(leaf, Tensor) else None, [*self.args, dict(self.kwargs)])
        return found


class RepeatableCall:
    """An operation that can be run once more on the CPU in any floating type, on copies of its inputs.

    No generator is given: it is for operations that draw nothing. On another `device` it is run there.
    """

    def __init__(self, called: OperationCall, device: torch.device | str = "cpu") -> None:
        self._device = torch.device(device)
        self._function, self._args, self._kwargs = _portable(called.function, tuple(called.args), dict(called.kwargs))
        # Without tensors and type it makes numbers of torch's default type.
        self._is_factory = not called.tensors and called.kwargs.get("dtype") is None
        if self._is_factory:
            self._kwargs.pop("dtype", None)

    def run(self, dtype: torch.dtype | None, change: Callable[[Any], Any] | None = None) -> list[Tensor]:
        """Return every tensor of the result, in order.

        Floating arguments are given in `dtype`, complex ones in the complex type of its size; None: as they are.
        `change` is applied to every leaf of the arguments after that.

        Raises:
            Exception: Whatever the operation raises, if it cannot be run in that type.
        """

        def given(value: Any) -> Any:
            made = cast(value, dtype, self._device)
            return made if change is None else change(made)

        args, kwargs = mapped(given, self._args), mapped(given, self._kwargs)
        with torch.no_grad(), torch._C.DisableTorchFunction():
            result = self._function(*args, **kwargs)
            if dtype is not None and self._is_factory and isinstance(result, Tensor) and result.is_floating_point():
                with contextlib.suppress(TypeError):  # it takes no type
                    result = self._function(*args, **kwargs, dtype=dtype)
        if result is NotImplemented:
            raise TypeError("the operation does not take these arguments")
        leaves = [leaf for leaf in _leaves(result) if isinstance(leaf, Tensor)]
        return [plain(leaf) if self._device.type == "cpu" else leaf for leaf in leaves]


def mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """Return lists, tuples and dicts with every leaf changed, in order: `tree_map`, at a fifth of its cost."""
    kind = type(value)
    if kind is Tensor:
        return change(value)
    if kind is list or kind is tuple:
        return kind([mapped(change, item) for item in value])
    if kind is dict:
        return {key: mapped(change, item) for key, item in value.items()}
    return pytree.tree_map(change, value) if isinstance(value, tuple | list | dict) else change(value)


def written_by(call: OperationCall) -> list[Tensor]:
    """Return the dense arguments that a call writes to and does not return, as it leaves them: running statistics.

    Runs the call once, on copies of its arguments; raises whatever it raises.
    """
    given = mapped(lambda value: cast(value, None), [list(call.args), dict(call.kwargs)])
    with torch.no_grad(), torch._C.DisableTorchFunction():
        made = call.function(*given[0], **given[1])
    returned = {one.untyped_storage().data_ptr() for one in pytree.tree_leaves(made) if _is_dense(one)}
    pairs = zip(pytree.tree_leaves([list(call.args), dict(call.kwargs)]), pytree.tree_leaves(given), strict=True)
    return [
        now
        for before, now in pairs
        if _is_dense(now)
        and now.untyped_storage().data_ptr() not in returned
        and bool((_finite_bits(before) != _finite_bits(now)).any())
    ]


def _finite_bits(value: Tensor) -> Tensor:
    """Return a tensor in which a NaN equals a NaN."""
    return plain(value).nan_to_num(nan=0.125) if value.is_floating_point() else plain(value)


def _is_dense(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout is torch.strided and not value.is_nested


def _leaves(value: Any) -> list[Any]:
    return [value] if isinstance(value, Tensor) else pytree.tree_leaves(value)


def call_on(call: OperationCall, device: str) -> Any:
    """Return what the operation gives on `device`, without autograd, for copies of its arguments there.

    Raises:
        Exception: Whatever the operation raises.
    """

    def given(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.detach().to(device, copy=True)
        return torch.device(device) if isinstance(value, torch.device) else value

    args, kwargs = pytree.tree_map(given, (list(call.args), dict(call.kwargs)))
    with torch.no_grad():
        return call.function(*args, **kwargs)


def gives(call: OperationCall, made: Sequence[Tensor]) -> bool:
    """Return whether a call gives in float64 the numbers in `made`, rounded to their types."""
    pairs = zip(RepeatableCall(call).run(torch.float64), made, strict=True)
    return all(one.shape == other.shape and torch.equal(one.to(other.dtype), plain(other)) for one, other in pairs)


def plain(tensor: Tensor) -> Tensor:
    """Return a tensor of the CPU with the same elements, without gradient; a sparse one becomes dense."""
    tensor = tensor.detach()
    return (tensor if tensor.layout is torch.strided else tensor.to_dense()).to("cpu")


def cast(value: Any, dtype: torch.dtype | None, device: torch.device | str = "cpu") -> Any:
    """Return an argument for a call on `device` in the floating type `dtype` (None: its own); tensors are copies."""
    match value:
        case Tensor():
            return value.detach().to(device, cast_dtype(value.dtype, dtype), copy=True)
        case torch.dtype():
            return cast_dtype(value, dtype)
        case torch.device():
            return torch.device(device)
        case torch.Generator():
            return None
        case _:
            return value


def cast_dtype(own: torch.dtype, dtype: torch.dtype | None) -> torch.dtype:
    """Return what `own` becomes in a call in the floating type `dtype`: integers stay, complex types stay complex."""
    if dtype is None:
        return own
    if own.is_complex:
        return _WITH_IMAGINARY.get(dtype, own)
    return dtype if own.is_floating_point else own


def _portable(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Return a call that the CPU has too, and that means the same in every type.

    Fused attention has a kernel of its own on every device.
    """
    name = str(getattr(function, "_opname", ""))
    kwargs = kwargs | eps_of(function, args, kwargs)
    if not name.startswith("_scaled_dot_product") or name.endswith("backward"):
        return function, args, kwargs
    names = [argument.name for argument in function._schema.arguments]  # type: ignore[attr-defined]
    given = {**dict(itertools.islice(zip(names, args, strict=False), len(args))), **kwargs}
    mask = given.get("attn_mask", given.get("attn_bias"))
    chosen = {"attn_mask": mask, "is_causal": given.get("is_causal", False), "scale": given.get("scale")}
    return functional.scaled_dot_product_attention, (given["query"], given["key"], given["value"]), chosen


def eps_of(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `eps` that RMS norm takes if it is given none: that of the type in which it sums. {} of others."""
    name = getattr(function, "__name__", str(getattr(function, "_opname", "")))
    if name != "rms_norm" or len(args) > _EPS or kwargs.get("eps") is not None:
        return {}
    given = args[0] if args else kwargs["input"]
    return {"eps": torch.finfo(torch.promote_types(given.dtype, torch.float32)).eps}
