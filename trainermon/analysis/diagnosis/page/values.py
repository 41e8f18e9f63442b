"""The first bad tensor, as far as it was dumped: its numbers, where its bad elements are, and what is around."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trainermon.analysis.diagnosis.findings import Diagnosis
from trainermon.analysis.diagnosis.page.markup import text
from trainermon.analysis.tensor.dtypes import numbers
from trainermon.analysis.tensor.files import StoredTensor, open_tensors
from trainermon.analysis.tensor.index import IndexPart
from trainermon.analysis.tensor.profile import TensorProfile, profile
from trainermon.analysis.tensor.screen import number, position, window
from trainermon.core.errors import DumpError
from trainermon.dump.files.reader import read_dump
from trainermon.dump.files.records import FORWARD, Dump, EntryRecord
from trainermon.dump.files.sources import NO_SOURCES, Sources, read_sources

_GRADIENT = "gradient of "
_OTHER_SIDE = {"input": "output", "output": "input"}
_MAX_BYTES = 1 << 30  # a page should not take minutes


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorView:
    """A dumped tensor as the page of a diagnosis shows it.

    Attributes:
        found: Its statistics, and where its bad elements are.
        part: A small part around the first bad element.
        elements: The elements of that part as text, row by row.
    """

    found: TensorProfile
    part: IndexPart
    elements: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpView:
    """What the page of a diagnosis shows of the dump in which the fault arose.

    Attributes:
        stack: The lines of the script that made the bad call, innermost first.
        sources: The source code that the dump has kept.
        tensor: The bad tensor; None: it was not saved.
    """

    stack: tuple[str, ...] = ()
    sources: Sources = NO_SOURCES
    tensor: TensorView | None = None


def look(run_dir: Path, diagnosis: Diagnosis) -> DumpView:
    """Read call stack and tensor of the first bad call from the dump in which the fault arose.

    Empty if it cannot be read; without its sources if those alone cannot.
    """
    if diagnosis.dump is None:
        return DumpView()
    try:
        dump = read_dump(run_dir / diagnosis.dump)
    except DumpError:
        return DumpView()
    try:
        sources = read_sources(dump.directory)
    except DumpError:
        sources = NO_SOURCES
    entries = [entry for entry in dump.entries if (entry.module, entry.call) == (diagnosis.module, diagnosis.call)]
    stack = next((entry.stack for entry in entries if entry.stack), ())
    return DumpView(stack=stack, sources=sources, tensor=_tensor(dump, entries, diagnosis))


def _tensor(dump: Dump, entries: list[EntryRecord], diagnosis: Diagnosis) -> TensorView | None:
    if diagnosis.tensor is None:
        return None
    slot, is_gradient = _slot(diagnosis.tensor.slot)
    slot, _, owner = slot.partition(" of ")  # what a module's own operation made is seen in the next one's input
    if owner:
        entries = [entry for entry in dump.entries if entry.module == owner]
    paths = [
        record.data_path
        for entry in entries or dump.root
        if (entry.direction != FORWARD) == is_gradient
        for record in (*entry.outputs, *entry.parameters, *entry.inputs)
        if record.slot == slot and record.nonfinite and record.data_path is not None
    ]
    try:
        stored = open_tensors(paths[0])[0] if paths else None
        return _view(stored) if isinstance(stored, StoredTensor) and stored.raw.nbytes <= _MAX_BYTES else None
    except DumpError:
        return None


def _slot(name: str) -> tuple[str, bool]:
    """Return the slot that an entry has for a tensor of a diagnosis, and whether it is one of a backward.

    What a backward gives, its `output`, are the gradients of the inputs.
    """
    slot = name.removeprefix(_GRADIENT)
    side, dot, rest = slot.partition(".")
    return (f"{_OTHER_SIDE.get(side, side)}{dot}{rest}", True) if name != slot else (slot, False)


def _view(tensor: StoredTensor) -> TensorView | None:
    found = profile(tensor)
    if not found.bad:
        return None
    part = window(tensor.shape, found.bad[0].position)
    elements = np.asarray(numbers(np.asarray(tensor.raw[part.index]), tensor.dtype))
    rows = elements.reshape(-1, elements.shape[-1]) if elements.ndim else elements.reshape(1, 1)
    return TensorView(
        found=found, part=part, elements=tuple(tuple(number(value) for value in row) for row in rows.tolist())
    )


def render_view(view: TensorView) -> str:
    """Return the HTML for a bad tensor: statistics, and where and among what values its bad elements are."""
    found = view.found
    moments = (("mean", found.mean), ("standard deviation", found.std), ("norm", found.norm))
    words = [f"{name} {number(value)}" for name, value in moments if value is not None]
    if found.min is not None and found.max is not None:
        words.insert(0, f"{number(found.min.value)} … {number(found.max.value)}")
    finite = f"<p>Its finite elements: {text(', '.join(words))}.</p>" if words else "<p>No element is finite.</p>"
    spread = "".join(
        f"<li>dimension {item.dim}: {item.indices:,} of {item.size:,} indices"
        f"{_first(item.first, item.indices, item.size)}</li>"
        for item in found.spread
    )
    where = f"<p>Where the bad elements are:</p><ul>{spread}</ul>" if spread else ""
    first = f"{number(found.bad[0].value)} at {position(found.bad[0].position)}"
    return f"{finite}{where}<p>Around the first, {text(first)}:</p>{_matrix(view)}"


def _first(indices: tuple[int, ...], count: int, size: int) -> str:
    if count == size:
        return ", all of them"
    return f": {', '.join(map(str, indices))}{', …' if count > len(indices) else ''}"


def _matrix(view: TensorView) -> str:
    ranges = [dim for dim in view.part.dims if isinstance(dim, range)]
    columns = ranges[-1] if ranges else range(1)
    names = [str(index) for index in ranges[-2]] if len(ranges) > 1 else [""]
    head = "".join(f"<th>{index}</th>" for index in columns) if ranges else ""
    rows = "".join(
        f"<tr><th>{name}</th>{''.join(_cell(value) for value in row)}</tr>"
        for name, row in zip(names, view.elements, strict=True)
    )
    return f'<div class="scroll"><table class="matrix mono"><tr><th></th>{head}</tr>{rows}</table></div>'


def _cell(value: str) -> str:
    bad = ' class="bad"' if "NaN" in value or "Inf" in value else ""
    return f"<td{bad}>{text(value)}</td>"
