"""Reads a dump, ours or msprobe's, complete or cut off by a killed process. Needs no torch."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainermon.core.environment.literals import masked_code
from trainermon.core.errors import DumpError
from trainermon.dump.files.records import (
    BACKWARD,
    CONSTRUCT_FILE,
    DEBUG_FILE,
    DUMP_FILE,
    EXTRA,
    FORWARD,
    INFO_FILE,
    LINES_BYTES,
    PARAMETERS_GRAD,
    PARTIAL_FILE,
    STACK_FILE,
    TENSOR_FOLDER,
    TENSOR_SUFFIXES,
    Dump,
    DumpInfo,
    EntryRecord,
    RankLayout,
    TensorRecord,
)
from trainermon.dump.files.verdicts import NonfiniteCause, OperationVerdict, Reproducibility

try:
    from orjson import loads as _loads_finite
except ImportError:  # the extra `compare` brings it
    _loads_finite = json.loads  # type: ignore[assignment]  # it takes more than is passed here

# What is raised where a file is JSON, but not laid out as one of a dump.
_MALFORMED = (AttributeError, LookupError, OverflowError, RecursionError, TypeError, ValueError)
DAMAGED_ENTRY = "its entry is damaged"
"""What the reason begins with that a damaged entry is not read for."""

_FILE_NAME = re.compile(rb'"data_name"\s*:\s*("(?:[^"\\]|\\.)*")')
_DIRECTIONS = (FORWARD, BACKWARD, PARAMETERS_GRAD)
_INFO_FIELDS = {field.name for field in dataclasses.fields(DumpInfo)}
_OPERATION_FIELDS = {field.name for field in dataclasses.fields(OperationVerdict)}


@dataclasses.dataclass(slots=True)
class RawDump:
    """The files of one rank's dump, parsed from JSON but not yet turned into records.

    Attributes:
        task: What was recorded: `statistics`, `tensor` …
        level: `L0` modules, `L1` functions, `mix` both, `debug` variables.
        info: The file of facts about the whole dump (`DumpInfo`).
        data: Entries by key, as in dump.json.
        root: Entries of the model as a whole, by key.
        construct: The key of each call's parent, by the call's key (construct.json).
        stacks: By number: the keys of the calls that share a stack, and its frames (stack.json).
    """

    task: str = ""
    level: str = ""
    info: dict[str, Any] = dataclasses.field(default_factory=dict)
    data: dict[str, Any] = dataclasses.field(default_factory=dict)
    root: dict[str, Any] = dataclasses.field(default_factory=dict)
    construct: dict[str, Any] = dataclasses.field(default_factory=dict)
    stacks: dict[str, tuple[list[str], list[str]]] = dataclasses.field(default_factory=dict)


def read_dump(directory: Path) -> Dump:
    """Return the dump of one rank and step in the folder `directory` (dump.json, stack.json, construct.json, info).

    A dump whose writer was killed is read up to its last whole line and has `info.complete` False. Missing stack,
    construct and info files are no error: msprobe can be told not to write them.

    Raises:
        DumpError: there is no dump, or it is damaged.
    """
    directory = Path(directory)
    return parse_dump(directory, load_raw(directory))


def parse_dump(directory: Path, raw: RawDump, damaged: dict[str, str] | None = None) -> Dump:
    """Return the dump in the folder `directory` whose parsed JSON files are `raw`, as `load_raw` returns them.

    With `damaged` an entry that cannot be read has no tensors, and what is wrong with it is put there by its key.

    Raises:
        DumpError: It is damaged.
    """
    with well_formed(directory):
        entries = list(_entries(raw, raw.data, directory, damaged))
        return Dump(
            directory=directory,
            task=raw.task,
            level=raw.level,
            info=_info(raw.info),
            entries=tuple(sorted(entries, key=_order)),
            root=tuple(_entries(raw, raw.root, directory)),
        )


def is_spoiled(key: str, damaged: Mapping[str, str]) -> bool:
    """Return whether the forward or backward of the function that has this key is among the damaged entries."""
    stem = key.rpartition(".")[0]
    return any(f"{stem}.{direction}" in damaged for direction in (FORWARD, BACKWARD))


@contextlib.contextmanager
def well_formed_entry() -> Iterator[None]:
    """Return a context in which errors from a wrongly structured entry become a DumpError: DAMAGED_ENTRY, and which.

    Raises:
        DumpError: Something in it has another type or shape than in a dump.
    """
    try:
        yield
    except _MALFORMED as error:
        raise DumpError(f"{DAMAGED_ENTRY}: {type(error).__name__}: {error}") from error


@contextlib.contextmanager
def well_formed(directory: Path) -> Iterator[None]:
    """Return a context in which errors from a wrongly structured dump (a missing key, a wrong type) become DumpError.

    `directory` is named in the message.

    Raises:
        DumpError: Something has another type or shape than in a dump.
    """
    try:
        yield
    except _MALFORMED as error:
        raise DumpError(
            f"{directory} is not laid out as a dump ({type(error).__name__}: {error}): it is damaged"
        ) from error


def load_raw(directory: Path) -> RawDump:
    """Return the parsed JSON files of the dump in `directory`: the final files, or the lines of an unfinished dump.

    Raises:
        DumpError: there is no dump, or it is damaged.
    """
    with well_formed(directory):
        return _load_raw(directory)


def _load_raw(directory: Path) -> RawDump:
    partial = directory / PARTIAL_FILE
    for path in (directory / DUMP_FILE, partial):
        if path.exists() and not path.is_file():
            raise DumpError(f"{path} is no file")
    if (directory / DUMP_FILE).exists():
        raw = _load_files(directory)
        if not partial.exists() or partial.stat().st_size <= raw.info.get(LINES_BYTES, math.inf):
            return raw
    if partial.exists():  # it has all that was there when the files were put in place, and what came after
        raw = load_partial(partial)
        raw.info["complete"] = False
        return raw
    raise DumpError(f"{directory} holds no dump: expected {DUMP_FILE}, or {PARTIAL_FILE} of a killed process")


def gap_notes(*directories: Path) -> tuple[str, ...]:
    """Return a sentence for each of these dumps that is not whole: it is cut off, or entries or files were lost.

    That writing went well is not known of a dump without info, as msprobe's. Cost: one search for names of files
    through dump.json where there are any.
    """
    return tuple(note for directory in directories for note in _gaps_of(directory))


def _gaps_of(directory: Path) -> Iterator[str]:
    partial = directory / PARTIAL_FILE
    try:
        info = _load_json(directory / INFO_FILE) if (directory / DUMP_FILE).is_file() else {}
        is_cut = partial.is_file() and (not info or partial.stat().st_size > info.get(LINES_BYTES, math.inf))
        num_errors = info.get("errors")
    except (AttributeError, DumpError, OSError, *_MALFORMED):
        return  # whoever reads its entries says what is wrong
    if is_cut:
        yield f"{directory} is cut off: its process ended in the middle of the step, and what came after is missing"
    if isinstance(num_errors, int) and num_errors > 0:
        lost = "1 error cost entries or files" if num_errors == 1 else f"{num_errors:,} errors cost entries or files"
        yield f"{directory} is not whole: {lost}; the first: {info.get('first_error')}"
    if not is_cut and (number := _num_unnamed(directory)):
        files = "1 file" if number == 1 else f"{number:,} files"
        lost = f"entries of {DUMP_FILE} are gone or damaged"
        yield f"{directory} is not whole: {TENSOR_FOLDER} has {files} that no entry names: {lost}"


def _num_unnamed(directory: Path) -> int:
    """Return how many files of tensors no entry names; 0 of a dump that is cut off before its files got their names."""
    found = {path.name for path in (directory / TENSOR_FOLDER).glob("*") if path.suffix in TENSOR_SUFFIXES}
    for name in (DUMP_FILE, DEBUG_FILE, INFO_FILE):  # msprobe puts files of both levels into one folder
        path = directory / name
        if found and path.is_file():
            named = (json.loads(text) for text in _FILE_NAME.findall(path.read_bytes()))
            found.difference_update(Path(name).name for name in named)
    return len(found)


def read_stacks(directory: Path) -> dict[str, tuple[str, ...]]:
    """Return, by a call's key, the lines of the script that made it, innermost first; empty where none were dumped.

    Reads stack.json alone, or the lines of a dump that was cut off.

    Raises:
        DumpError: The file is damaged.
    """
    directory = Path(directory)
    with well_formed(directory):
        if not (directory / DUMP_FILE).exists() and (directory / PARTIAL_FILE).is_file():
            stacks = load_partial(directory / PARTIAL_FILE).stacks
        else:
            stacks = _load_stacks(directory)
        return {key: tuple(frames) for keys, frames in stacks.values() for key in keys}


def stack_of(stacks: Mapping[str, Sequence[str]], key: str) -> tuple[str, ...]:
    """Return the lines of the script that made the call `key`, of `stacks` by key; of a backward those of its forward.

    Empty where they were not dumped.
    """
    return tuple(stacks.get(key) or stacks.get(f".{FORWARD}".join(key.rsplit(f".{BACKWARD}", 1)), ()))


def load_partial(path: Path) -> RawDump:
    """Return what the final files of a dump would hold, from the file of lines `path` that its writer left.

    What follows a line that is cut off or damaged is left out with it.
    """
    raw = RawDump()
    for line in path.read_bytes().splitlines():
        try:
            record = parse_json(line)
        except (ValueError, RecursionError):
            break
        _add_line(raw, record)
    return raw


def _add_line(raw: RawDump, record: dict[str, Any]) -> None:
    match record:
        case {"info": info, "task": task, "level": level}:
            raw.info, raw.task, raw.level = info, task, level
        case {"frames": frames, "stack": number}:
            raw.stacks[str(number)] = ([], list(map(masked_code, frames)))
        case {"node": key, "parent": parent}:
            raw.construct[key] = parent
            if "stack" in record:
                raw.stacks[str(record["stack"])][0].append(key)
        case {"root": key, "value": value}:
            raw.root[key] = value
        case {"key": key, "value": value}:
            raw.data[key] = value
            if "parent" in record:
                raw.construct[key] = record["parent"]
            if "stack" in record:
                raw.stacks[str(record["stack"])][0].append(key)


def _load_files(directory: Path) -> RawDump:
    dumped = _load_json(directory / DUMP_FILE)
    if not isinstance(dumped, dict) or not isinstance(dumped.get("data"), dict):
        raise DumpError(f'{directory / DUMP_FILE} has no "data" object: not a dump')
    info = _load_json(directory / INFO_FILE) or {}
    return RawDump(
        task=str(dumped.get("task", "")),
        level=str(dumped.get("level", "")),
        info=info,
        data=dumped["data"],
        root=info.get("root", {}),
        construct=_load_json(directory / CONSTRUCT_FILE) or {},
        stacks=_load_stacks(directory),
    )


def _load_stacks(directory: Path) -> dict[str, tuple[list[str], list[str]]]:
    """Return stack.json, in whose lines others than we may have left secrets."""
    found = _load_json(directory / STACK_FILE) or {}
    return {key: (value[0], list(map(masked_code, value[1]))) for key, value in found.items()}


def _load_json(path: Path) -> Any:
    try:
        return parse_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise DumpError(f"{path} is not JSON ({error}): the dump is damaged, or still being written") from error


def parse_json(text: bytes) -> Any:
    """Return what JSON stands for; an integer of more digits than Python reads is infinite.

    orjson needs two thirds of the time, but knows no NaN, Infinity and huge integer.

    Raises:
        ValueError: It is not JSON.
    """
    if b"NaN" not in text and b"Infinity" not in text:
        with contextlib.suppress(ValueError):
            return _loads_finite(text)
    return json.loads(text, parse_int=read_integer)


def read_integer(digits: str) -> int | float:
    """Return an integer; as an infinite number where Python refuses to read as many digits."""
    try:
        return int(digits)
    except ValueError:
        return float(digits)


def _info(values: Mapping[str, Any]) -> DumpInfo:
    known = {name: value for name, value in values.items() if name in _INFO_FIELDS}
    lists = {name: tuple(known.get(name, ())) for name in ("notes", "absent", "bad_shards", "float64_modules")}
    verdicts: dict[str, Any] = {"operations": tuple(map(_operation, known.get("operations", ())))}
    if known.get("reproducibility") is not None:
        verdicts["reproducibility"] = Reproducibility(known["reproducibility"])
    for field in dataclasses.fields(DumpInfo):
        _check_plain(field, known.get(field.name, field.default))
    return DumpInfo(**{**known, **lists, **verdicts, "layout": read_layout(known.get("layout"))})


def _check_plain(field: dataclasses.Field[Any], value: Any) -> None:
    """Refuse a value of another type than the field's, where that is a text, a number, a truth value or None."""
    plain = {"str": str, "int": int, "bool": bool}.get(str(field.type).removesuffix(" | None"))
    is_missing = value is None and field.default is None
    if plain is not None and not is_missing and not isinstance(value, plain):
        raise TypeError(f"{field.name} is {value!r}, expected {field.type}")


