"""Which functions of MindSpore are recorded, and what their calls are called: msprobe's prefixes and names.

`Functional.relu` is `mindspore.ops.relu`, `Mint.add` and `MintFunctional.gelu` are those of `mindspore.mint` and
`mindspore.mint.nn.functional`, `Tensor.__add__` is the tensor's own; `Primitive.matmul.MatMul` is the primitive that a
cell keeps as its attribute `matmul`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import FunctionType, MappingProxyType, ModuleType
from typing import Any

from mindspore import Tensor, mint, nn, ops

from trainermon.hooks.mindspore.functions import FunctionPlace

PRIMITIVE = "Primitive"
OWNERS: Mapping[str, ModuleType | type] = MappingProxyType(
    {"Functional": ops, "Tensor": Tensor, "Mint": mint, "MintFunctional": mint.nn.functional}
)
# Modules of functions that compute nothing themselves: transforms of functions, decorators; and collectives.
_OTHER_MODULES = frozenset([
    "comm_func", "grad_func", "vmap_func", "debug_func", "reshard_func", "primitive", "op_info_register", "base",
    "vm_impl_registry", "_ms_kernel", "check_jit_forbidden_api",
])  # fmt: skip
# They only ask, steer, or take a tensor out of MindSpore.
SILENT = frozenset([
    "asnumpy", "convert_bytes_to_tensor", "core", "data_ptr", "data_sync", "deepcopy", "dim", "dyn_shape",
    "flush_from_cache", "from_dlpack", "from_numpy", "get_bytes", "getitem_index_info", "has_init", "init_data",
    "is_complex", "is_contiguous", "is_floating_point", "is_init", "is_nonzero", "is_pinned", "is_shared",
    "is_signed", "is_tensor", "item", "itemset", "jit_view_unsupported", "ndimension", "nelement", "numel",
    "numpy", "offload", "offload_file_path", "pin_memory", "rank", "register_hook", "remove_hook",
    "requires_grad_", "set_", "set_cast_dtype", "set_const_arg", "set_device_address", "set_dtype",
    "set_init_flag", "set_param_info", "setitem_index_info", "shape", "size", "storage", "storage_offset",
    "stride", "to_coo", "to_csr", "to_dlpack", "tolist", "typeof", "untyped_storage", "value", "wait_pipeline",
])  # fmt: skip
_OPERATORS = frozenset(f"__{name}__" for name in [
    "abs", "add", "and", "eq", "floordiv", "ge", "getitem", "gt", "iadd", "ifloordiv", "imod", "imul", "invert",
    "isub", "itruediv", "le", "lt", "matmul", "mod", "mul", "ne", "neg", "or", "pow", "radd", "rfloordiv",
    "rmatmul", "rmod", "rmul", "rpow", "rsub", "rtruediv", "setitem", "sub", "truediv", "xor",
])  # fmt: skip


def recorded_functions() -> Iterator[FunctionPlace]:
    """Yield every function whose calls are recorded."""
    for prefix, owner in OWNERS.items():
        for name in dir(owner):
            if name in SILENT or (name.startswith("_") and not (owner is Tensor and name in _OPERATORS)):
                continue
            if _is_operation(owner, getattr(owner, name)):
                yield FunctionPlace(owner, name, f"{prefix}.{name}")


def recorded_primitives(models: Mapping[str, nn.Cell]) -> list[tuple[ops.Primitive, str]]:
    """Return the primitives that the cells of some models keep as attributes, each once with its name."""
    found = {
        id(primitive): (primitive, f"{PRIMITIVE}.{attribute}.{type(primitive).__name__}")
        for model in models.values()
        for _, cell in model.cells_and_names()
        for attribute, primitive in cell._primitives.items()
        if primitive is not None and primitive.name.lower() not in SILENT
    }
    return list(found.values())


def _is_operation(owner: Any, function: Any) -> bool:
    if owner is Tensor:
        return callable(function) and not isinstance(function, type)
    return isinstance(function, FunctionType) and function.__module__.rpartition(".")[2] not in _OTHER_MODULES
