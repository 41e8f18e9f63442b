"""What in a nested state is a weight, what belongs to the optimizer, and what is neither."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from trainermon.analysis.checkpoint.formats.inert import InertObject, leaves
from trainermon.analysis.checkpoint.pieces import Piece, StoredArray, TensorPieces, whole

MODEL_KEYS = ("model", "module", "state_dict", "model_state_dict", "app", "net")
"""Under which of its keys a training script keeps the weights."""
_OPTIMIZER_KEYS = ("optimizer", "optimizer_state_dict", "optimizer_states", "optim")


class SplitState(NamedTuple):
    """Weights by name, state of the optimizer by kind and name, all else by key, and what was left out."""

    tensors: dict[str, TensorPieces]
    optimizer: dict[str, dict[str, TensorPieces]]
    values: dict[str, Any]
    notes: tuple[str, ...] = ()


def split_state(state: Any, label: str) -> SplitState:
    """Return the parts of what one file holds; `label` is who wrote it."""
    model, rest = _model_of(state)
    tensors = {name: whole(name, stored, label) for name, stored in leaves(model, StoredArray)}
    optimizer: dict[str, dict[str, TensorPieces]] = {}
    values: dict[str, Any] = {}
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
    return SplitState(tensors, optimizer, values, left_out(model))


def left_out(model: Any) -> tuple[str, ...]:
    """Return a note on the tensors that are not read: sparse and quantized ones, and those of classes of their own."""
    found = [
        (name, value.name.rpartition("._rebuild_")[2])
        for name, value in leaves(model, InertObject)
        if value.name.startswith("torch._") and "._rebuild_" in value.name
    ]
    if not found:
        return ()
    name, kind = found[0]
    return (f"{len(found):,} tensors are not read, being sparse, quantized or the like: first {name} ({kind})",)


def _model_of(state: Any) -> tuple[Any, Mapping[Any, Any]]:
    if not isinstance(state, dict):
        return state, {}
    for key in MODEL_KEYS:
        inner = state.get(key)
        if isinstance(inner, dict) and next(leaves(inner, StoredArray), None) is not None:
            return inner, {other: value for other, value in state.items() if other != key}
    if isinstance(state.get("param_groups"), list) and isinstance(state.get("state"), dict):
        return {}, {"optimizer": state}
    plain = (str, int, float, bool, bytes, type(None), InertObject)
    loose = {key: value for key, value in state.items() if key in _OPTIMIZER_KEYS or isinstance(value, plain)}
    return {key: value for key, value in state.items() if key not in loose}, loose


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
