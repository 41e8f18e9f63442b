"""What a module takes and returns, in the form that msprobe's dump.json gives it.

Decides the encoding of every type; the numbers of a tensor are filled in by `statistics`. Where msprobe 26.2 and its
documentation differ, the program counts for structures (a named tuple becomes a dict), the documentation for values
that the program leaves empty (dtypes and devices).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from types import EllipsisType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from trainermon.core.environment.secrets import clean_argument
from trainermon.dump.forms import (
    MAX_DEPTH,
    MAX_ITEMS,
    TensorForm,
    TensorLeaf,
    form_head,
    named_items,
    object_form,
    ordered_items,
    unseen,
)
from trainermon.statistics.layout import PLAIN_TYPES, is_masked, nested_elements

_STRIDED = torch.strided
_TENSOR, _DTENSOR = "torch.Tensor", "torch.distributed.tensor.DTensor"


def encode(
    value: Any, slot: str, leaves: list[TensorLeaf], depth: int = MAX_DEPTH, entered: set[int] | None = None
) -> Any:
    """Return what stands for `value` in dump.json (see `forms.json_text`), and append every tensor inside to `leaves`.

    A tensor becomes a `TensorForm`, which has no statistics yet; a scalar a dict of its type and value (a text without
    secrets); a container stays one, and is cut after 1 024 items. Of an object of another class that a call returns its
    attributes that hold tensors are told (see `object_form`), of a module or an optimizer nothing: its tensors stand
    elsewhere. What is deeper than 16 levels is `unseen`. `slot` is the place of `value` (`input.0`), `depth` the number
    of levels still allowed, `entered` the ids of the objects around it. No device is touched.
    """
    if isinstance(value, Tensor):
        form = tensor_form(value)
        leaves.append(TensorLeaf(slot, value, form))
        return form
    if value is None:
        return None
    if isinstance(value, str):
        return {"type": type(value).__name__, "value": clean_argument(slot, value)}
    for kind, encoder in _SCALARS:
        if isinstance(value, kind):
            return encoder(value)
    if depth == 0:
        return unseen(value)
    return _encode_container(value, slot, leaves, depth - 1, set() if entered is None else entered)


def tensor_form(tensor: Tensor) -> TensorForm:
    """Return the form of a tensor for dump.json, with type, dtype and shape but without statistics.

    Of one that does not lie in memory in the order of its dimensions the strides are in it, too. The shape of a nested
    one is that of its elements, component after component; `nested` says how many components and dimensions there are.
    A masked one has `masked`.
    """
    if type(tensor) not in PLAIN_TYPES and hasattr(tensor, "device_mesh") and hasattr(tensor, "placements"):
        form = TensorForm(form_head(_DTENSOR, tensor.dtype, tensor.shape, tensor.requires_grad))
        form.add("device_mesh", tensor.device_mesh.mesh.tolist())
        form.add("placements", [_placement(placement) for placement in tensor.placements])
        form.add("local_shape", list(_local(tensor).shape))
        return form
    if tensor.is_nested:
        return _nested_form(tensor)
    form = TensorForm(form_head(_TENSOR, tensor.dtype, tensor.shape, tensor.requires_grad))
    if type(tensor) not in PLAIN_TYPES and is_masked(tensor):
        form.add("masked", "zeros are where it is masked")
        return form
    if tensor.layout is _STRIDED and not tensor.is_contiguous():
        form.more = f', "stride": {list(tensor.stride())}'
    return form


def _local(tensor: Any) -> Tensor:
    local: Tensor = tensor._local_tensor if hasattr(tensor, "_local_tensor") else tensor.to_local()
    return local


def _nested_form(tensor: Tensor) -> TensorForm:
    shape = tuple(nested_elements(tensor).shape)
    form = TensorForm(form_head(_TENSOR, tensor.dtype, shape, tensor.requires_grad))
    kind = "jagged" if tensor.layout is torch.jagged else "strided"
    counts = f"{tensor.size(0)} components, {tensor.dim()} dimensions"
    form.add("nested", f"{kind}, {counts}; the shape is that of the elements")
    return form


def encode_output(output: Any, leaves: list[TensorLeaf]) -> Any:
    """Return what stands for a module's return value in dump.json, as a list; append its tensors to `leaves`.

    The items of a tuple are the items of the list; anything else is its only item.
    """
    if isinstance(output, tuple):
        return encode(output, "output", leaves)
    return [encode(output, "output.0", leaves)]


def _encode_container(value: Any, slot: str, leaves: list[TensorLeaf], depth: int, entered: set[int]) -> Any:
    def inner(name: object, item: Any) -> Any:
        return encode(item, f"{slot}.{name}", leaves, depth, entered)

    if _P2P is not None and isinstance(value, _P2P):
        return _message(value, slot, leaves, depth)
    items = named_items(value)
    if items is not None:
        return {str(name): inner(name, item) for name, item in items[:MAX_ITEMS]}
    parts = ordered_items(value)
    if parts is not None:
        return [inner(index, item) for index, item in enumerate(parts)]
    return None if isinstance(value, nn.Module | Optimizer) else object_form(value, slot, entered, inner)


def _message(operation: Any, slot: str, leaves: list[TensorLeaf], depth: int) -> dict[str, Any]:
    return {
        "class_type": "torch.distributed.P2POp",
        "tensor": encode(operation.tensor, f"{slot}.tensor", leaves, depth),
        "op": operation.op.__name__,
        "peer": operation.peer,
        "tag": operation.tag,
        "group_id": _process_group(operation.group or dist.group.WORLD)["group_id"],
    }


def _placement(placement: Any) -> dict[str, Any]:
    if placement.is_shard():
        return {"Shard": {"dim": placement.dim}}
    if placement.is_partial():
        return {"Partial": {"reduce_op": placement.reduce_op}}
    return {"Replicate": {}}


def _process_group(group: Any) -> dict[str, Any]:
    ranks = dist.get_process_group_ranks(group)
    return {"type": "torch.ProcessGroup", "group_ranks": ranks, "group_id": f"{zlib.crc32(str(ranks).encode()):08x}"}


_SCALARS: list[tuple[Any, Callable[[Any], dict[str, Any]]]] = [
    # torch.Size before the containers, being a tuple
    (torch.Size, lambda size: {"type": "torch.Size", "value": list(size)}),
    (torch.SymInt, lambda _: {"type": "torch.SymInt", "value": "symbolic"}),
    (bool | int | float, lambda scalar: {"type": type(scalar).__name__, "value": scalar}),
    (complex, lambda number: {"type": "complex", "value": [number.real, number.imag]}),
    (slice, lambda part: {"type": "slice", "value": [part.start, part.stop, part.step]}),
    (EllipsisType, lambda _: {"type": "ellipsis", "value": "..."}),
    (torch.dtype, lambda dtype: {"type": "torch.dtype", "value": str(dtype)}),
    (torch.device, lambda device: {"type": "torch.device", "value": str(device)}),
    (torch.memory_format, lambda form: {"type": "torch.memory_format", "format": str(form).removeprefix("torch.")}),
]
_P2P = getattr(dist, "P2POp", None)
if dist.is_available():
    _SCALARS += [
        (dist.ProcessGroup, _process_group),
        (dist.ReduceOp, lambda op: {"type": "torch.distributed.ReduceOp", "value": str(op)}),
    ]
