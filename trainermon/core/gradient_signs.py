"""Files of gradients' signs: what one rank held in one step, as bitmaps that two runs are compared by.

    signs/step12.rank0.bits                              of a probe
    signs/attempt0/step12.rank0/step12.rank0.bits        of a run; of several attempts the last counts

    ┌──────────────────────────┬─────────────┬──────────────────────────────┬────────────────────┬───┐
    │ TMSIGNS1, length, CRC-32 │ JSON header │ positive words, parameter 0  │ negative words, 0  │ … │
    └──────────────────────────┴─────────────┴──────────────────────────────┴────────────────────┴───┘

Little-endian. The bitmaps begin at a multiple of 64 bytes, each parameter's one after the other in the order of the
header: ceil(length / 64) words of 64 bits, element i in bit i % 64 of word i // 64, unused bits 0. NaN and zeros are in
neither bitmap.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import marshal
import math
import os
import re
import struct
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trainermon.core.errors import DumpError
from trainermon.core.private_files import make_private_folder, replacing
from trainermon.core.strict import build

FOLDER = "signs"
WORD_BITS = 64
_MAGIC = b"TMSIGNS1"
_PREAMBLE = struct.Struct("<8sII")
_ALIGNMENT = 64
_MAX_HEADER = 1 << 28
_MAX_PIECES = 1024  # that one call takes (IOV_MAX)
_NAME = re.compile(r"step(\d+)\.rank(\d+)\.bits")

Words = npt.NDArray[np.uint64]


@dataclasses.dataclass(frozen=True, slots=True)
class IndexBox:
    """A part of a tensor: in each dimension the first index, and how many there are."""

    starts: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GradientPart:
    """What one rank held of one parameter's gradient, in numbers; its bitmaps lie beside it in the file.

    Attributes:
        name: The parameter's plain name in the whole model.
        shape: Shape of the whole parameter.
        boxes: The parts of the whole that make up the rank's tensor, put one after another along `dim`. One box that is
            all of it where nothing splits the tensor over ranks of a model.
        dim: The dimension along which boxes follow one another.
        offset: First element of the rank's part in the flattened tensor that the boxes make up.
        length: How many elements it holds from there.
        is_counted: Exactly one rank's copy of each element is.
        num_zeros: Zeros of either sign.
        num_nans: NaNs.
        at_most: How many elements are at most each bound.
    """

    name: str
    shape: tuple[int, ...]
    boxes: tuple[IndexBox, ...]
    dim: int = 0
    offset: int = 0
    length: int = 0
    is_counted: bool = True
    num_zeros: int = 0
    num_nans: int = 0
    at_most: tuple[int, ...] = ()

    @property
    def is_whole(self) -> bool:
        """Whether the rank held all of the parameter, in order."""
        return len(self.boxes) == 1 and self.boxes[0].sizes == self.shape and self.length == math.prod(self.shape)

    @property
    def num_words(self) -> int:
        """How many words each of the two bitmaps has."""
        return -(-self.length // WORD_BITS)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SignsHeader:
    """What stands before the bitmaps.

    Attributes:
        step: The training step.
        rank: The rank that wrote.
        world_size: How many ranks the job had.
        bounds: The bounds that elements were counted by.
        parts: What follows, in order.
    """

    step: int
    rank: int
    world_size: int = 1
    bounds: tuple[float, ...] = ()
    parts: tuple[GradientPart, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class SignBitmaps:
    """The bitmaps of one part, uint64 `[num_words]` each: which elements are greater than zero, and which less."""

    positive: Words
    negative: Words


@dataclasses.dataclass(frozen=True, slots=True)
class StoredSigns:
    """One file: its header, and by name what it holds, mapped, not read."""

    header: SignsHeader
    bitmaps: dict[str, SignBitmaps]


def signs_path(folder: Path, step: int, rank: int) -> Path:
    """Return where a rank's signs of a step stand in the folder of a probe."""
    return folder / FOLDER / signs_name(step, rank)


def signs_name(step: int, rank: int) -> str:
    """Return the name of a file of signs: `step12.rank3.bits`."""
    return f"step{step}.rank{rank}.bits"


def parse_signs_name(name: str) -> tuple[int, int] | None:
    """Return step and rank of a file of signs by its name; None if it is none.

    >>> parse_signs_name("step12.rank3.bits")
    (12, 3)
    """
    match = _NAME.fullmatch(name)
    return (int(match[1]), int(match[2])) if match else None


