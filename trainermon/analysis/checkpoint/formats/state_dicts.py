"""What in a nested state is a weight, what belongs to the optimizer, and what is neither."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from trainermon.analysis.checkpoint.formats.inert import InertObject, leaves
from trainermon.analysis.checkpoint.pieces import Piece, StoredArray, TensorPieces, whole
from trainermon.core.errors import CheckpointError

MODEL_KEYS = ("model", "module", "state_dict", "model_state_dict", "app", "net")
"""Under which of its keys a training script keeps the weights."""
_MAX_DEPTH, _MAX_MODULES = 64, 1_000_000
_NO_TENSOR = (str, int, float, complex, bytes, type(None), type, set, frozenset, InertObject)
_OPTIMIZER_KEYS = ("optimizer", "optimizer_state_dict", "optimizer_states", "optim")


class SplitState(NamedTuple):
    """Weights by name, state of the optimizer by kind and name, all else by key, tensors not read, and notes."""

    tensors: dict[str, TensorPieces]
    optimizer: dict[str, dict[str, TensorPieces]]
    values: dict[str, Any]
    unread: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def split_state(state: Any, label: str) -> SplitState:
    """Return the parts of what one file holds; `label` is who wrote it."""
    state, notes = without_modules(state)
    model, rest, key_of_model = _model_of(state)
    tensors = {name: whole(name, stored, label) for name, stored in leaves(model, StoredArray)}
    optimizer: dict[str, dict[str, TensorPieces]] = {}
    values: dict[str, Any] = {
        f"{key_of_model}{name}": value for name, value in leaves(model, _NO_TENSOR) if name and not unread_kind(value)
    }
    for key, value in rest.items():
        found = _optimizer_of(value) if key in _OPTIMIZER_KEYS else None
        if found is None:
            values[str(key)] = value
            continue
        names = parameter_names(found, tensors)
        for number, parameter in found["state"].items():
            for kind, stored in leaves(parameter, StoredArray):
                name = names.get(number, str(number))
                optimizer.setdefault(kind, {})[name] = whole(name, stored, label)
        values[f"{key}.param_groups"] = found["param_groups"]
    return SplitState(tensors, optimizer, values, (*left_out(model), *left_out(rest)), notes)


def left_out(state: Any) -> tuple[str, ...]:
    """Return the names of tensors that are not read, each with its kind: sparse, quantized, or of another class."""
    return tuple(f"{name} ({kind})" for name, value in leaves(state, InertObject) if (kind := unread_kind(value)))


def unread_kind(value: Any) -> str:
    """Return the kind of a tensor that is not read, as `sparse_tensor`, from what stands for it; "" of all else."""
    name = value.name if isinstance(value, InertObject) else ""
    return name.rpartition("._rebuild_")[2] if name.startswith("torch.") and "._rebuild_" in name else ""


def without_modules(state: Any) -> tuple[Any, tuple[str, ...]]:
    """Return a state with the tensors of pickled modules in their place, by name, and a note on each module.

    A module may be the whole state, or under one of its keys. Nothing of its class is needed, and nothing is run.

    Raises:
        CheckpointError: modules are nested deeper, or have more parts, than a model has.
    """
    if _is_module(state):
        state, notes = without_modules({"model": state})
        return state["model"], notes
    if not isinstance(state, dict):
        return state, ()
    modules = {key: value for key, value in state.items() if _is_module(value)}
    said = "is a pickled module: its parameters and buffers are read, and no code of it is run"
    notes = tuple(f"{module.name or 'the model'} {said}" for module in modules.values())
    return {**state, **{key: _state_of(module) for key, module in modules.items()}}, notes


def _is_module(value: Any) -> bool:
    return isinstance(value, InertObject) and {"_parameters", "_modules"} <= value.attributes().keys()


def _state_of(module: InertObject) -> dict[str, Any]:
    """Return what `module.state_dict()` has. Source: torch/nn/modules/module.py (`_save_to_state_dict`), 2.13."""
    found: dict[str, Any] = {}
    todo = [("", module, 0)]
    num_seen = 0
    while todo:
        prefix, inner, depth = todo.pop()
        has = inner.attributes()
        num_seen += 1
        if depth > _MAX_DEPTH or num_seen > _MAX_MODULES:
            raise CheckpointError(f"{prefix[:60]!r} is nested too deep or wide: save the state_dict of the model")
        passing = has.get("_non_persistent_buffers_set") or ()
        buffers = {key: value for key, value in _items(has.get("_buffers")) if key not in passing}
        found |= {f"{prefix}{key}": value for key, value in (*_items(has.get("_parameters")), *buffers.items())}
        children = [(key, child) for key, child in _items(has.get("_modules")) if _is_module(child)]
        todo.extend((f"{prefix}{key}.", child, depth + 1) for key, child in reversed(children))
    return {name: value for name, value in found.items() if value is not None}


def _items(value: Any) -> list[tuple[Any, Any]]:
    return list(value.items()) if isinstance(value, dict) else []


def _model_of(state: Any) -> tuple[Any, Mapping[Any, Any], str]:
    """Return the weights, all else, and the key of the weights with a dot behind it, "" if they have none."""
    if not isinstance(state, dict):
        return state, {}, ""
    for key in MODEL_KEYS:
        inner = state.get(key)
        if isinstance(inner, dict) and next(leaves(inner, StoredArray), None) is not None:
            return inner, {other: value for other, value in state.items() if other != key}, f"{key}."
    if isinstance(state.get("param_groups"), list) and isinstance(state.get("state"), dict):
        return {}, {"optimizer": state}, ""
    plain = (str, int, float, bool, bytes, type(None), InertObject)
    loose = {key: value for key, value in state.items() if key in _OPTIMIZER_KEYS or isinstance(value, plain)}
    return {key: value for key, value in state.items() if key not in loose}, loose, ""


def _optimizer_of(value: Any) -> Mapping[str, Any] | None:
    if isinstance(value, list) and len(value) == 1:  # Lightning keeps a list
        value = value[0]
    is_state = isinstance(value, dict) and isinstance(value.get("state"), dict)
    return value if is_state and isinstance(value.get("param_groups"), list) else None


def parameter_names(optimizer: Mapping[str, Any], tensors: Mapping[str, TensorPieces]) -> dict[Any, str]:
    """Return what the numbers of parameters in an optimizer's state stand for, empty where that is not certain.

    torch numbers them in the order of the model, tied ones once. That is taken only if number and shapes agree.
    """
    groups = [group.get("params") for group in optimizer["param_groups"] if isinstance(group, dict)]
    numbers = sorted(number for group in groups if isinstance(group, list) for number in group if type(number) is int)
    tensors = {first: tensors[first] for first in _untied(tensors)}
    if len(numbers) != len(tensors) or numbers != list(range(len(numbers))):
        return {}
    names = dict(zip(numbers, tensors, strict=True))
    for number, name in names.items():
        moment = optimizer["state"].get(number)
        shapes = _shapes(moment.values()) if isinstance(moment, dict) else set()
        if shapes and tensors[name].shape not in shapes:
            return {}
    return names


def _untied(tensors: Mapping[str, TensorPieces]) -> Iterable[str]:
    """Return the names of tensors, of those that share their elements the first."""
    firsts: dict[tuple[Piece, ...], str] = {}
    for name, tensor in tensors.items():
        firsts.setdefault(tuple(tensor.pieces), name)
    return firsts.values()


def _shapes(values: Iterable[Any]) -> set[tuple[int, ...]]:
    return {value.shape for value in values if isinstance(value, StoredArray) and value.shape not in ((), (1,))}
