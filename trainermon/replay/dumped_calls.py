"""Runs a dumped call of a function again, from the tensors that were dumped with it (levels L1 and mix, task tensor).

Decides which function a key means. Files are read with `weights_only=True`, nothing is evaluated, and of what torch has
only operations on tensors are called: a dump comes from anywhere, and `torch.load` is a function of torch, too.
"""

from __future__ import annotations

import dataclasses
import math
import re
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import get_testing_overrides
from torch.utils import _pytree as pytree

from trainermon.accuracy.calls import OperationCall
from trainermon.accuracy.fused import COMPOSITIONS
from trainermon.core.errors import DumpError
from trainermon.dump.facts.generator_states import GENERATOR
from trainermon.dump.files.reader import DAMAGED_ENTRY, load_raw, split_key, well_formed_entry
from trainermon.dump.files.records import EXTRA, FORWARD, TENSOR_FOLDER, EntryRecord
from trainermon.replay.dumped_modules import DumpedModule, module_call, module_result
from trainermon.replay.dumped_values import MAX_RATIO, FormDecoder
from trainermon.replay.mindspore_calls import PREFIXES, is_of_mindspore, torchs_function
from trainermon.replay.precise import OperationJudgement, judge

# By the first part of a key; a function of torch's that nn.functional calls is Functional there too.
_HOMES: Mapping[str, tuple[Any, ...]] = {
    "Functional": (functional, torch),
    "Torch": (torch, functional, torch.linalg, torch.special, torch.fft),
    "Tensor": (torch.Tensor,),
    "VF": (torch._VF,),
}
# They take a file, or memory as it lies, or put it elsewhere.
_NO_OPERATIONS = frozenset(["from_file", "frombuffer", "pin_memory"])
# They give what they take another shape, which only copies are given here.
_RESHAPING = frozenset(["as_strided_", "squeeze_", "swapaxes_", "swapdims_", "t_", "transpose_", "unsqueeze_"])
# What Python calls its operators, without what it puts in front of those that are reflected or in place.
_OPERATORS = frozenset(
    (
        "abs",
        "add",
        "and",
        "div",
        "eq",
        "floordiv",
        "ge",
        "getitem",
        "gt",
        "invert",
        "le",
        "lshift",
        "lt",
        "matmul",
        "mod",
        "mul",
        "ne",
        "neg",
        "or",
        "pos",
        "pow",
        "rshift",
        "setitem",
        "sub",
        "truediv",
        "xor",
    )
)
# Where torch has functions that a dump's key does not lead to, by the beginning of their dotted names.
_NAMESPACES: Mapping[str, Any] = {
    "torch.fft": torch.fft,
    "torch.linalg": torch.linalg,
    "torch.nn.functional": functional,
    "torch.special": torch.special,
}
# Written in Python or of several operators, and no operator of aten by that name.
_COMPOSED = frozenset(
    [
        "bfloat16",
        "bool",
        "byte",
        "cdouble",
        "cfloat",
        "chalf",
        "char",
        "double",
        "float",
        "half",
        "int",
        "long",
        "short",
        "spmm",
        "unique",
    ]
)
_INDEXING = frozenset(["__getitem__", "__setitem__"])
_PURE_PYTHON = frozenset([functional.__name__, torch.functional.__name__])
MAX_ELEMENTS = 1 << 24
"""What may be made of small tensors; of larger ones, `MAX_RATIO` times as much as they are."""
# Their results have as many elements as the whole numbers they take multiply to.
_MADE_BY_SIZES = frozenset(["empty", "ones", "rand", "randn", "zeros"])
# Their results have at most as many elements as those of their tensors multiply to, whatever else they
# take. A run without memory costs more than a small call itself.
_NO_MORE_THAN_PRODUCT = frozenset(
    [
        "abs",
        "add",
        "batch_norm",
        "bmm",
        "clone",
        "cos",
        "cross_entropy",
        "div",
        "embedding",
        "eq",
        "exp",
        "float",
        "ge",
        "gelu",
        "getitem",
        "group_norm",
        "gt",
        "iadd",
        "imul",
        "isub",
        "itruediv",
        "layer_norm",
        "le",
        "leaky_relu",
        "linear",
        "log",
        "log_softmax",
        "lt",
        "masked_fill",
        "matmul",
        "mean",
        "mm",
        "mul",
        "ne",
        "neg",
        "permute",
        "pow",
        "radd",
        "relu",
        "reshape",
        "rms_norm",
        "rmul",
        "rsqrt",
        "rsub",
        "rtruediv",
        "sigmoid",
        "silu",
        "sin",
        "softmax",
        "softplus",
        "sqrt",
        "squeeze",
        "sub",
        "sum",
        "t",
        "tanh",
        "transpose",
        "truediv",
        "unsqueeze",
        "view",
        "where",
    ]
)
# Namespaces of torch's own operators for its compiler, communication and measurement.
_INTERNAL = re.compile(r"_.*|c10d|debug.*|export|inductor.*|prim|prims|profiler|static_runtime|symm_mem")
_ALIASES = {"__rdiv__": "__rtruediv__"}