def read_layout(values: Mapping[str, Any] | None) -> RankLayout:
    """Return the `RankLayout` (the rank's position, and its part of the model) stored in a dump's info.

    `values` is the parsed JSON; None gives the layout of a model that is not split.
    """
    if not values:
        return RankLayout()
    return RankLayout(
        axes={axis: (int(place), int(size)) for axis, (place, size) in values.get("axes", {}).items()},
        splits={name: (dim, stride) for name, (dim, stride) in values.get("splits", {}).items()},
        partial=tuple(values.get("partial", ())),
        renamed=dict(values.get("renamed", {})),
    )


def _operation(value: Mapping[str, Any]) -> OperationVerdict:
    fields = {name: item for name, item in value.items() if name in _OPERATION_FIELDS}
    return OperationVerdict(**{**fields, "cause": NonfiniteCause(fields["cause"])})


def _entries(
    raw: RawDump, data: Mapping[str, Any], directory: Path, damaged: dict[str, str] | None = None
) -> Iterator[EntryRecord]:
    stack_of = {name: tuple(frames) for names, frames in raw.stacks.values() for name in names}
    for position, (key, value) in enumerate(data.items()):
        if not isinstance(value, dict):
            if damaged is None:
                continue
            damaged[key] = f"{DAMAGED_ENTRY}: found {type(value).__name__}, expected an object"
            value = {}  # the call was made: it is told, without what it was given
        module, class_name, direction, call = split_key(key)
        try:
            inputs, outputs, parameters = _TensorSlots(directory / TENSOR_FOLDER).of_entry(value, direction)
        except _MALFORMED as error:
            if damaged is None:
                raise
            damaged[key] = f"{DAMAGED_ENTRY}: {type(error).__name__}: {error}"
            inputs, outputs, parameters = (), (), ()
        parent = raw.construct.get(key)
        extra = value.get(EXTRA, {})
        yield EntryRecord(
            key=key,
            module=module,
            class_name=class_name,
            direction=direction,
            call=call,
            order=_entry_order(extra, outputs, position),
            micro_step=extra.get("micro_step", call if direction == PARAMETERS_GRAD else None),
            stage=extra.get("stage", 0),
            inputs=inputs,
            outputs=outputs,
            parameters=parameters,
            stack=stack_of.get(key, ()),
            parent=parent[0] if isinstance(parent, list) else parent,
            function=str(extra.get("function", "")),
            autocast=str(extra.get("autocast", "")),
        )


