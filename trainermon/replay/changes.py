"""Which state outside of parameters, buffers and the common generators a forward changes.

Decides between a step that is not reproducible and one that depends on more than was kept of it.
"""

from __future__ import annotations

import random
import zlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trainermon.dump.files.verdicts import Reproducibility
from trainermon.dump.torch_tensors import checksum
from trainermon.hooks.names import plain_name
from trainermon.replay.attributes import OF_TORCH, global_generators, has_attributes
from trainermon.replay.precise import has_memory
from trainermon.replay.rerun import ReplayFidelity

MAX_DEPTH = 4
MAX_ITEMS = 256
MAX_NAMES = 4


def fingerprint(models: Sequence[nn.Module]) -> dict[str, str]:
    """Return, by name, a short text for each value in the attributes of modules that changes when the value does.

    Covered are numbers, texts, tensors that are no parameters or buffers, arrays, generators of random numbers, and
    containers and objects of the script's classes that hold them, four levels deep. Waits for the device.
    """
    return dict(_ValueWalk(models).run())


def changed(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """Compare two results of `fingerprint`; return the names whose values differ, appeared or vanished, in order."""
    return sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))


def verdict_on(
    first: Sequence[ReplayFidelity], second: Sequence[ReplayFidelity], changes: Sequence[str], *, is_eager: bool = False
) -> tuple[Reproducibility, str]:
    """Return whether a step is reproducible, and the reason in words, from the results of its forwards in two replays.

    `second` is empty if there was none, `changes` names attributes that a forward changes and that are not restored,
    `is_eager` says that compiled code ran eagerly.
    """
    known = [fidelity.same for fidelity in first if fidelity.same is not None]
    if known and all(known):
        return Reproducibility.REPRODUCIBLE, "the replay's forwards gave the same bits as the step's"
    if not known:
        return Reproducibility.UNKNOWN, "what the step itself gave was not kept, or has been overwritten since"
    if is_eager or not second:
        eagerly = "compiled code was replayed eagerly, which may differ in the last bits"
        return Reproducibility.UNKNOWN, eagerly if is_eager else "the replay differs, and could not be repeated"
    return _differing(first, second, changes)


def _differing(
    first: Sequence[ReplayFidelity], second: Sequence[ReplayFidelity], changes: Sequence[str]
) -> tuple[Reproducibility, str]:
    if [fidelity.marks for fidelity in first] != [fidelity.marks for fidelity in second]:
        reason = "two replays from the same state differ: a race, or a kernel that is not deterministic"
        return Reproducibility.NOT_REPRODUCIBLE, reason
    if changes:
        more = f" and {len(changes) - MAX_NAMES} more" if len(changes) > MAX_NAMES else ""
        names = ", ".join(changes[:MAX_NAMES])
        reason = f"the forward changes {names}{more}, which is not as it was in the step"
        return Reproducibility.STATEFUL, reason
    return (
        Reproducibility.NOT_REPRODUCIBLE,
        "two replays agree with one another, but not with the step: a transient fault, likely the hardware",
    )


class _ValueWalk:
    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._models = models
        self._seen = {id(tensor) for model in models for tensor in (*model.parameters(), *model.buffers())}

    def run(self) -> Iterator[tuple[str, str]]:
        for model in self._models:
            for path, module in model.named_modules():
                name = plain_name(path) or type(module).__name__
                own = {key: value for key, value in vars(module).items() if key not in OF_TORCH and key != "training"}
                for key, value in own.items():
                    yield from self._value(f"{name}.{key}", value, 0)
                for number, value in enumerate(global_generators(type(module))):
                    yield from self._value(f"a global generator of {name}'s class ({number})", value, 0)

    def _value(self, name: str, value: Any, depth: int) -> Iterator[tuple[str, str]]:
        if isinstance(value, nn.Module | type) or id(value) in self._seen:
            return
        text = _text(value)
        if text is not None:
            yield name, text
            return
        if depth < MAX_DEPTH:
            self._seen.add(id(value))
            for key, item in _items(value)[:MAX_ITEMS]:
                yield from self._value(f"{name}{key}", item, depth + 1)


def _text(value: Any) -> str | None:
    """Return a text that changes with `value`; None for what is no plain value."""
    match value:
        case None | bool() | int() | float() | complex() | str() | bytes():
            return repr(value)[:1000]
        case Tensor():
            is_state = has_memory(value) and not value.is_quantized and not value.requires_grad  # FSDP hands out views
            return f"{tuple(value.shape)} {value.dtype} {checksum(value)}" if is_state else "no state"
        case np.ndarray() if value.dtype != object:
            return f"{value.shape} {value.dtype} {zlib.crc32(np.ascontiguousarray(value).tobytes()):08x}"
        case torch.Generator():
            return checksum(value.get_state())
        case _:
            state = _generator_state(value)
            return None if state is None else f"{zlib.crc32(repr(state).encode()):08x}"


def _generator_state(value: Any) -> Any:
    match value:
        case random.Random() if not isinstance(value, random.SystemRandom):
            return value.getstate()
        case np.random.Generator():
            return value.bit_generator.state
        case np.random.RandomState():
            return value.get_state(legacy=False)
        case _:
            return None


def _items(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, Mapping):
        return [(f"[{key!r}]", item) for key, item in value.items()]
    if isinstance(value, list | tuple | deque):
        return [(" (length)", len(value)), *((f"[{number}]", item) for number, item in enumerate(value))]
    if isinstance(value, Set):
        return [("", repr(sorted(map(repr, value))))]
    return [(f".{key}", item) for key, item in vars(value).items()] if has_attributes(value) else []
