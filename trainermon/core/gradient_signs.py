"""Files of gradients' signs: what one rank held in one step, as bitmaps that two runs are compared by.

    signs/step12.rank0.bits                              of a probe
    signs/attempt0/step12.rank0/step12.rank0.bits        of a run; of several attempts the last counts

    ┌──────────────────────────┬──────────────────────┬────────┬─────────────────────────────┬───────────────────┬───┐
    │ TMSIGNS2, length, CRC-32 │ JSON: step and parts │ counts │ positive words, parameter 0 │ negative words, 0 │ … │
    └──────────────────────────┴──────────────────────┴────────┴─────────────────────────────┴───────────────────┴───┘

Little-endian. Length and CRC-32 are of what lies between them and the bitmaps: a line of JSON for the step, one for the
parts, which are those of the step before, byte by byte, so that readers parse them once; and 64-bit counts, `[parts, 2
+ bounds]`. The bitmaps begin at a multiple of 64 bytes, each parameter's one after the other in the order of the parts:
ceil(length / 64) words of 64 bits, element i in bit i % 64 of word i // 64, unused bits 0. NaN and zeros are in neither
bitmap. Files that begin with TMSIGNS1 have one JSON object, and the counts in its parts.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import mmap
import os
import re
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trainermon.core.errors import DumpError
from trainermon.core.private_files import make_private_folder, replacing
from trainermon.core.strict import build

FOLDER = "signs"
WORD_BITS = 64
_MAGIC, _FIRST_MAGIC = b"TMSIGNS2", b"TMSIGNS1"
_PREAMBLE = struct.Struct("<8sII")
_ALIGNMENT = 64
_MAX_HEADER = 1 << 28
_MAX_PIECES = 1024  # that one call takes (IOV_MAX)
_NAME = re.compile(r"step(\d+)\.rank(\d+)\.bits")

Words = npt.NDArray[np.uint64]
Counts = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True, slots=True)
class IndexBox:
    """A part of a tensor: in each dimension the first index, and how many there are."""

    starts: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GradientPart:
    """What one rank holds of one parameter's gradient, the same in every step.

    Attributes:
        name: The parameter's plain name in the whole model.
        shape: Shape of the whole parameter.
        boxes: The parts of the whole that make up the rank's tensor, put one after another along `dim`. One box that is
            all of it where nothing splits the tensor over ranks of a model.
        dim: The dimension along which boxes follow one another.
        offset: First element of the rank's part in the flattened tensor that the boxes make up.
        length: How many elements it holds from there.
        is_counted: Exactly one rank's copy of each element is.
    """

    name: str
    shape: tuple[int, ...]
    boxes: tuple[IndexBox, ...]
    dim: int = 0
    offset: int = 0
    length: int = 0
    is_counted: bool = True

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
    """Which step a file is of.

    Attributes:
        step: The training step.
        rank: The rank that wrote.
        world_size: How many ranks the job had.
        bounds: The bounds that elements were counted by.
        infinite: The parameters of which the rank holds an infinite element; None: not told, as in older files.
    """

    step: int
    rank: int
    world_size: int = 1
    bounds: tuple[float, ...] = ()
    infinite: tuple[str, ...] | None = None


class SignCounts(NamedTuple):
    """How many of a part's elements are what.

    Attributes:
        num_zeros: Zeros of either sign.
        num_nans: NaNs.
        at_most: How many elements are at most each bound of the header.
    """

    num_zeros: int = 0
    num_nans: int = 0
    at_most: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """What files of several steps have in common: their parts, in order. Of equal files it is one object.

    Attributes:
        parts: By name.
        num_words: How many words each bitmap of each part has, int64 `[num_parts]`.
    """

    parts: Mapping[str, GradientPart]
    num_words: Counts


@dataclasses.dataclass(frozen=True, slots=True)
class SignBitmaps:
    """The bitmaps of one part, uint64 `[num_words]` each: which elements are greater than zero, and which less."""

    positive: Words
    negative: Words


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class StoredSigns:
    """One file, mapped, not read.

    Attributes:
        header: Which step it is of.
        layout: Its parts.
        counts: int64 `[num_parts, 2 + num_bounds]`: zeros, NaNs, and how many elements are at most each bound.
        words: All bitmaps, uint64: part by part the positive and the negative one.
    """

    header: SignsHeader
    layout: Layout
    counts: Counts
    words: Words

    def bitmaps(self) -> dict[str, SignBitmaps]:
        """Return by name the bitmaps of each part."""
        found, begin = {}, 0
        for name, length in zip(self.layout.parts, self.layout.num_words.tolist(), strict=True):
            middle, end = begin + length, begin + 2 * length
            found[name] = SignBitmaps(self.words[begin:middle], self.words[middle:end])
            begin = end
        return found


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


def write_signs(path: Path, header: SignsHeader, parts: Sequence[tuple[GradientPart, SignCounts, SignBitmaps]]) -> None:
    """Write a file of signs. It is there as a whole or not at all.

    Cost: one write of a quarter of a byte an element to the page cache; nothing is synchronised to the disk.

    Raises:
        OSError: It cannot be written.
    """
    text = b"\n".join((_json(header), _json([part for part, _, _ in parts]), _packed([row for _, row, _ in parts])))
    text += b"\0" * (-(_PREAMBLE.size + len(text)) % _ALIGNMENT)
    words = [
        each.astype("<u8", copy=False).data.cast("B") for *_, pair in parts for each in (pair.positive, pair.negative)
    ]
    make_private_folder(path.parent)
    with replacing(path) as file:
        _write_together(file.fileno(), [_PREAMBLE.pack(_MAGIC, len(text), zlib.crc32(text)) + text, *words])


def _json(value: Any) -> bytes:
    return json.dumps(value, default=_plain, separators=(",", ":")).encode()


def _packed(counts: Sequence[SignCounts]) -> bytes:
    return np.array([(zeros, nans, *at_most) for zeros, nans, at_most in counts], "<i8").tobytes()


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
    """Map a file of signs. Cost: its header is read, its parts are parsed if they are new; no bitmap is read yet.

    Raises:
        DumpError: It is no such file, cut short or damaged.
    """
    try:
        with path.open("rb", buffering=0) as file:
            header, layout, counts, begin = _read_header(path, file)
            size = os.fstat(file.fileno()).st_size
            expected = begin + 16 * int(layout.num_words.sum())
            if size != expected:
                raise DumpError(
                    f"{path}: found {size} bytes, expected {expected}: it was cut short; delete it, or copy it again"
                )
            words: Words = np.frombuffer(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ), "<u8", offset=begin)
    except OSError as error:
        raise DumpError(f"{path}: cannot be read: {error.strerror}") from error
    return StoredSigns(header, layout, counts, words)


def _read_header(path: Path, file: IO[bytes]) -> tuple[SignsHeader, Layout, Counts, int]:
    preamble = file.read(_PREAMBLE.size)
    magic, length, checksum = _PREAMBLE.unpack(preamble) if len(preamble) == _PREAMBLE.size else (b"", 0, 0)
    if magic not in (_MAGIC, _FIRST_MAGIC) or length > _MAX_HEADER:
        raise DumpError(f"{path}: found no file of gradients' signs, expected one that begins with TMSIGNS")
    text = file.read(length)
    if len(text) != length or zlib.crc32(text) != checksum:
        raise DumpError(f"{path}: its header is damaged; delete it, or copy it again")
    try:
        first, parts, counts = (text if magic == _MAGIC else _as_second_version(text)).split(b"\n", 2)
        header: SignsHeader = build(SignsHeader, json.loads(first), "")
        layout, width = _layout_of(parts), 2 + len(header.bounds)
        rows = np.frombuffer(counts, "<i8", count=len(layout.num_words) * width).reshape(-1, width)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DumpError(f"{path}: its header is of another version: {error}") from error
    return header, layout, rows, _PREAMBLE.size + length


def _as_second_version(text: bytes) -> bytes:
    plain: Any = json.loads(text)
    parts = plain.pop("parts")
    counts = [SignCounts(part.pop("num_zeros"), part.pop("num_nans"), part.pop("at_most")) for part in parts]
    return b"\n".join((_json(plain), _json(parts), _packed(counts)))


@functools.lru_cache(maxsize=256)
def _layout_of(text: bytes) -> Layout:
    parts = [_part_of(part) for part in json.loads(text)]
    named = {part.name: part for part in parts}
    if len(named) < len(parts):
        raise ValueError(f"found {len(parts)} parts of {len(named)} parameters, expected one of each")
    return Layout(named, np.array([part.num_words for part in parts], np.int64))


def _part_of(plain: dict[str, Any]) -> GradientPart:
    """Return one part of a header, as `build` does in three times the time."""
    boxes = [IndexBox(_whole_numbers(box.pop("starts")), _whole_numbers(box.pop("sizes"))) for box in plain["boxes"]]
    part = GradientPart(**plain | {"shape": _whole_numbers(plain["shape"]), "boxes": tuple(boxes)})
    kinds = (str, bool, int, int, int)
    told = (part.name, part.is_counted, part.dim, part.offset, part.length)
    if not boxes or tuple(map(type, told)) != kinds or min(told[2:]) < 0:
        raise TypeError(f"found {told} of {len(boxes)} boxes, expected {kinds} of at least one")
    return part


def _whole_numbers(values: Iterable[Any]) -> tuple[int, ...]:
    found = tuple(values)
    if any(type(value) is not int or value < 0 for value in found):
        raise TypeError(f"found {found}, expected whole numbers from 0 on")
    return found