def split_key(key: str) -> tuple[str, str, str, int]:
    """Return (module, class, direction, call) of an entry's key.

    An API's key (`Functional.linear.0.forward`) gives its name as module and its prefix as class.

    >>> split_key("Module.h.0.mlp.fc.Linear.forward.2")
    ('h.0.mlp.fc', 'Linear', 'forward', 2)
    """
    parts = key.rsplit(".", 3)
    if len(parts) == 4:
        head, kind, word, last = parts
        if word in _DIRECTIONS and last.isdigit():
            return head.partition(".")[2], kind, word, int(last)
        if last in _DIRECTIONS and word.isdigit():
            prefix, _, name = f"{head}.{kind}".partition(".")
            return name, prefix, last, int(word)
    return key, "", FORWARD, 0


class _TensorSlots:
    """Finds the tensors in the nested value of an entry, and names their places."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def of_entry(self, value: Mapping[str, Any], direction: str) -> tuple[tuple[TensorRecord, ...], ...]:
        if direction == PARAMETERS_GRAD:
            gradients = [
                self.walk(forms[0], name) for name, forms in value.items() if isinstance(forms, list) and forms
            ]
            return (), tuple(record for found in gradients for record in found), ()
        inputs = [*self.walk(value.get("input_args", value.get("input")), "input")]
        inputs += self.walk(value.get("input_kwargs"), "kwargs")
        outputs = [*self.walk(value.get("output"), "output"), *self.walk(value.get("output_kwargs"), "kwargs")]
        return tuple(inputs), tuple(outputs), tuple(self.walk(value.get("parameters"), "parameters"))

    def walk(self, value: Any, slot: str) -> Iterator[TensorRecord]:
        if isinstance(value, list):
            for index, item in enumerate(value):
                yield from self.walk(item, f"{slot}.{index}")
        elif isinstance(value, dict):
            if isinstance(value.get("dtype"), str) and isinstance(value.get("shape"), list):
                yield self._record(value, slot)
            elif not isinstance(value.get("type"), str):
                for name, item in value.items():
                    yield from self.walk(item, f"{slot}.{name}")

    def _record(self, form: Mapping[str, Any], slot: str) -> TensorRecord:
        file_name = form.get("data_name")
        return TensorRecord(
            slot=slot,
            dtype=form["dtype"],
            shape=tuple(map(operator.index, form["shape"])),
            max=_number(form.get("Max")),
            min=_number(form.get("Min")),
            mean=_number(form.get("Mean")),
            norm=_number(form.get("Norm")),
            nans=_count(form.get("nans")),
            infs=_count(form.get("infs")),
            zeros=_count(form.get("zeros")),
            requires_grad=bool(form.get("requires_grad")),
            order=_count(form.get("order")),
            hooked=bool(form.get("hooked")),
            data_path=self._folder / Path(file_name).name if file_name else None,
        )


def _number(value: Any) -> float | None:
    try:
        return float(value) if isinstance(value, int | float) else None
    except OverflowError:
        return math.copysign(math.inf, value)


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) else None


def _entry_order(extra: Mapping[str, Any], outputs: tuple[TensorRecord, ...], position: int) -> int:
    own = extra.get("order")
    if isinstance(own, int):
        return own
    return min((record.order for record in outputs if record.order is not None), default=position)


def _order(entry: EntryRecord) -> int:
    return entry.order if entry.order is not None else 0
