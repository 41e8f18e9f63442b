"""Which tensors an argument names: a file, one of several in a file, or those of a folder, in the order of the dump."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from trainermon.analysis.checkpoint.opening import is_checkpoint, open_checkpoint
from trainermon.analysis.checkpoint.pieces import Box, Piece
from trainermon.analysis.tensor.files import SUFFIXES, StoredTensor, UnreadTensor, open_tensors
from trainermon.core.errors import CheckpointError, DumpError
from trainermon.dump.files.reader import read_dump
from trainermon.dump.files.records import DUMP_FILE, PARTIAL_FILE, Dump, EntryRecord, TensorRecord

MARK = "::"
_Opened = StoredTensor | UnreadTensor


@dataclass(frozen=True, slots=True)
class TensorSelector:
    """What a command line argument `PATH` or `PATH::NAME` selects among stored tensors.

    Attributes:
        path: A tensor file, or a folder of them, as a dump.
        pattern: NAME: the tensor's name, or a part of it; "": everything.
    """

    path: Path
    pattern: str

    def tensors(self) -> Iterator[StoredTensor]:
        """Yield the selected tensors that can be read, opening one file at a time.

        Raises:
            DumpError: there is no tensor of that name, none can be read, or the only file is damaged.
        """
        unread: UnreadTensor | None = None
        found = False
        for tensor in self.opened():
            if isinstance(tensor, UnreadTensor):
                unread = unread or tensor
                continue
            found = True
            yield tensor
        if unread is not None and not found:
            raise DumpError(f"{unread.label} is not read: {unread.reason}")

    def opened(self) -> Iterator[StoredTensor | UnreadTensor]:
        """Yield the selected tensors as `tensors` does, and in their places those that are not read.

        Of a folder, a file that is damaged, or of which nothing is read, counts as one of those.

        Raises:
            DumpError: there is no tensor of that name, or the only file is damaged.
        """
        found = False
        files = [] if self._is_checkpoint() else [file for file in self.files() if file.suffix in SUFFIXES]
        for tensor in () if files else self._of_checkpoint(self.path):
            found = True
            yield tensor
        for file in files:
            for tensor in self._of_file(file):
                found = True
                yield tensor
        if not found:
            wanted = f"no tensor named like {self.pattern!r}" if self.pattern else "no tensor file"
            raise DumpError(f"{self.path} holds {wanted}{self._hint()}")

    def files(self) -> list[Path]:
        """Return the paths of the selected tensor files; those of a dump in the order of its calls.

        Raises:
            DumpError: there is nothing at the path.
        """
        if not self.path.is_dir():
            return [self.path]
        known = {path: number for number, path in enumerate(_ordered(self.path))}
        found = [path for path in self.path.rglob("*") if path.suffix in SUFFIXES and path.is_file()]
        return sorted(found, key=lambda path: (known.get(path, len(known)), path.as_posix()))

    def one(self) -> StoredTensor:
        """Return the only selected tensor.

        Raises:
            DumpError: there are none or several.
        """
        tensors = self.tensors()
        first, second = next(tensors), next(tensors, None)
        if second is not None:
            raise DumpError(
                f"{self.path} holds several tensors that fit, {first.label} and {second.label} among them:"
                f" name one, as in {self.path}{MARK}NAME"
            )
        return first

    def is_several(self) -> bool:
        """Return whether several tensors are selected, those that are not read among them."""
        return len(list(islice(self.opened(), 2))) > 1

    def records(self) -> list[tuple[str, TensorRecord]]:
        """Return (name, statistics) of the selected tensors by the dump's records alone; [] if it is no dump."""
        found = [] if not self.path.is_dir() else _dumps(self.path)
        return [(name, record) for dump in found for name, record in _named(dump) if self.pattern in name]

    def _of_file(self, path: Path) -> Iterator[_Opened]:
        if not self.path.is_dir():
            yield from self._named(_opened(path))
        elif self.pattern in path.relative_to(self.path).as_posix():
            try:
                yield from _opened(path)
            except DumpError as error:
                yield UnreadTensor(path=path, name="", reason=str(error))

    def _is_checkpoint(self) -> bool:
        try:
            return self.path.is_dir() and is_checkpoint(self.path)
        except CheckpointError as error:
            raise DumpError(str(error)) from error

    def _of_checkpoint(self, path: Path) -> Iterator[_Opened]:
        """Yield the selected tensors of a checkpoint, of any format; nothing if it is none."""
        try:
            yield from self._named(_checkpoint_tensors(path))
        except CheckpointError as error:
            if not path.is_dir():
                raise DumpError(f"{error}; or a file that ends in {', '.join(SUFFIXES)}") from error

    def _named(self, tensors: list[_Opened]) -> list[_Opened]:
        exact = [tensor for tensor in tensors if tensor.name == self.pattern]
        return exact or [tensor for tensor in tensors if self.pattern in tensor.name]

    def _hint(self) -> str:
        if self.pattern:
            return f"; without {MARK}{self.pattern} all are shown"
        if self.records():
            return ": the dump has statistics only; dump with task tensor"
        return f": expected files that end in {', '.join(SUFFIXES)}"


