"""What a check has judged so far, line by line in a file, so that it can go on after it was interrupted."""

from __future__ import annotations

import dataclasses
import enum
import json
import os
import types
import typing
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from typing import Any

from trainermon.analysis.check.checking import CheckedCall
from trainermon.core.errors import DumpError
from trainermon.core.private_files import open_private
from trainermon.core.values import as_plain

_STEM = "accuracy_checking_unfinished_"
_COMPLEX = "complex"
Known = Mapping[tuple[str, int], CheckedCall]
"""Verdicts by source and number of the call."""


class CheckJournal:
    """The file `accuracy_checking_unfinished_<stamp>.jsonl` in the folder of the results: a head, then a line a call.

    Attributes:
        path: The file.
        stamp: The time stamp of the results' files.
        known: What it held when it was opened.
    """

    def __init__(self, path: Path, known: Known, file: FileIO) -> None:
        self.path, self.known, self._file = path, known, file
        self.stamp = path.stem.removeprefix(_STEM)

    @staticmethod
    def place(folder: Path, stamp: str) -> Path:
        """Return the path of the one with this time stamp in the folder of the results."""
        return folder / f"{_STEM}{stamp}.jsonl"

    @classmethod
    def begin(cls, folder: Path, stamp: str, about: Mapping[str, Any]) -> CheckJournal:
        """Start one in `folder`; `about` says what is checked and how, in JSON values.

        Raises:
            DumpError: The folder cannot be written.
        """
        path = cls.place(folder, stamp)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            file = open(path, "wb", buffering=0, opener=open_private)  # noqa: SIM115  # closed by `close`
        except OSError as error:
            raise DumpError(f"cannot write into {folder}: {error}") from error
        journal = cls(path, {}, file)
        journal._write(about)
        return journal

    @classmethod
    def resume(cls, folder: Path, about: Mapping[str, Any], stamp: str = "") -> CheckJournal:
        """Go on with the newest one in `folder`, or that of `stamp`. A last line that was cut off is lost.

        Raises:
            DumpError: There is none, it cannot be read, or it is about something else.
        """
        path = max(folder.glob(f"{_STEM}{stamp or '*'}.jsonl"), default=None)
        if path is None:
            raise DumpError(f"{folder} holds no unfinished check to resume (expected {_STEM}{stamp or '*'}.jsonl)")
        try:
            lines = path.read_bytes().split(b"\n")[:-1]
            known, length = _read(path, lines, about)
            os.truncate(path, length)
            file = open(path, "ab", buffering=0, opener=open_private)  # noqa: SIM115  # closed by `close`
        except OSError as error:
            raise DumpError(f"cannot resume {path}: {error}") from error
        return cls(path, known, file)

    def add(self, source: str, number: int, call: CheckedCall) -> None:
        """Write down a verdict.

        Raises:
            DumpError: The disk is full, for example.
        """
        self._write({"source": source, "number": number, "call": call})

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def remove(self) -> None:
        """Remove the file: the results are written."""
        self.close()
        self.path.unlink(missing_ok=True)

    def _write(self, line: Any) -> None:
        try:
            left = f"{json.dumps(as_plain(line), default=_complex)}\n".encode()
            while left:
                left = left[self._file.write(left) :]
        except OSError as error:
            raise DumpError(f"cannot write {self.path}: {error}; --resume goes on behind what is in it") from error


def _complex(value: complex) -> Any:
    return {_COMPLEX: as_plain([value.real, value.imag])}


def _read(path: Path, lines: list[bytes], about: Mapping[str, Any]) -> tuple[Known, int]:
    """Return the verdicts in whole lines, and the length of these in bytes."""
    known: dict[tuple[str, int], CheckedCall] = {}
    length = 0
    for line in lines:
        try:
            value = json.loads(line)
            if not length:
                _require_same(path, value, about)
            else:
                known[str(value["source"]), int(value["number"])] = from_plain(CheckedCall, value["call"])
        except (ValueError, TypeError, KeyError, AttributeError):
            break
        length += len(line) + 1
    if not length:
        raise DumpError(f"{path} has no head that can be read: start anew, without --resume")
    return known, length


def _require_same(path: Path, found: Any, about: Mapping[str, Any]) -> None:
    expected = json.loads(json.dumps(as_plain(about)))
    for name, value in expected.items():
        if not isinstance(found, dict) or found.get(name) != value:
            was = found.get(name) if isinstance(found, dict) else None
            raise DumpError(
                f"{path} cannot be resumed: it was begun with another {name} ({was}), here it is {value}; start anew, "
                "without --resume"
            )


def from_plain(kind: Any, value: Any) -> Any:
    """Return the value of type `kind` (a type or an annotation) that `as_plain` made these JSON values of.

    >>> from_plain(tuple[float, ...], [1.5, "NaN"])
    (1.5, nan)
    """
    origin = typing.get_origin(kind)
    if origin in (types.UnionType, typing.Union):
        kinds = [one for one in typing.get_args(kind) if one is not type(None)]
        return None if value is None else _number(value) if float in kinds else from_plain(kinds[0], value)
    if origin is tuple:
        inside = typing.get_args(kind)
        types_of = [inside[0]] * len(value) if inside[-1] is Ellipsis else inside
        return tuple(from_plain(one, item) for one, item in zip(types_of, value, strict=True))
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return kind(value)
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        return kind(**{name: from_plain(hints[name], item) for name, item in value.items()})  # type: ignore[operator]
    if isinstance(kind, type) and issubclass(kind, tuple):
        hints = typing.get_type_hints(kind)
        return kind(*(from_plain(hints[name], item) for name, item in zip(hints, value, strict=True)))
    return _number(value) if kind is float else value


def _number(value: Any) -> Any:
    if isinstance(value, dict):
        return complex(*map(float, value[_COMPLEX]))
    return float(value) if isinstance(value, str) else value
