"""The rows of a dump: every argument, parameter and result of every call, under msprobe's row names.

Decides what a row is called and which calls are numbered anew; matching and judging happen elsewhere. Standard library
only. Named tuples instead of dataclasses: a dump has hundreds of thousands of rows, and these are built much faster.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from trainermon.analysis.compare.frameworks import MINDSPORE, PYTORCH
from trainermon.analysis.compare.merging.assembly import TensorAssembly
from trainermon.dump.files.reader import RawDump, load_raw, split_key, well_formed
from trainermon.dump.files.records import (
    BACKWARD,
    BUFFERS,
    CONSTRUCT_FILE,
    DUMP_FILE,
    EXTRA,
    HOOKED,
    LATER,
    PARAMETERS_GRAD,
    RECOMPUTED,
    TENSOR_FOLDER,
    UNSEEN,
)

INPUT = "input"
PARAMETERS = "parameters"
OUTPUT = "output"
MODULE = "Module"
CHECKSUM_KEYS = ("crc32c", "xxh64", "xxh3_64", "crc32", "md5")
_CHECKSUMS = frozenset(CHECKSUM_KEYS)
_SHARDED = "FSDP"  # what `fully_shard` puts before the class of a module
_TENSOR_TYPES = ("torch.Tensor", "mindspore.Tensor")
Value = tuple[object, ...]
RecomputedPart = tuple[int, int]
"""The place in the pipeline of the rank, and the number of the part there that one checkpoint spans."""
_NO_ATTRIBUTES: Mapping[str, Any] = MappingProxyType({})
_NUMBERS = {"int", "float", "bool"}
_MODULES = ("Module.", "Cell.")  # Cell: MindSpore's word


class DumpRow(NamedTuple):
    """One argument, parameter or result of a call in one dump, with its statistics.

    `place` is its position in the call (`input.0`, `parameters.weight`), `state` the first word of that. `dtype` and
    `shape` are None where there is no value, `shape` alone where the dump did not look at it. `max`, `min`, `mean`,
    `norm` are numbers, None, or for a text argument the text. `nans` and `infs` count elements; None: not counted.
    `checksum` is (algorithm, digits), `data_name` the name of the tensor's file. `more` is what else tells such tensors
    apart: of truth values the number of zeros, of complex numbers the statistics of their parts; None where there is
    nothing more. `merged` says what the row was put together from (`2 parts, tp`); "": it was dumped as it is.
    `is_summand`: its ranks' parts are to be added up. `is_hooked`: of a gradient, a hook that the script has registered
    since the dump began may have changed it after it was seen.
    """

    place: str
    state: str
    dtype: str | None = None
    shape: tuple[int, ...] | None = None
    requires_grad: bool | None = None
    max: Any = None
    min: Any = None
    mean: Any = None
    norm: Any = None
    nans: int | None = None
    infs: int | None = None
    checksum: tuple[str, str] | None = None
    data_name: str | None = None
    more: Any = None
    merged: str = ""
    is_summand: bool = False
    is_hooked: bool = False

    @property
    def is_tensor(self) -> bool:
        """Whether the row is a tensor, not a plain argument such as a number."""
        return self.requires_grad is not None

    @property
    def has_values(self) -> bool:
        """Whether anything is known of its values: statistics, or that it has no element.

        Not of what a dump did not look at: it has a type, and no shape.
        """
        if self.shape is None:
            return self.dtype is None
        known = (self.max, self.min, self.mean, self.norm)
        return not (self.is_tensor and known == (None, None, None, None)) or not self.num_elements

    @property
    def num_elements(self) -> int:
        """Number of elements of the tensor, from its shape."""
        return math.prod(self.shape or ())

    @property
    def num_nonfinite(self) -> int | None:
        """Number of elements that are NaN or infinite, None if the dump does not tell."""
        return None if self.nans is None or self.infs is None else self.nans + self.infs

    @property
    def nonfinite(self) -> bool:
        """Whether an element is NaN or infinite: by the counts where there are any, else by the statistics.

        The mean of finite elements may be infinite; it is asked where there are no extrema.
        """
        counted = self.num_nonfinite
        if counted is not None:
            return counted > 0
        if self.max is None or self.min is None:
            return _unbounded(self.mean)
        return _unbounded(self.max) or _unbounded(self.min)


def value_of(item: DumpRow) -> Value | None:
    """Return a key made of a tensor's type, shape and statistics: equal values have equal keys.

    None where it would be ambiguous: for tensors that are constant or all NaN, or whose statistics are not known.
    """
    if not item.is_tensor or (item.max is not None and (item.max == item.min or item.max != item.max)):
        return None
    if item.max is not None:
        return item.max, item.min, item.norm
    return item.checksum


def _unbounded(value: Any) -> bool:
    return value.__class__ is float and not -math.inf < value < math.inf


class DumpCall(NamedTuple):
    """One entry of a dump: a forward or backward of a module or a function, or the gradients of a module's parameters.

    Attributes:
        key: The entry's name, `Module.h.0.Linear.forward.2`.
        family: Its first part: `Module`, `Functional`, `Tensor` …
        name: The module with its class, or the function.
        direction: `forward`, `backward` or `parameters_grad`.
        number: How many calls of that name came before.
        scope: Path of the innermost module around it, "" if there is none or it is not known.
        items: What it took and gave.
        attributes: Settings of one of the framework's own modules, by name, at its forward; empty where none are known.
    """

    key: str
    family: str
    name: str
    direction: str
    number: int
    scope: str
    items: tuple[DumpRow, ...]
    attributes: Mapping[str, Any] = _NO_ATTRIBUTES

    @property
    def path(self) -> str:
        """Path of a module, without its class."""
        return self.name.rpartition(".")[0]


class DumpRows(NamedTuple):
    """All calls of one dump, as they are compared.

    Attributes:
        directory: Folder of the dump.
        task: What was recorded: `statistics`, `tensor` …
        calls: In the order of the file.
        parents: Key of the enclosing call, by the call's key.
        stacks: By a call's key, the lines of the script that made it, innermost first.
        sources: Where the tensors are that do not lie in the dump's own folder, by their name.
        recomputed: By the keys of backwards whose forward ran a second time for them (activation checkpointing), of
            which the dump has nothing: which part of the model ran again at once; None where that is not known.
        whole: The calls of the model as a whole, which are none of `calls`.
        scoped: Whether functions are matched by the module in which they are called, as their numbers depend on how the
            model is spread over ranks.
    """

    directory: Path
    task: str
    calls: tuple[DumpCall, ...]
    parents: Mapping[str, str]
    stacks: Mapping[str, tuple[str, ...]]
    sources: Mapping[str, Path | TensorAssembly] = MappingProxyType({})
    recomputed: Mapping[str, RecomputedPart | None] = MappingProxyType({})
    scoped: bool = False
    whole: tuple[DumpCall, ...] = ()

    @property
    def framework(self) -> str:
        """`pytorch` or `mindspore`, by the names of dtypes; `pytorch` where there is no tensor."""
        dtypes = (item.dtype for call in self.calls for item in call.items if item.is_tensor and item.dtype)
        return PYTORCH if next(dtypes, "torch.").startswith("torch.") else MINDSPORE

    @property
    def has_tensors(self) -> bool:
        """Whether the dump has the tensors themselves in files, not their statistics alone."""
        return any(item.data_name for call in self.calls for item in call.items)

    @property
    def has_checksums(self) -> bool:
        """Whether any tensor of the dump has a checksum."""
        return any(item.checksum for call in self.calls for item in call.items)

    def tensor_path(self, item: DumpRow) -> Path | TensorAssembly | None:
        """Return the file with the elements of the row's tensor, or the parts it is put together from.

        None if not saved. Only the last part of a file name that the dump gives is used: nothing outside of its folder
        is read.
        """
        if item.data_name is not None and item.data_name in self.sources:
            return self.sources[item.data_name]
        return self.directory / TENSOR_FOLDER / Path(item.data_name).name if item.data_name else None


def read_rows(path: Path) -> DumpRows:
    """Return the rows of the dump in the directory `path`, or of which `path` is the dump.json.

    Raises:
        DumpError: there is no dump, or it is damaged.
    """
    directory = path.parent if path.name == DUMP_FILE else path
    raw = load_raw(directory)
    with well_formed(directory):
        return _rows(directory, raw)


def _rows(directory: Path, raw: RawDump) -> DumpRows:
    parents = {key: parent for key, value in raw.construct.items() if (parent := _parent(value)) is not None}
    _refuse_cycles(parents)
    return DumpRows(
        directory=directory,
        task=raw.task,
        calls=tuple(_calls(raw.data, parents)),
        whole=tuple(_calls(raw.root, {})),
        parents=parents,
        stacks=dict(_stacks(raw)),
        recomputed=dict(_recomputed(raw)),
    )


def _recomputed(raw: RawDump) -> Iterator[tuple[str, RecomputedPart | None]]:
    for key, value in raw.data.items():
        part = _extra(value).get(RECOMPUTED) if f".{BACKWARD}" in key and isinstance(value, dict) else None
        if part:
            yield key, None if part is True else (0, part)


def _stacks(raw: RawDump) -> Iterator[tuple[str, tuple[str, ...]]]:
    for names, frames in raw.stacks.values():
        stack = tuple(frames)
        yield from ((name, stack) for name in names)


def _parent(value: Any) -> str | None:
    first = value[0] if isinstance(value, list) and value else value
    return first if isinstance(first, str) else None


def _refuse_cycles(parents: Mapping[str, str]) -> None:
    """Raise a ValueError if a call encloses itself."""
    sound: set[str] = set()
    for key in parents:
        path: dict[str, None] = {}
        above: str | None = key
        while above is not None and above not in sound:
            if above in path:
                raise ValueError(f"{CONSTRUCT_FILE}: {above} is said to enclose itself")
            path[above] = None
            above = parents.get(above)
        sound.update(path)


def _calls(data: Mapping[str, Any], parents: Mapping[str, str]) -> Iterator[DumpCall]:
    for key, value in data.items():
        if not isinstance(value, dict):
            continue
        name, family, direction, number = split_key(key)
        is_module = key.startswith(_MODULES)
        yield DumpCall(
            key=key,
            family=MODULE if is_module else family,
            name=f"{name}.{family.removeprefix(_SHARDED)}" if is_module else name,
            direction=direction,
            number=number,
            scope=split_key(parents[key])[0] if key in parents else "",
            items=tuple(rows_of_entry(value, direction)),
            attributes=_attributes(value),
        )


def rows_of_entry(value: Mapping[str, Any], direction: str) -> list[DumpRow]:
    """Return the rows of one entry of dump.json, in its order."""
    items: list[DumpRow] = []
    if direction == PARAMETERS_GRAD:
        for name, forms in value.items():
            if isinstance(forms, list) and forms:
                _add(items, forms[0], name, OUTPUT)
        return items
    for forms, word, state in (
        (value.get("input_args", value.get("input")), INPUT, INPUT),
        (value.get("input_kwargs"), INPUT, INPUT),
        (value.get("parameters"), PARAMETERS, PARAMETERS),
        (_extra(value).get(BUFFERS), BUFFERS, BUFFERS),
        (value.get("output"), OUTPUT, OUTPUT),  # a list, or of a named tuple an object
        (value.get("output_kwargs"), OUTPUT if direction == BACKWARD else INPUT, OUTPUT),
    ):
        if forms:
            _add(items, forms, word, state)
    return items


def _attributes(value: Mapping[str, Any]) -> Mapping[str, Any]:
    found = _extra(value).get("attributes")
    return found if isinstance(found, dict) else _NO_ATTRIBUTES


def _extra(value: Mapping[str, Any]) -> Mapping[str, Any]:
    extra = value.get(EXTRA)
    return extra if isinstance(extra, dict) else {}


def _add(items: list[DumpRow], form: Any, place: str, state: str) -> None:
    """Append the rows of a value; a list and not a generator, as a dump has hundreds of thousands of values."""
    if isinstance(form, dict):
        kind = form.get("type")
        if kind in _TENSOR_TYPES or (isinstance(form.get("dtype"), str) and isinstance(form.get("shape"), list)):
            items.append(_tensor(form, sys.intern(place), state))
        elif isinstance(kind, str):
            items.append(_argument(form, sys.intern(place), state))
        else:
            for part, inner in form.items():
                _add(items, inner, f"{place}.{part}", state)
    elif isinstance(form, list):
        for index, inner in enumerate(form):
            _add(items, inner, f"{place}.{index}", state)
    else:
        items.append(DumpRow(sys.intern(place), state))


def _tensor(form: Mapping[str, Any], place: str, state: str) -> DumpRow:
    get = form.get
    name = get("data_name")
    checksum = None
    if not _CHECKSUMS.isdisjoint(form):
        kind = next(kind for kind in CHECKSUM_KEYS if kind in form)
        checksum = kind, str(form[kind])
    return DumpRow(
        place,
        state,
        sys.intern(str(get("dtype"))),
        _shape(tuple(get("local_shape", get("shape")) or ())),
        bool(get("requires_grad")),
        get("Max"),
        get("Min"),
        get("Mean"),
        get("Norm"),
        get("nans"),
        get("infs"),
        checksum,
        None if name is None else sys.intern(name),  # raises where it is no text
        get("zeros") if get("dtype") == "torch.bool" else _parts(get("parts")),
        is_summand="placements" in form and any("Partial" in placement for placement in form["placements"]),
        is_hooked=get(HOOKED) == LATER,
    )


def _parts(form: Any) -> tuple[Any, ...] | None:
    return None if form is None else (form["Max"], form["Min"], form["Mean"])


@functools.lru_cache(maxsize=1 << 16)
def _shape(sizes: tuple[Any, ...]) -> tuple[int, ...]:
    """Return `sizes`, each once in memory; they are multiplied later."""
    if not all(isinstance(size, int) for size in sizes):
        raise TypeError(f"shape {list(sizes)} has something else than numbers")
    return sizes


def _argument(form: Mapping[str, Any], place: str, state: str) -> DumpRow:
    kind, value = form["type"], form.get("value")
    if value == UNSEEN and kind != "str":
        return DumpRow(place, state, kind)
    if kind in _NUMBERS or kind == "str":
        return DumpRow(place, state, f"<class '{kind}'>", (), None, value, value, value, value)
    if isinstance(value, list):
        shape = tuple(part for part in value if isinstance(part, int))
        return DumpRow(place, state, kind, shape)
    return DumpRow(place, state, kind, (), None, value, value, value, value)
