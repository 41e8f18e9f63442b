"""Writes what two dumps have of the same prompt tokens as two dumps that `trainermon compare` and `graph` read.

Of each module's forward only what has a place per token is kept: hidden states, not masks, caches or tensors per head.
Arguments stand in one order whatever the module calls them, as engines name them otherwise.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainermon.analysis.rl.engine_names import ModuleNames
from trainermon.analysis.rl.prompt_tokens import TokenPlaces
from trainermon.core.private_files import make_private_folder, replace_file
from trainermon.core.values import as_plain
from trainermon.dump.files.records import (
    CONSTRUCT_FILE,
    DUMP_FILE,
    INFO_FILE,
    STACK_FILE,
    TENSOR_FOLDER,
    EntryRecord,
    TensorRecord,
)

if TYPE_CHECKING:
    from torch import Tensor

Summands = tuple[TensorRecord, ...]
"""Tensors whose sum is one value."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AlignedCall:
    """A module's forward on one side, as it is written.

    Attributes:
        entry: The forward in the side's own dump.
        key: What it is called.
        inputs: What it took of each token.
        outputs: What it gave.
        is_sorted: What it gave is sorted within each token, and its parameters are left out.
    """

    entry: EntryRecord
    key: str
    inputs: tuple[Summands, ...]
    outputs: tuple[Summands, ...]
    is_sorted: bool = False


def aligned_calls(
    trainer: Sequence[EntryRecord],
    engine: Sequence[EntryRecord],
    places: tuple[TokenPlaces, TokenPlaces],
    names: ModuleNames,
) -> tuple[list[AlignedCall], list[AlignedCall]]:
    """Return both sides' forwards under the engine's names; modules that both have give and take as many values."""
    theirs = {entry.module: _call(entry, entry.module, entry.class_name, places[1], names) for entry in engine}
    if names.adds_residual:
        theirs = {path: _with_residual(call) for path, call in theirs.items()}
    ours = {}
    for entry in trainer:
        path = names.path(entry.module)
        call = _call(entry, path, entry.class_name, places[0], names)
        if path in theirs:
            call, other = _of_both(call, theirs[path])
            if _widths(call) == _widths(other):  # else another operation has the same name, as an activation of a half
                call, theirs[path] = dataclasses.replace(call, key=other.key), other
        ours[path] = call
    return list(ours.values()), list(theirs.values())


def write_side(folder: Path, calls: Sequence[AlignedCall], places: TokenPlaces, notes: Sequence[str]) -> None:
    """Write the dump of one side. One tensor is in memory at a time.

    Raises:
        OSError: Nothing can be written, or a tensor's file cannot be read.
    """
    make_private_folder(folder / TENSOR_FOLDER)
    keys = {call.entry.key: call.key for call in calls}
    written = dict(_entries(folder / TENSOR_FOLDER, calls, places))
    head = {"task": "tensor", "level": "L0", "framework": "pytorch", "dump_data_dir": str(folder / TENSOR_FOLDER)}
    files: Mapping[str, Any] = {
        DUMP_FILE: head | {"data": written},
        CONSTRUCT_FILE: {call.key: keys.get(call.entry.parent or "") for call in calls},
        STACK_FILE: {str(number): [[call.key], list(call.entry.stack)] for number, call in enumerate(calls)},
        INFO_FILE: {"complete": True, "reason": "aligned", "notes": list(notes)},
    }
    for name, content in files.items():
        replace_file(folder / name, json.dumps(as_plain(content)).encode())


def is_token_tensor(record: TensorRecord, places: TokenPlaces) -> bool:
    """Return whether a tensor has a place per token: `[N, T, …]`, `[T, N, …]` or `[N * T, …]`."""
    rows, columns = places.rows, places.columns
    return record.shape[:2] in ((rows, columns), (columns, rows)) or record.shape[:1] == (rows * columns,)


def tokens_of(tensor: Tensor, places: TokenPlaces) -> Tensor:
    """Return what a tensor, as `is_token_tensor` has it, holds of the chosen tokens, `[tokens, …]`."""
    import torch

    row, column = torch.from_numpy(places.row), torch.from_numpy(places.column)
    if tuple(tensor.shape[:2]) == (places.rows, places.columns):
        return tensor[row, column]
    if tuple(tensor.shape[:2]) == (places.columns, places.rows):
        return tensor[column, row]
    return tensor[row * places.columns + column]


def _call(entry: EntryRecord, path: str, class_name: str, places: TokenPlaces, names: ModuleNames) -> AlignedCall:
    def of_tokens(records: Sequence[TensorRecord]) -> tuple[Summands, ...]:
        return tuple((record,) for record in records if _is_float(record) and is_token_tensor(record, places))

    is_embedding = bool(entry.inputs) and not any(map(_is_float, entry.inputs))
    ids = tuple((record,) for record in entry.inputs[:1]) if is_embedding and entry.parameters else ()
    takes_normed = re.search(r"LayerNorm\w*Linear", entry.class_name) is None  # else the norm is within the projection
    return AlignedCall(
        entry=entry,
        key=f"Module.{path}.{class_name}.forward.0",
        inputs=(of_tokens(entry.inputs) if takes_normed else ()) or ids,
        outputs=of_tokens(entry.outputs),
        is_sorted=names.is_unordered(path),
    )


