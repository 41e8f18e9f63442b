"""Values as a dump has them in JSON, turned back into what a call took: tensors, numbers, slices, dtypes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainermon.core.errors import DumpError
from trainermon.dump.files.records import IN_VMAP, TRANSFORMED
from trainermon.dump.files.tensor_files import load_tensor
from trainermon.dump.forms import MAX_ITEMS

_FIXED: Mapping[str, Any] = {"ellipsis": ..., "torch.device": torch.device("cpu")}
UNREADABLE = "the dumped tensor"
"""How a reason begins that names a file of a tensor which is missing, damaged or another's."""
MAX_RATIO = 16
"""How many times as many elements as its tensors have may be made of them."""


class FormDecoder:
    """Turns the JSON form of what a call took back into what it took.

    Args:
        folder: Where the files of tensors are.
        tensors: Makes a tensor of its form in place of reading its file.
    """

    def __init__(self, folder: Path, tensors: Callable[[Mapping[str, Any]], Tensor] | None = None) -> None:
        self._folder, self._tensor = folder, tensors or self._loaded

    def __call__(self, form: Any) -> Any:
        """Return the value that a JSON form stands for.

        Raises:
            DumpError: A tensor was not dumped, or cannot be read; or the value is of a type that cannot be given again.
        """
        if isinstance(form, list):
            if len(form) == MAX_ITEMS:
                raise DumpError(f"a list has {MAX_ITEMS} items, at which dumps cut it")
            return [self(item) for item in form]
        if not isinstance(form, dict):
            return form
        kind = form.get("type")
        if "dtype" in form and "shape" in form:
            _refuse_other(form)
            return self._tensor(form)
        if not isinstance(kind, str):
            return {name: self(item) for name, item in form.items()}
        return _plain(kind, form.get("value", form.get("format")))

    def _loaded(self, form: Mapping[str, Any]) -> Tensor:
        name = form.get("data_name")
        if not name:
            if 0 in form["shape"]:
                dtype = getattr(torch, _torchs_name(str(form["dtype"])), None)
                return torch.empty(form["shape"], dtype=dtype if isinstance(dtype, torch.dtype) else None)
            raise DumpError("its tensors were not dumped: expected a dump with task tensor")
        try:
            found = load_tensor(self._folder / Path(name).name, _torchs_name(str(form["dtype"])), form["shape"])
        except Exception as error:  # torch.load raises anything on a damaged file: there is no common type
            why = str(error) if isinstance(error, OSError) else "expected a tensor as torch.save writes it"
            raise DumpError(f"{UNREADABLE} {Path(name).name} cannot be read ({why})") from error
        if list(found.shape) != list(form["shape"]):
            shapes = f"has the shape {list(found.shape)}, {list(form['shape'])} in dump.json"
            raise DumpError(f"{UNREADABLE} {Path(name).name} {shapes}")
        return _as_it_lay(found, form.get("stride"))


def _refuse_other(form: Mapping[str, Any]) -> None:
    """Raise an error if the file of a tensor has numbers of it, and is not what the call took.

    Raises:
        DumpError: What it has.
    """
    if str(form.get(TRANSFORMED, "")).startswith(IN_VMAP.partition(";")[0]):
        raise DumpError("it ran inside vmap: the dump has what the whole batch took, and not each call")
    if "nested" in form:
        raise DumpError("it ran on nested tensors: the dump has their elements, and not which component each is of")
    if "masked" in form:
        raise DumpError("it ran on masked tensors: the dump has zeros where they are masked")


def _torchs_name(dtype: str) -> str:
    """Return the name of a dtype in torch; MindSpore's begins with a capital, `BFloat16`."""
    return dtype.removeprefix("torch.").lower()


def _as_it_lay(tensor: Tensor, stride: Any) -> Tensor:
    """Return the tensor with the recorded strides, if no two elements share memory and there are few gaps in it."""
    if not isinstance(stride, list) or len(stride) != tensor.dim() or tensor.layout is not torch.strided:
        return tensor
    if not all(type(step) is int for step in stride):
        return tensor
    extent = 1
    for step, size in sorted(zip(stride, tensor.shape, strict=True)):
        if size > 1 and step < extent:
            return tensor
        extent += (size - 1) * step if size > 1 else 0
    if extent > MAX_RATIO * tensor.numel():
        return tensor
    return torch.zeros(extent, dtype=tensor.dtype).as_strided(tensor.shape, stride).copy_(tensor)


def _plain(kind: str, value: Any) -> Any:
    match kind:
        case "slice":
            return slice(*value)
        case "torch.Size":
            return torch.Size(value)
        case "torch.dtype" | "torch.memory_format" | "mindspore.dtype":
            found = getattr(torch, _torchs_name(str(value)), None)
            return found if isinstance(found, torch.dtype | torch.memory_format) else None
        case "ellipsis" | "torch.device":
            return _FIXED[kind]
        case "int" | "float" | "bool" | "str":
            return value
        case "complex":
            return complex(*value)
        case _:
            raise DumpError(f"an argument of type {kind} cannot be given again")
