"""What a call of a torch function is called in a dump: msprobe's prefix and name.

A function mode is handed the same object for `a + b` and `a.add(b)`. Which of the two it was stands in the instruction
that the caller is executing.
"""

from __future__ import annotations

import dis
import functools
from collections.abc import Callable
from types import CodeType, FrameType, FunctionType
from typing import Any, NamedTuple

import torch
from torch.nn import functional
from torch.overrides import handle_torch_function, resolve_name

from trainermon.dump.function_kinds import TORCHS

# Functions of torch that only ask or steer; nothing of them is recorded at any level.
SILENT = frozenset(
    [
        "__get__",
        "__set__",
        "__delete__",
        "__hash__",
        "__len__",
        "__repr__",
        "__format__",
        "__iter__",
        "__reduce_ex__",
        "__reduce__",
        "__deepcopy__",
        "__dir__",
        "__bool__",
        "dim",
        "ndimension",
        "size",
        "numel",
        "nelement",
        "stride",
        "storage_offset",
        "element_size",
        "data_ptr",
        "is_contiguous",
        "is_floating_point",
        "is_complex",
        "is_signed",
        "is_inference",
        "is_same_size",
        "is_set_to",
        "is_shared",
        "is_pinned",
        "is_conj",
        "is_neg",
        "get_device",
        "requires_grad_",
        "retain_grad",
        "register_hook",
        "register_post_accumulate_grad_hook",
        "backward",
        "item",
        "tolist",
        "storage",
        "untyped_storage",
        "_typed_storage",
        "apply_",
        "has_names",
        "as_subclass",
        "_is_view",
        "_is_zerotensor",
        "is_nonzero",
        "get_default_dtype",
        "device",
        "result_type",
        "can_cast",
        "promote_types",
        "finfo",
        "iinfo",
    ]
)
# Of custom operators; `record_function` is one of them.
SILENT_NAMESPACES = frozenset(["profiler"])
_OPERATORS = {
    "add": "__add__", "sub": "__sub__", "mul": "__mul__", "div": "__truediv__", "matmul": "__matmul__",
    "remainder": "__mod__", "add_": "__iadd__", "sub_": "__isub__", "mul_": "__imul__", "div_": "__itruediv__",
    "gt": "__gt__", "lt": "__lt__", "ge": "__ge__", "le": "__le__", "eq": "__eq__", "ne": "__ne__", "neg": "__neg__",
    "remainder_": "__imod__", "bitwise_and": "__and__", "bitwise_or": "__or__", "bitwise_xor": "__xor__",
}  # fmt: skip
_REFLECTED = {"add": "__radd__", "mul": "__rmul__"}
_ALIASES = {"__rtruediv__": "__rdiv__"}
_OPERATOR_CODES = frozenset(
    code for name, code in dis.opmap.items() if name.startswith(("BINARY_", "INPLACE_", "COMPARE_", "UNARY_"))
)
_FUNCTIONAL_FILE = functional.__file__


class FunctionName(NamedTuple):
    """What a call of a torch function is named in a dump: `Torch.matmul`, `Functional.linear`, `Tensor.add`.

    Attributes:
        prefix: `Torch`, `Tensor`, `Functional`, `Distributed`, or the namespace of a custom operator.
        name: The function's own name.
        by_operator: Whether an operator such as `a * b` may have made the call, in which case the caller's bytecode
            decides the name.
        origin: Where torch has the function if prefix and name do not lead there, `torch.linalg.svd`; else "".
    """

    prefix: str
    name: str
    by_operator: bool = False
    origin: str = ""

    @property
    def stem(self) -> str:
        """Prefix and name joined by a dot, `Functional.linear`: the first two parts of the call's key in a dump."""
        return f"{self.prefix}.{self.name}"

    @property
    def is_torchs(self) -> bool:
        """Whether the function is one of torch's own, not a custom operator."""
        return f"{self.prefix}." in TORCHS


