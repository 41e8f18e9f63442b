"""What a call took and gave, as a `.vis.db` file has it: texts by name, of each tensor on its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainermon.analysis.compare.items import OUTPUT, DumpRow
from trainermon.analysis.compare.metrics import statistics_columns
from trainermon.analysis.compare.verdicts import ResultRow
from trainermon.analysis.graph.database.schema import DIFFERENCES
from trainermon.dump.files.reader import split_key
from trainermon.dump.files.records import PARAMETERS_GRAD

_UNKNOWN = "N/A"
Texts = tuple[dict[str, Any], dict[str, Any]]
"""Inputs and outputs by their names."""


def plain_texts(key: str, rows: Sequence[DumpRow]) -> Texts:
    """Return the texts of a call that was not compared."""
    return _parted(key, [(row, _texts(row)) for row in rows])


def compared_texts(key: str, rows: Sequence[ResultRow]) -> Texts:
    """Return the texts of a call of the target that was compared."""
    return _parted(
        key, [(row.target, _texts(row.target) | _differences(row)) for row in rows if row.target is not None]
    )


def _parted(key: str, found: Sequence[tuple[DumpRow, dict[str, str]]]) -> Texts:
    inputs: dict[str, Any] = {}
    outputs: dict[str, Any] = {}
    is_gradients = split_key(key)[2] == PARAMETERS_GRAD  # the other tool has those among the inputs
    for row, texts in found:
        (outputs if row.state == OUTPUT and not is_gradients else inputs)[f"{key}.{row.place}"] = texts
    return inputs, outputs


def _texts(row: DumpRow) -> dict[str, str]:
    if row.dtype is None:
        return {"value": "null"}
    kind = (
        f"{row.dtype.partition('.')[0]}.Tensor"
        if row.is_tensor
        else row.dtype.removeprefix("<class '").removesuffix("'>")
    )
    texts = {"type": kind, "dtype": row.dtype, "shape": str(list(row.shape or ()))}
    if not row.is_tensor:
        texts["value"] = _text(row.max)
    for name, value in (("Max", row.max), ("Min", row.min), ("Mean", row.mean), ("Norm", row.norm)):
        texts[name] = _text(value)
    texts["requires_grad"] = _text(row.requires_grad)
    texts["data_name"] = row.data_name or "-1"
    if row.checksum is not None:
        texts["md5"] = row.checksum[1]
    return texts


def _differences(row: ResultRow) -> dict[str, str]:
    if row.target is None or row.golden is None:
        return {}
    if row.target.dtype is None:
        return {}
    values = statistics_columns(row.target, row.golden)
    known = [_UNKNOWN if value is None else str(value) for value in values]
    per_cent = [text if text == _UNKNOWN else f"{text}%" for text in known[4:]]
    said = [message.partition(": ")[2] for message in row.messages]
    same = _text(row.target.requires_grad == row.golden.requires_grad)
    found = dict(zip(DIFFERENCES, (*known[:4], *per_cent), strict=True))
    return {**found, "Requires_grad Consistent": same, "Result": row.result, "Err_message": _text(said)}


def _text(value: object) -> str:
    return "null" if value is None else str(value)