def _with_residual(call: AlignedCall) -> AlignedCall:
    """Return a call that is given, or returns, a residual beside the hidden states with the sum of both instead."""
    is_norm = call.entry.class_name.endswith("Norm")
    inputs, outputs = call.inputs, call.outputs
    if len(inputs) == 2 and (is_norm or len(outputs) == 2):
        inputs = (inputs[0] + inputs[1],)
    if len(outputs) == 2:
        outputs = outputs[:1] if is_norm else (outputs[0] + outputs[1],)
    return dataclasses.replace(call, inputs=inputs, outputs=outputs)


def _of_both(ours: AlignedCall, theirs: AlignedCall) -> tuple[AlignedCall, AlignedCall]:
    """Return two calls with as many inputs and outputs as both have, in order."""
    inputs = min(len(ours.inputs), len(theirs.inputs))
    outputs = min(len(ours.outputs), len(theirs.outputs))
    one, other = (
        dataclasses.replace(call, inputs=call.inputs[:inputs], outputs=call.outputs[:outputs])
        for call in (ours, theirs)
    )
    return one, other


def _widths(call: AlignedCall) -> list[tuple[int, ...]]:
    return [value[0].shape[-1:] for value in call.inputs if _is_float(value[0])]


def _entries(folder: Path, calls: Sequence[AlignedCall], places: TokenPlaces) -> Iterator[tuple[str, dict[str, Any]]]:
    for call in calls:

        def written(values: Sequence[Summands], state: str, *, is_sorted: bool = False, key: str = call.key) -> Any:
            return [
                _written(folder / f"{key}.{state}.{number}.pt", value, places, is_sorted=is_sorted)
                for number, value in enumerate(values)
            ]

        yield (
            call.key,
            {
                "input_args": written(call.inputs, "input"),
                "input_kwargs": {},
                "output": written(call.outputs, "output", is_sorted=call.is_sorted),
                "parameters": {} if call.is_sorted else dict(_parameters(folder, call)),
            },
        )


def _parameters(folder: Path, call: AlignedCall) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the parameters of a call by name; their files are shared with the dump that they are of."""
    for record in call.entry.parameters:
        name = record.slot.partition(".")[2]
        form = _form(record.dtype, record.shape, {
            "Max": record.max, "Min": record.min, "Mean": record.mean, "Norm": record.norm,
            "nans": record.nans, "infs": record.infs,
        })  # fmt: skip
        if record.data_path is not None and record.data_path.is_file():
            path = folder / f"{call.key}.parameters.{name}{record.data_path.suffix}"
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
            try:
                os.link(record.data_path, path)
            except OSError:  # on another file system, or one without links
                shutil.copyfile(record.data_path, path)
            form["data_name"] = path.name
        yield name, form


def _written(path: Path, value: Summands, places: TokenPlaces, *, is_sorted: bool) -> dict[str, Any]:
    """Write the tokens of a tensor, or of the sum of several, and return what stands for it in the dump."""
    from trainermon.dump.files.tensor_files import load_tensor, save_tensor

    parts = [
        tokens_of(load_tensor(record.data_path, record.dtype, record.shape), places)
        for record in value
        if record.data_path is not None
    ]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    total = total.sort(dim=-1).values.contiguous() if is_sorted else total.contiguous()
    save_tensor(total, path)
    form = _form(str(total.dtype), tuple(total.shape), _numbers(total))
    form["data_name"] = path.name
    return form | ({"order": value[0].order} if len(value) == 1 and not is_sorted else {})


def _form(dtype: str, shape: Sequence[int], numbers: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "torch.Tensor", "dtype": dtype, "shape": list(shape), "requires_grad": False, **numbers}


def _numbers(tensor: Tensor) -> dict[str, Any]:
    """Return the statistics of a dump: over finite elements, in float64."""
    wide = tensor.double()
    finite = wide[wide.isfinite()]
    counts = {"nans": int(wide.isnan().sum()), "infs": int(wide.isinf().sum())}
    if not finite.numel():
        return {"Max": None, "Min": None, "Mean": None, "Norm": None, **counts}
    cast = float if tensor.is_floating_point() else int
    return {
        "Max": cast(finite.max()),
        "Min": cast(finite.min()),
        "Mean": float(finite.mean()),
        "Norm": float(finite.norm()),
        **counts,
    }


def _is_float(record: TensorRecord) -> bool:
    return record.dtype.startswith(("torch.float", "torch.bfloat"))