@dataclasses.dataclass(frozen=True, slots=True)
class DumpedCall:
    """A forward call of a function as it was dumped.

    Attributes:
        name: The operation's name, `linear` or `linalg.svd`.
        call: The function and its arguments.
        result: What it returned.
        generator: The state of the CPU's generator that it drew from; None: it draws nothing, or the dump does not say.
    """

    name: str
    call: OperationCall
    result: Any
    generator: Tensor | None = None


def judge_dumped(directory: Path, entry: EntryRecord) -> OperationJudgement:
    """Run a dumped forward call again on its dumped inputs; return why its result was NaN or Inf.

    `directory` is the dump's folder, `entry` the call.

    Raises:
        DumpError: The function is not known, the tensors that it takes or gives were not dumped, or it would make much
            more of these.
    """
    dumped = rebuild(directory, load_raw(directory).data, entry)
    return judge(dumped.call, dumped.result)


def rebuild(
    directory: Path,
    data: Mapping[str, Any],
    entry: EntryRecord,
    tensors: Callable[[Mapping[str, Any]], Tensor] | None = None,
    stand_ins: Mapping[str, Callable[..., Any]] = COMPOSITIONS,
) -> DumpedCall:
    """Return the call of `entry` with the tensors that were dumped with it; `data` is what dump.json has by key.

    With `tensors`, which makes one of each form, no file is read, and the call has no result. `stand_ins` are called,
    by name, in place of operators that torch does not have here.

    Raises:
        DumpError: It is no forward call, the function is not known, the tensors that it takes or gives were not dumped,
            or it would make much more of these.
    """
    if entry.direction != FORWARD:
        raise DumpError(f"{entry.key} is no forward call: only those can be run again from a dump")
    value = data.get(entry.key)
    if not isinstance(value, dict):
        raise DumpError(f"{directory} has no entry {entry.key}")
    decode = FormDecoder(directory / TENSOR_FOLDER, tensors)
    with well_formed_entry():
        args, kwargs = _arguments(value, decode)
        result = decode(value.get("output")) if tensors is None else None
    if entry.key.startswith("Module."):
        with well_formed_entry():
            module = _module(entry.class_name, args, kwargs, value, decode)
        call = module_call(module)
        _refuse_large(call, result)
        return DumpedCall(call.function.__name__, call, module_result(module, result))
    prefix, name = entry.class_name, split_key(entry.key)[0]
    if is_of_mindspore(value):
        function = _of_mindspore(entry.key, prefix, name, value)
        name = function.__name__
    else:
        function = _function(prefix, name, entry.function, stand_ins)
    if name in _INDEXING and len(args) > 1:
        args[1] = _index(args[1])
    if name == "__setitem__" and _has_tensor(result):  # earlier dumps do not have what was written
        function = set_item
    called = OperationCall(function, args, kwargs, prefix not in (*_HOMES, *PREFIXES))
    _refuse_large(called, result)
    generator = None if tensors is not None else _generator(value.get(EXTRA, {}).get(GENERATOR), decode)
    return DumpedCall(entry.function.removeprefix("torch.") or name, called, result, generator)


