"""What a checkpoint holds beside its model: tensors under other keys, steps, arguments, states of generators.

Arguments and configurations are paired by name or known alias, and compared as what they mean (`1e-4` is `0.0001`), by
the rules of `trainermon env compare`; all else by its place.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from enum import Enum
from itertools import islice
from typing import Any, NamedTuple

from trainermon.analysis.checkpoint.formats.inert import InertObject, brief
from trainermon.analysis.checkpoint.formats.state_dicts import unread_kind
from trainermon.analysis.checkpoint.pieces import Checkpoint, StoredArray, TensorPieces, whole
from trainermon.analysis.checkpoint.placed import placed
from trainermon.analysis.checkpoint.sums import read_of
from trainermon.analysis.checkpoint.verdicts import OUTSIDE, ValueDifference
from trainermon.core.errors import CheckpointError

_MAX_DEPTH = 8
_MAX_VALUES = 100_000
_MAX_TEXT = 200
_MAX_ELEMENTS = 1 << 20  # of an array that is compared: states of generators have 5,056 bytes
_NUMPY = tuple(f"numpy {kind}" for kind in "fcVO")  # floats, complex numbers, records and objects
_SETTINGS = ("args.", "config.", "hyper_parameters.")


def value_differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> Iterator[ValueDifference]:
    """Yield the values that differ: first those that both have, the gravest first; then those of one side alone."""
    sides = [
        {key: _comparable(value) for key, value in plain_values(side).items() if not _is_tensor(value)}
        for side in (ours, theirs)
    ]
    settings = [{key: side.pop(key) for key in list(side) if key.startswith(_SETTINGS)} for side in sides]
    found = list(_by_place(*sides))
    if settings[0] or settings[1]:
        named = [{_without_prefix(key): (key, value) for key, value in side.items()} for side in settings]
        found += _by_meaning(*named)
    yield from sorted(found, key=lambda value: (value.is_alone, _GRAVITY.index(value.level)))


_GRAVITY = ("error", "warning", "info")


def _by_place(first: Mapping[str, Any], second: Mapping[str, Any]) -> Iterator[ValueDifference]:
    for key in [*first, *(key for key in second if key not in first)]:
        one, other = first.get(key, _NOTHING), second.get(key, _NOTHING)
        if not _are_equal(one, other):
            is_array = any(isinstance(side, ArrayDigest) and side.dtype.startswith(_NUMPY) for side in (one, other))
            yield ValueDifference(key, _text(one), _text(other), is_array=is_array)


def _by_meaning(
    first: Mapping[str, tuple[str, Any]], second: Mapping[str, tuple[str, Any]]
) -> Iterator[ValueDifference]:
    if first.keys() == second.keys() and all(_are_equal(first[key][1], second[key][1]) for key in first):
        return  # as mostly: the rules need not be loaded
    from trainermon.analysis.environment.differences import DifferenceLevel
    from trainermon.analysis.environment.rules import LevelRules
    from trainermon.analysis.environment.settings import compare_hyperparameters

    plain = [{key: value for key, (_, value) in side.items()} for side in (first, second)]
    for row in compare_hyperparameters(plain[0], plain[1], LevelRules()):
        if row.level is DifferenceLevel.SAME:
            continue
        texts = [
            (*side[name][:1], _text(side[name][1])) if name is not None else (None, None)
            for side, name in zip((first, second), row.names, strict=True)
        ]
        key = texts[0][0] or texts[1][0] or ""
        yield ValueDifference(key, texts[0][1], texts[1][1], row.level.value, texts[1][0] if texts[0][0] else None)


def _without_prefix(key: str) -> str:
    return next((key.removeprefix(prefix) for prefix in _SETTINGS if key.startswith(prefix)), key)


def plain_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested values by their places, as `args.lr`; at most 100 000 of them."""
    found: dict[str, Any] = {}
    for key, value in _walk("", values, 0):
        found[key] = value
        if len(found) >= _MAX_VALUES:
            break
    return found


class _Nothing(Enum):
    NOTHING = ""


_NOTHING = _Nothing.NOTHING


class ArrayDigest(NamedTuple):
    """What tells arrays apart that are compared as a whole: the state of a generator, or what numpy pickled."""

    dtype: str
    shape: tuple[int, ...]
    digest: str

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)} {self.digest}"


def _walk(key: str, value: Any, depth: int) -> Iterator[tuple[str, Any]]:
    state = getattr(value, "state", None)
    inside = value if isinstance(value, Mapping | list | tuple) else state if isinstance(state, Mapping) else None
    if inside is None or depth >= _MAX_DEPTH:
        yield key, value
        return
    items = inside.items() if isinstance(inside, Mapping) else enumerate(inside)
    for name, item in items:
        yield from _walk(f"{key}.{name}" if key else str(name), item, depth + 1)


