"""A base model with an adapter merged into it, and whether weights merged elsewhere hold what the adapter adds.

Merged weights are computed in float64, some rows at a time, and written as float32 into a folder that the caller
removes: 4 bytes for each element that the adapter changes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from trainermon.analysis.checkpoint.formats.lora import Adapter, LowRankChange, read_adapter
from trainermon.analysis.checkpoint.formats.safetensors_file import contiguous
from trainermon.analysis.checkpoint.pieces import Checkpoint, StoredArray, TensorPieces, whole
from trainermon.analysis.checkpoint.placed import PlacedTensor, RowMove, moved, placed
from trainermon.analysis.tensor.dtypes import numbers
from trainermon.core.errors import CheckpointError

_BLOCK = 1 << 22  # elements that are computed together
_WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:module|_orig_mod|_fsdp_wrapped_module)\.")
_UNIT = 2.0**-24  # of float32, which products are summed in, and what is merged here is kept in
_UNITS = {"float16": 2.0**-11, "bfloat16": 2.0**-8}
_SUMMED = 64.0  # times that, of the largest sum: what the order of its terms may do
_LEAST = {"float16": 2.0**-25, "bfloat16": 2.0**-134}  # half of the smallest step, of numbers near zero
_SIGMAS = 6.0
_TOLD = 0.2  # standard error of the share, beyond which it tells nothing

Doubles = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeCheck:
    """How much of what an adapter adds a merged weight holds.

    Attributes:
        share: 1: all of it; 0: nothing; None: the adapter adds nothing.
        error: Its standard error, by what rounding may do.
        num_beyond: Elements farther from base plus adapter than rounding explains.
        dtype: To which type it was rounded.
    """

    share: float | None
    error: float
    num_beyond: int
    dtype: str

    @property
    def is_merged(self) -> bool:
        """Whether the weight is base plus adapter except for rounding."""
        unit = _UNITS.get(self.dtype, _UNIT)
        near = self.share is None or abs(self.share - 1) <= _SIGMAS * self.error + 2 * unit
        return near and not self.num_beyond

    @property
    def text(self) -> str:
        """What that says."""
        if self.share is None:
            return "the adapter adds nothing to it"
        if self.error > _TOLD:
            return f"what the adapter adds is smaller than rounding to {self.dtype}: not told whether it is in it"
        share = f"{self.share:.3g}" if abs(self.share) > _SIGMAS * self.error else "0"
        rest = "" if not self.num_beyond else f", and {self.num_beyond:,} elements differ by more than rounding"
        return f"holds {share} times what the adapter adds{rest}"


@np.errstate(all="ignore")  # a file may hold any bits
def merged_with(base: Checkpoint, adapter: Checkpoint, folder: Path) -> Checkpoint:
    """Return a checkpoint of the base with the adapter merged into it, what is computed written into `folder`.

    Raises:
        CheckpointError: the adapter is none of LoRA, or of another base.
    """
    found = read_adapter(adapter)
    names = _names_in(base, found)
    tensors, before = dict(base.tensors), dict[str, TensorPieces]()
    for number, (name, change) in enumerate(found.changes.items()):
        old = replace(found.replaced.get(name, base.tensors[names[name]]), name=names[name])
        tensors[old.name], before[old.name] = _write(old, change, folder / f"{number}.raw"), old
    for name, tensor in found.replaced.items():
        if name not in found.changes:
            tensors[names[name]] = replace(tensor, name=names[name], notes=("out of the adapter",))
    said = f"{adapter.path} is merged into {len(before):,} weights of it, and replaces {len(found.replaced):,}"
    return replace(
        base, path=Path(f"{base.path}+{adapter.path}"), tensors=tensors, before=before, notes=(*base.notes, said)
    )


def _names_in(base: Checkpoint, adapter: Adapter) -> dict[str, str]:
    """Return the name in the base of each tensor that an adapter is about; either may lack a prefix of the other.

    A tensor that the adapter replaces may be new, such as the head of a classifier.
    """
    plain = {_WRAPPERS.sub("", name): name for name in base.tensors}
    by_end: dict[str, list[str]] = {}
    for name, full in plain.items():
        for end in _ends(name):
            by_end.setdefault(end, []).append(full)
    found = {}
    for name in (*adapter.changes, *adapter.replaced):
        whole_name = next((plain[end] for end in _ends(name) if end in plain), None)
        options = [whole_name] if whole_name is not None else by_end.get(name, [])
        if not options and name in adapter.replaced:
            options = [name]
        if len(options) != 1:
            there = f"{len(options)} such, {', '.join(options[:3])}" if options else "none such"
            of = f", and is of {adapter.base_name}" if adapter.base_name else ""
            raise CheckpointError(f"{adapter.path} changes {name}{of}; {base.path} has {there}: is it the right base?")
        found[name] = options[0]
    return found


def _ends(name: str) -> Iterator[str]:
    """Yield a name, then without its first part, and so on."""
    while name:
        yield name
        name = name.partition(".")[2]


def _write(old: TensorPieces, change: LowRankChange, path: Path) -> TensorPieces:
    a, b = (_array(factor).reshape(factor.shape[0], -1) for factor in (change.a, change.b))
    if change.b.num_elements != b.shape[0] * a.shape[0]:
        raise CheckpointError(f"{old.name}: lora_B is {list(change.b.shape)}, expected a kernel of 1: not merged here")
    left, right = (a.T, b.T) if change.is_turned else (b, a)
    rows = old.shape[0] if old.shape else 0
    if rows != left.shape[0] or math.prod(old.shape[1:]) != right.shape[1]:
        change_of = [left.shape[0], right.shape[1]]
        raise CheckpointError(
            f"the adapter changes {old.name} by {change_of}, the base has {list(old.shape)}: is it the right base?"
        )
    magnitude = None if change.magnitude is None else _array(change.magnitude).reshape(-1)
    if magnitude is not None and (change.is_turned or len(magnitude) != rows):
        raise CheckpointError(f"{old.name}: DoRA of a weight that is turned is not merged here: merge it with PEFT")
    with path.open("wb") as file:
        for start, length in _blocks(old.shape):
            made: Doubles = _rows(placed(old), start, length).reshape(length, -1)
            made += change.scale * (left[start : start + length] @ right)
            if magnitude is not None:
                made *= (magnitude[start : start + length] / np.linalg.norm(made, axis=1))[:, None]
            file.write(made.astype("<f4").tobytes())
    stored = StoredArray(path, 0, "float32", old.shape, contiguous(old.shape))
    return whole(old.name, stored, "base + adapter", ("base + adapter",))


@np.errstate(all="ignore")
def check_merge(before: PlacedTensor, merged: PlacedTensor, other: PlacedTensor) -> MergeCheck:
    """Return how much of what an adapter adds a weight holds that was merged elsewhere: finite, of the rows of all.

    The share is the slope of what the weight is away from the base over what the adapter adds, by least squares.
    """
    dtype = max((before.dtype, other.dtype), key=lambda name: _UNITS.get(name, 0.0))
    unit, least = _UNITS.get(dtype, _UNIT), _LEAST.get(dtype, 0.0)
    square = product = noise = 0.0
    num_beyond = 0
    shape = min(tensor.shape for tensor in (before, merged, other))  # a vocabulary may be padded
    for start, length in _blocks(shape) if before.num_elements else ():
        base, sought, found = (_rows(tensor, start, length) for tensor in (before, merged, other))
        added = sought - base
        bound = unit * (np.abs(found) + np.abs(sought) + 2 * np.abs(added)) + least
        bound += _SUMMED * _UNIT * np.max(np.abs(added), initial=0.0)
        square += float(np.sum(added * added))
        product += float(np.sum((found - base) * added))
        noise += float(np.sum((bound * added) ** 2)) / 3
        num_beyond += int(np.count_nonzero(~(np.abs(found - sought) <= bound)))
    if not square:
        return MergeCheck(share=None, error=0.0, num_beyond=num_beyond, dtype=dtype)
    return MergeCheck(share=product / square, error=math.sqrt(noise) / square, num_beyond=num_beyond, dtype=dtype)


def _blocks(shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    step = max(1, _BLOCK // max(1, math.prod(shape[1:])))
    for start in range(0, shape[0], step):
        yield start, min(step, shape[0] - start)


def _rows(tensor: PlacedTensor, start: int, length: int) -> Doubles:
    """Return some rows of a tensor, whichever files they are in, in float64."""
    found: Doubles = np.zeros((length, *tensor.shape[1:]))
    for view in moved(tensor, [RowMove(start, length, 0)]):
        place = tuple(slice(at, at + size) for at, size in zip(view.starts, view.sizes, strict=True))
        found[place] = numbers(view.as_array().array(), view.stored.dtype)
    return found


def _array(tensor: TensorPieces) -> Doubles:
    stored = tensor.pieces[0].stored
    found: Doubles = numbers(stored.array(), stored.dtype).astype(np.float64)
    return found


class AdapterMerge(NamedTuple):
    """Of a pair of tensors, what the one was before an adapter was merged into it, and whether that is the first."""

    before: PlacedTensor
    is_first: bool


def merged_side(
    ours: PlacedTensor, theirs: PlacedTensor, before: Sequence[Mapping[str, PlacedTensor]]
) -> AdapterMerge | None:
    """Return what is known of the merge if anything of one of two paired tensors was merged here.

    `before` has of each side, by name, what the tensors were, joined and moved as they are now.
    """
    for is_first, tensor, known in ((True, ours, before[0]), (False, theirs, before[1])):
        old = known.get(tensor.name)
        if old is not None and old.shape == tensor.shape and _files(old) != _files(tensor):
            return AdapterMerge(old, is_first)
    return None


def _files(tensor: PlacedTensor) -> set[Path]:
    return {view.stored.path for view in tensor.views}