def _arguments(value: Mapping[str, Any], decode: FormDecoder) -> tuple[list[Any], dict[str, Any]]:
    args, kwargs = value.get("input_args", []), value.get("input_kwargs", {})
    for found, kind in ((args, list), (kwargs, dict)):
        if not isinstance(found, kind):
            raise TypeError(f"found {type(found).__name__} in place of its arguments, expected {kind.__name__}")
    return decode(args), {name: decode(item) for name, item in kwargs.items()}


def set_item(tensor: Tensor, index: Any, value: Any) -> Tensor:
    """Write `value` into a tensor at `index`, and return the tensor."""
    tensor[index] = value
    return tensor


set_item.__name__ = "__setitem__"


def _has_tensor(result: Any) -> bool:
    return any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(result))


def _function(prefix: str, name: str, origin: str, stand_ins: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    try:
        return function_of(prefix, name, origin=origin)
    except DumpError:
        if name not in stand_ins:
            raise
        return stand_ins[name]


def _of_mindspore(key: str, prefix: str, name: str, value: Mapping[str, Any]) -> Callable[..., Any]:
    found = torchs_function(prefix, name, value.get(EXTRA, {}).get("attributes", {}), function_of)
    if found is None:
        raise DumpError(f"{key.rpartition('.')[0]}: no function of torch is known that computes the same")
    return found


def _generator(form: Any, decode: FormDecoder) -> Tensor | None:
    """Return the state of a generator of the CPU; of a dump of statistics, and of other devices, None."""
    if not isinstance(form, dict) or form.get("device") != "cpu" or not form.get("state", {}).get("data_name"):
        return None
    state = decode(form["state"])
    return state if isinstance(state, Tensor) and state.dtype == torch.uint8 else None


def _index(value: Any) -> Any:
    """Return an index as it was written: JSON has one word for lists and tuples, and only a tuple has slices in it."""
    is_tuple = isinstance(value, list) and any(one is None or isinstance(one, slice | EllipsisType) for one in value)
    return tuple(value) if is_tuple else value


def load_form(directory: Path, form: Mapping[str, Any]) -> Tensor:
    """Return the tensor that the JSON form of it in the dump in `directory` stands for, on the CPU.

    Raises:
        DumpError: It was not dumped, or its file cannot be read.
    """
    found = load_value(directory, form)
    if not isinstance(found, Tensor):
        raise DumpError(f"{DAMAGED_ENTRY}: expected a tensor, found something else")
    return found


def load_value(directory: Path, form: Any) -> Any:
    """Return the value that a JSON form in the dump in `directory` stands for, with its tensors on the CPU.

    Raises:
        DumpError: A tensor was not dumped, or cannot be read; or it is of a type that cannot be given again.
    """
    with well_formed_entry():
        return FormDecoder(directory / TENSOR_FOLDER)(form)


def function_of(prefix: str, name: str, *, origin: str = "") -> Callable[..., Any]:
    """Return the torch function with the dump name `prefix`.`name`, as `Functional.linear` or `Tensor.add`.

    `origin` is the dotted name that the dump gives where its key does not lead to the function, `torch.linalg.svd`.

    Raises:
        DumpError: Torch has no such operation on tensors (the operators of a custom library must be imported first).
    """
    if origin:
        home, _, last = origin.rpartition(".")
        found = getattr(_NAMESPACES.get(home), last, None)
        if not (callable(found) and _is_operation(found)):
            raise DumpError(f"torch has no function {origin} that could be run again")
        return typing.cast("Callable[..., Any]", found)
    name = _ALIASES.get(name, name)
    if prefix in _HOMES:
        candidates = (getattr(home, name, None) for home in _HOMES[prefix])
        found = next((one for one in candidates if callable(one) and _is_operation(one)), None)
    else:
        found = _custom_operator(prefix, name)
    if found is None:
        raise DumpError(f"torch has no function {prefix}.{name} that could be run again")
    return found


def _is_operation(function: Callable[..., Any]) -> bool:
    """Return whether a function does nothing but compute with tensors."""
    name = getattr(function, "__name__", "")
    if name in _NO_OPERATIONS or isinstance(function, type):
        return False
    if getattr(function, "__module__", None) in _PURE_PYTHON:
        return True
    builtin = (torch._C._VariableFunctions, torch._C._nn)
    is_torchs = any(getattr(home, name, None) is function for home in builtin) or function in get_testing_overrides()
    return is_torchs and (
        name in _COMPOSED | _RESHAPING or _is_operator(name) or _computes(getattr(torch.ops.aten, name, None))
    )


def _is_operator(name: str) -> bool:
    word = name.removeprefix("__").removesuffix("__")
    return name == f"__{word}__" and bool(_OPERATORS.intersection((word, word[1:])))


def _computes(operator: Any) -> bool:
    """Return whether an operator of torch's returns tensors, and gives no other memory or shape to those it takes."""
    if not isinstance(operator, torch._ops.OpOverloadPacket):
        return False
    overloads = [getattr(operator, name) for name in operator.overloads()]  # type: ignore[no-untyped-call]
    return any(one._schema.returns for one in overloads) and not any(
        torch.Tag.inplace_view in one.tags for one in overloads
    )


def _custom_operator(namespace: str, name: str) -> Callable[..., Any] | None:
    """Return an operator that takes a tensor; those that take none make their result from a name, or of nothing."""
    if _INTERNAL.fullmatch(namespace) or name in _NO_OPERATIONS:
        return None
    found = getattr(getattr(torch.ops, namespace, None), name, None)
    if not isinstance(found, torch._ops.OpOverloadPacket) or not _computes(found):
        return None
    arguments = [argument for schema in found._schemas.values() for argument in schema.arguments]
    return found if any("Tensor" in str(argument.type) for argument in arguments) else None


def _refuse_large(called: OperationCall, result: Any) -> None:
    """Raise a DumpError if a call would make far more elements than it took and gave: then a size in it is not true."""
    given = [leaf for leaf in pytree.tree_leaves((called.args, called.kwargs, result)) if isinstance(leaf, Tensor)]
    limit = max(MAX_ELEMENTS, MAX_RATIO * sum(leaf.numel() for leaf in given))
    taken = [leaf.numel() for leaf in pytree.tree_leaves((called.args, called.kwargs)) if isinstance(leaf, Tensor)]
    name = called.function.__name__.strip("_")
    if name in _NO_MORE_THAN_PRODUCT and 0 < math.prod(taken) <= limit:
        return
    if name in _MADE_BY_SIZES and not taken and math.prod(max(1, one) for one in _whole(called)) <= limit:
        return
    args, kwargs = pytree.tree_map_only(Tensor, lambda leaf: leaf.to("meta"), (called.args, called.kwargs))
    try:
        with torch.device("meta"):
            made = called.function(*args, **kwargs)
    except (RuntimeError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        # not every operation can be called without memory: then what the numbers in the call may mean
        numbers = [leaf for leaf in given if not (leaf.is_floating_point() or leaf.is_complex()) and leaf.numel()]
        size = max([1, math.prod(max(1, abs(size)) for size in _whole(called)), *(int(leaf.max()) for leaf in numbers)])
    else:
        size = sum(leaf.numel() for leaf in pytree.tree_leaves(made) if isinstance(leaf, Tensor))
    if size > limit:
        raise DumpError(
            f"{called.function.__name__} would make up to {size:,} elements, and the dump has no tensor of that size: "
            "not run again"
        )


def _whole(called: OperationCall) -> list[int]:
    """Return the whole numbers that a call took, those of sizes included."""
    return [value for value in pytree.tree_leaves((called.args, called.kwargs)) if type(value) is int]


def _module(
    class_name: str, args: list[Any], kwargs: dict[str, Any], value: Mapping[str, Any], decode: FormDecoder
) -> DumpedModule:
    extra = value.get(EXTRA, {})
    return DumpedModule(
        class_name=class_name,
        args=args,
        kwargs=kwargs,
        parameters=decode(value.get("parameters", {})),
        tensors=decode(extra.get("tensors", {})),
        attributes=extra.get("attributes"),
    )