def tensors_beside(checkpoint: Checkpoint) -> dict[str, Mapping[str, TensorPieces]]:
    """Return all tensors of a checkpoint that the model does not have: those of the optimizer, by kind, and others.

    Others, as a moving average of the weights or a second model, have the kind `OUTSIDE` and the key that they are
    under. Bytes in one dimension, as generators have their states, are values.
    """
    found: dict[str, dict[str, TensorPieces]] = {}
    beside = {place: value for place, value in plain_values(checkpoint.values).items() if _is_tensor(value)}
    kinds = checkpoint.optimizer.values() if beside else ()
    known = {piece.stored for kind in kinds for tensor in kind.values() for piece in tensor.pieces}
    for place, value in beside.items():
        if value not in known:  # as DeepSpeed's without ZeRO, which stands among the values, too
            key, _, rest = place.partition(".")
            name = rest or key
            found.setdefault(f"{OUTSIDE}{key}", {})[name] = whole(name, value, value.path.name)
    return {**checkpoint.optimizer, **found}


def _is_tensor(value: Any) -> bool:
    if not isinstance(value, StoredArray):
        return False
    return value.dtype != "uint8" or len(value.shape) != 1 or value.num_elements > _MAX_ELEMENTS


def _comparable(value: Any) -> Any:
    """Return a value such that equal ones are equal here, in whatever file they are."""
    if isinstance(value, StoredArray):
        return ArrayDigest(value.dtype, value.shape, _digest(value))
    if isinstance(value, InertObject):
        return _numpy_array(value) or _said(value)
    if isinstance(value, type):
        return getattr(value, "name", value.__name__)
    if isinstance(value, set | frozenset):
        return "{" + ", ".join(sorted(repr(_comparable(part)) for part in value)) + "}"
    return _digest(value) if isinstance(value, Mapping | list | tuple) else value  # nested deeper than is looked at


def _numpy_array(value: InertObject) -> ArrayDigest | None:
    state = value.state
    if not value.name.startswith("numpy") or not isinstance(state, tuple) or len(state) != 5:
        return None
    kind = state[2].arguments[:1] if isinstance(state[2], InertObject) else ()
    shape = state[1] if isinstance(state[1], tuple) else ()
    return ArrayDigest(f"numpy {brief(kind[0] if kind else None).strip(chr(39))}", shape, _digest(state))


def _said(value: InertObject) -> str:
    """Return an object of an unknown class as text: its name and arguments, as an enumeration has them.

    What that does not show has a digest at the end, as has the kind of a tensor that is not read.
    """
    if kind := unread_kind(value):
        return f"{kind} {_digest(value)}"
    texts = [_said(part) if isinstance(part, InertObject) else repr(part) for part in value.arguments[:4]]
    has_more = len(value.arguments) > 4 or value.entries or value.state or any(len(text) > 40 for text in texts)
    said = f"{value.name}({', '.join(text[:40] for text in texts)})"
    return f"{said} {_digest(value)}" if has_more else said


def _digest(value: Any) -> str:
    found = hashlib.blake2b(digest_size=6)
    for part in islice(_parts(value, 0), _MAX_VALUES):
        found.update(part)
    return found.hexdigest()


def _parts(value: Any, depth: int) -> Iterator[bytes]:
    """Yield all that a value holds as bytes."""
    if isinstance(value, InertObject):
        yield value.name.replace("numpy._core.", "numpy.core.").encode()
        value = (value.arguments, value.state, value.entries)
    if isinstance(value, Mapping):
        value = list(value.items())
    if isinstance(value, list | tuple) and depth < 2 * _MAX_DEPTH and not isinstance(value, ArrayDigest):
        yield f"{len(value)}:".encode()
        for part in value:
            yield from _parts(part, depth + 1)
    elif isinstance(value, StoredArray):
        yield f"{value.dtype}{value.shape}".encode()
        yield from _bytes_of(value)
    elif isinstance(value, list | tuple):
        yield b"..."
    else:
        yield value if isinstance(value, bytes) else f"{_comparable(value)!r},".encode("utf-8", "surrogatepass")


def _bytes_of(stored: StoredArray) -> Iterator[bytes]:
    """Yield the elements; of what cannot be read, or is too large to be in memory, the place instead."""
    try:
        if stored.num_elements <= _MAX_ELEMENTS:
            yield from (read_of(view).tobytes() for view in placed(whole("", stored, "")).views)
            return
    except CheckpointError:
        pass
    yield f"{stored.path}:{stored.offset}".encode("utf-8", "surrogateescape")


def _are_equal(one: Any, other: Any) -> bool:
    """Return whether two values are the same; 1 and 1.0 are, and so are NaN and NaN."""
    is_nan = isinstance(one, float) and isinstance(other, float) and math.isnan(one) and math.isnan(other)
    return is_nan or bool(one == other)


def _text(value: Any) -> str | None:
    if value is _NOTHING:
        return None
    text = str(value) if isinstance(value, str | ArrayDigest) else repr(value)
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}… {_digest(text)}"