def write_signs(path: Path, header: SignsHeader, bitmaps: Sequence[SignBitmaps]) -> None:
    """Write a file of signs; `bitmaps` are those of `header.parts`. It is there as a whole or not at all.

    Cost: one write of a quarter of a byte an element to the page cache; nothing is synchronised to the disk.

    Raises:
        OSError: It cannot be written.
    """
    text = json.dumps(header, default=_plain, separators=(",", ":")).encode()
    text += b" " * (-(_PREAMBLE.size + len(text)) % _ALIGNMENT)
    words = [
        each.astype("<u8", copy=False).data.cast("B") for pair in bitmaps for each in (pair.positive, pair.negative)
    ]
    make_private_folder(path.parent)
    with replacing(path) as file:
        _write_together(file.fileno(), [_PREAMBLE.pack(_MAGIC, len(text), zlib.crc32(text)) + text, *words])


def _write_together(descriptor: int, pieces: Sequence[bytes | memoryview]) -> None:
    """Write pieces one after another in few calls: for a large write the kernel takes large pages, 3 times cheaper."""
    rest = [memoryview(piece) for piece in pieces if len(piece)]
    rest.reverse()
    while rest:
        written = os.writev(descriptor, rest[: -_MAX_PIECES - 1 : -1])
        while rest and written >= len(rest[-1]):
            written -= len(rest.pop())
        if written:
            rest[-1] = rest[-1][written:]


def _plain(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass; `dataclasses.asdict` would copy every number of every part."""
    return {name: getattr(value, name) for name in value.__dataclass_fields__}


def read_signs(path: Path) -> StoredSigns:
    """Map a file of signs. Cost: its header is read; the bitmaps are read when they are used.

    Raises:
        DumpError: It is no such file, cut short or damaged.
    """
    header, begin = _read_header(path)
    expected = begin + 16 * sum(part.num_words for part in header.parts)
    size = path.stat().st_size
    if size != expected:
        raise DumpError(
            f"{path}: found {size} bytes, expected {expected}: it was cut short; delete it, or copy it again"
        )
    # As a plain array, whose slices cost a tenth of a memmap's.
    words: Words = np.asarray(np.memmap(path, "<u8", "r", offset=begin)) if size > begin else np.empty(0, np.uint64)
    bitmaps, at = {}, 0
    for part in header.parts:
        length = part.num_words
        bitmaps[part.name] = SignBitmaps(words[at : at + length], words[at + length : at + 2 * length])
        at += 2 * length
    return StoredSigns(header, bitmaps)


def _read_header(path: Path) -> tuple[SignsHeader, int]:
    try:
        with path.open("rb") as file:
            preamble = file.read(_PREAMBLE.size)
            magic, length, checksum = _PREAMBLE.unpack(preamble) if len(preamble) == _PREAMBLE.size else (b"", 0, 0)
            if magic != _MAGIC or length > _MAX_HEADER:
                raise DumpError(f"{path}: found no file of gradients' signs, expected one that begins with TMSIGNS1")
            text = file.read(length)
    except OSError as error:
        raise DumpError(f"{path}: cannot be read: {error.strerror}") from error
    if len(text) != length or zlib.crc32(text) != checksum:
        raise DumpError(f"{path}: its header is damaged; delete it, or copy it again")
    return _header_of(path, text), _PREAMBLE.size + length


def _header_of(path: Path, text: bytes) -> SignsHeader:
    try:
        plain: Any = json.loads(text)
        parts = tuple(_part_of(marshal.dumps(part)) for part in plain.pop("parts"))
        header: SignsHeader = build(SignsHeader, plain, "")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DumpError(f"{path}: its header is of another version: {error}") from error
    return dataclasses.replace(header, parts=parts)


@functools.lru_cache(maxsize=1 << 16)
def _part_of(key: bytes) -> GradientPart:
    """Return one part of a header, as `build` does; `key` is its marshalled dict.

    A comparison reads many thousands, and most are those of the step before, to the last count.
    """
    plain: Any = marshal.loads(key)  # noqa: S302  # `_header_of` has made it
    boxes = [IndexBox(_whole_numbers(box.pop("starts")), _whole_numbers(box.pop("sizes"))) for box in plain["boxes"]]
    plain |= {
        "shape": _whole_numbers(plain["shape"]),
        "boxes": tuple(boxes),
        "at_most": _whole_numbers(plain["at_most"]),
    }
    part = GradientPart(**plain)
    kinds = (str, bool, *(int,) * 5)
    told = (part.name, part.is_counted, part.dim, part.offset, part.length, part.num_zeros, part.num_nans)
    if not boxes or tuple(map(type, told)) != kinds:
        raise TypeError(f"found {told} of {len(boxes)} boxes, expected {kinds} of at least one")
    return part


def _whole_numbers(values: Iterable[Any]) -> tuple[int, ...]:
    found = tuple(values)
    if any(type(value) is not int or value < 0 for value in found):
        raise TypeError(f"found {found}, expected whole numbers from 0 on")
    return found
