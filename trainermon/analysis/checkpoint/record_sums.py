"""Whether the records of torch's files are what was written: each archive has the CRC-32 of every record.

Torch's own loader checks none of them. Safetensors and MindSpore's files have no sums.
"""

from __future__ import annotations

import os
import zlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from trainermon.analysis.checkpoint.formats.regular_files import RegularFile
from trainermon.analysis.checkpoint.formats.zip_records import archives_in, content_start, is_named, zip_records
from trainermon.analysis.checkpoint.inspection import CheckedTensor, all_tensors
from trainermon.analysis.checkpoint.pieces import Checkpoint, TensorPieces, mapped
from trainermon.core.terminal.progress import counted

_CHUNK_BYTES = 1 << 24
_NO_SUM = -1  # of a record that is another one: no content has it


class SummedRecord(NamedTuple):
    """A record of an archive in a file: its place in bytes, and the CRC-32 that was written with it."""

    path: Path
    start: int
    size: int
    name: str
    crc: int

    @property
    def fault(self) -> str:
        """What is said of a record whose content, or name, is another one."""
        what = "CRC-32" if self.crc != _NO_SUM else "name"
        return f"{self.path}: record {self.name} is not what was written: its {what} is another; copy it again"


def verify_sums(
    checkpoint: Checkpoint, found: Sequence[CheckedTensor], *, jobs: int = 0
) -> tuple[list[CheckedTensor], list[str]]:
    """Return what `check_tensors` found of all tensors, with the faults of records whose sum is wrong.

    And what is wrong with records that hold no tensor. Reads each file once more, from the system's memory where it
    fits; `jobs` threads, 0: one per core. Records without a sum (`set_crc32_options(False)` of torch) are passed over.

    Raises:
        CheckpointError: a file has become shorter.
    """
    works = [tensor for _, tensor in all_tensors(checkpoint)]
    paths = sorted({piece.stored.path for tensor in works for piece in tensor.pieces})
    wrong = _wrong_records(paths, jobs)
    if not wrong:
        return list(found), []
    faults = [_faults(tensor, wrong) for tensor in works]
    said = {fault for of_tensor in faults for fault in of_tensor}
    checked = [replace(one, faults=(*one.faults, *more)) for one, more in zip(found, faults, strict=True)]
    return checked, [record.fault for record in wrong if record.fault not in said]


def _wrong_records(paths: Iterable[Path], jobs: int) -> list[SummedRecord]:
    """Return the records of all archives in these files whose content has another sum, by file and place."""
    records = sorted(record for path in paths for record in _records(path))
    with ThreadPoolExecutor(jobs or os.cpu_count() or 1) as pool:
        right = counted(pool.map(_is_right, records), len(records), "records")
        return [record for record, is_right in zip(records, right, strict=True) if not is_right]


def _records(path: Path) -> Iterator[SummedRecord]:
    with RegularFile(path) as file:
        for start, length in archives_in(file):
            for name, record in zip_records(file, start, length).items():
                is_named_so = is_named(file, record, name)
                if record.crc or not is_named_so:
                    crc = record.crc if is_named_so else _NO_SUM
                    yield SummedRecord(path, content_start(file, record), record.size, name, crc)


def _is_right(record: SummedRecord) -> bool:
    content, crc = mapped(record.path, record.start, record.size), 0
    for at in range(0, record.size, _CHUNK_BYTES):
        crc = zlib.crc32(content[at : at + _CHUNK_BYTES].data, crc)
    return crc == record.crc


def _faults(tensor: TensorPieces, wrong: Sequence[SummedRecord]) -> list[str]:
    """Return the faults of the records that the elements of a tensor begin in, each once."""
    found: dict[str, None] = {}
    for piece in tensor.pieces:
        place = (piece.stored.path, piece.stored.offset)
        at = bisect_right(wrong, place, key=lambda record: (record.path, record.start)) - 1
        if at >= 0 and wrong[at].path == place[0] and place[1] < wrong[at].start + wrong[at].size:
            found[wrong[at].fault] = None
    return list(found)