def parse_target(text: str) -> TensorSelector:
    """Parse an argument `PATH` or `PATH::NAME`, which names stored tensors.

    Raises:
        DumpError: there is nothing at that path.
    """
    path, _, pattern = (text, "", "") if os.path.exists(text) else text.partition(MARK)  # False of too long a name
    if not os.path.exists(path):
        raise DumpError(f"{path} does not exist: expected a tensor file, or a folder of them")
    return TensorSelector(Path(path), pattern)


def _opened(path: Path) -> list[_Opened]:
    try:
        return open_tensors(path)
    except DumpError:
        try:
            return _checkpoint_tensors(path)  # a file of torch that holds more than tensors
        except CheckpointError:
            pass
        raise


def _checkpoint_tensors(path: Path) -> list[_Opened]:
    """Return the tensors of a checkpoint; of those that are split, each piece by itself; and those not read."""
    checkpoint = open_checkpoint(path)
    kinds = [("", checkpoint.tensors), *((f"{kind}: ", state) for kind, state in checkpoint.optimizer.items())]
    stored = [
        StoredTensor(
            path=piece.stored.path,
            name=f"{kind}{tensor.name}{_part_of(number, tensor.pieces)}",
            dtype=tensor.dtype,
            raw=piece.stored.array(),
        )
        for kind, tensors in kinds
        for tensor in tensors.values()
        for number, piece in enumerate(tensor.pieces, start=1)
    ]
    left = (name.rpartition(" (") for name in checkpoint.unread)
    unread = [
        UnreadTensor(path=path, name=name, reason=f"it is of the kind {kind.removesuffix(')')}")
        for name, _, kind in left
    ]
    return [*stored, *unread]


def _part_of(number: int, pieces: Sequence[Piece]) -> str:
    if len(pieces) == 1:
        return ""
    region = pieces[number - 1].region
    where = list(region.starts) if isinstance(region, Box) else f"element {region.start}"
    return f" piece {number} of {len(pieces)} at {where}"


def called_in(path: Path) -> str:
    """Return the line of the user's code whose call a dump's tensor file comes from, "" if no dump tells.

    A backward is told by the line of its forward.
    """
    try:
        dump = read_dump(path.parent.parent)
    except DumpError:
        return ""
    found = next((entry for entry in dump.entries if any(record.data_path == path for record in _records(entry))), None)
    if found is None:
        return ""
    same = [entry for entry in dump.entries if _call(entry) == _call(found)]
    return next((" ".join(entry.stack[0].split()) for entry in (found, *same) if entry.stack), "")


def _call(entry: EntryRecord) -> tuple[str, str, int]:
    return entry.module, entry.class_name, entry.call


def _dumps(folder: Path) -> list[Dump]:
    places = {path.parent for name in (DUMP_FILE, PARTIAL_FILE) for path in folder.rglob(name)}
    return [read_dump(place) for place in sorted(places)]


def _named(dump: Dump) -> Iterator[tuple[str, TensorRecord]]:
    for entry in dump.entries:
        for record in _records(entry):
            yield f"{entry.key}.{record.slot}", record


def _records(entry: EntryRecord) -> Iterator[TensorRecord]:
    yield from entry.inputs
    yield from entry.parameters
    yield from entry.outputs


def _ordered(folder: Path) -> Iterator[Path]:
    """Yield the files of the dumps below `folder`, or above it if it is their tensor folder."""
    places = _dumps(folder) or ([read_dump(folder.parent)] if (folder.parent / DUMP_FILE).exists() else [])
    for dump in places:
        for entry in dump.entries:
            yield from (record.data_path for record in _records(entry) if record.data_path is not None)