def name_of(function: Callable[..., Any], args: tuple[Any, ...], caller: FrameType) -> FunctionName | None:
    """Return the name in a dump for a call of `function` with `args` by the frame `caller`.

    None if it computes nothing. `y * 2` and `2 * y` are told apart where an operand is a constant or a local variable;
    elsewhere it is `__mul__`.
    """
    named = _plain_name(function)
    if named is None:
        return None
    if named.prefix == "Torch" and _inside_functional(caller):
        return FunctionName("Functional", named.name)
    if named.by_operator and caller.f_code.co_code[caller.f_lasti] in _OPERATOR_CODES:
        reflected = named.name in _REFLECTED and _is_reflected(caller, args)
        return FunctionName("Tensor", (_REFLECTED if reflected else _OPERATORS)[named.name])
    return named


def unreplaced(function: Callable[..., Any], caller: FrameType) -> Callable[..., Any]:
    """Return the original of `function`, which a function mode that was handed `function` has to call.

    Torch looks a method up by its name. Where a framework has replaced it on `torch.Tensor`, a mode is handed the
    replacement, although that is running already: what it does would be done twice.
    """
    if type(function) is not FunctionType or caller.f_code is handle_torch_function.__code__:
        return function
    return _method_below(function) or function


@functools.lru_cache(maxsize=4096)
def _method_below(function: FunctionType) -> Callable[..., Any] | None:
    name = next((name for name, value in vars(torch.Tensor).items() if value is function), None)
    return None if name is None else vars(torch._C.TensorBase).get(name)


@functools.lru_cache(maxsize=4096)
def _plain_name(function: Callable[..., Any]) -> FunctionName | None:
    name = getattr(function, "__name__", "")
    if name in SILENT:
        return None
    if isinstance(function, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        namespace, operator = str(function).split(".")[:2]
        return None if namespace in SILENT_NAMESPACES else FunctionName(namespace, operator)
    path = (resolve_name(function) or "").split(".")
    if path[:2] == ["torch", "Tensor"]:
        return FunctionName("Tensor", _ALIASES.get(path[2], path[2]), path[2] in _OPERATORS)
    if path[:3] == ["torch", "nn", "functional"] or getattr(functional, name, None) is function:
        shown = name.removeprefix("_")
        return FunctionName("Functional", shown, origin="" if hasattr(functional, shown) else ".".join(path))
    if path[0] != "torch" or len(path) == 1:
        return None
    is_found = len(path) == 2 or getattr(torch, path[-1], None) is function
    return FunctionName("Torch", path[-1], origin="" if is_found else ".".join(path))


def _inside_functional(caller: FrameType) -> bool:
    """Tell whether a function of torch.nn.functional announces itself under torch's name, as poolings do."""
    above = caller.f_back
    return (
        caller.f_code.co_name == "handle_torch_function"
        and above is not None
        and above.f_code.co_filename == _FUNCTIONAL_FILE
    )


def _is_reflected(caller: FrameType, args: tuple[Any, ...]) -> bool:
    """Tell whether the tensor, which is always handed first, was the right operand."""
    if len(args) != 2 or isinstance(args[1], torch.Tensor):
        return False
    kind, name = _right_operand(caller.f_code, caller.f_lasti)
    return kind == "local" and caller.f_locals.get(name) is args[0]


@functools.lru_cache(maxsize=4096)
def _right_operand(code: CodeType, position: int) -> tuple[str, str]:
    last = None
    for instruction in dis.get_instructions(code):
        if instruction.offset >= position:
            break
        if instruction.opname not in ("CACHE", "EXTENDED_ARG", "NOP"):
            last = instruction
    if last is not None and last.opname.startswith(("LOAD_FAST", "LOAD_NAME", "LOAD_GLOBAL", "LOAD_DEREF")):
        # 3.13 loads two locals in one instruction
        return "local", last.argval[-1] if isinstance(last.argval, tuple) else str(last.argval)
    return "other", ""
