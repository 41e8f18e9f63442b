"""A pack: what was collected of one training, as sections of names and values, and the zip that holds it.

The members that msprobe's `config_check` reads (`env`, `pip`, `hyperparameters/`, `weights/`, `dataset/`, `random/`)
are there beside ours, so both tools read one file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import io
import json
import os
import re
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from trainermon.core.errors import PackError
from trainermon.core.private_files import open_private, replace_file
from trainermon.core.values import as_plain

VERSION = 1
FORMAT = "trainermon environment"
ABOUT, RANK_FILE = "trainermon.json", "ranks/rank{}.json"
SECTIONS = (
    "system",
    "torch",
    "variables",
    "packages",
    "code",
    "hyperparameters",
    "model",
    "layout",
    "random",
    "data",
    "weights",
)
_OF_RANK = re.compile(r"/rank(\d+)[./]")
_FIRST_DAY = (1980, 1, 1, 0, 0, 0)  # members carry no time, so that equal packs are equal files


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentPack:
    """What was collected of one training.

    Attributes:
        source: Where it was read from, for people.
        origin: Who wrote it: `trainermon`, `msprobe`, or `run` for the directory of a run.
        sections: Names and values by section; a section that is not there was not collected.
        ranks: What each rank showed, by section.
        notes: What could not be collected, and why.
    """

    source: str = ""
    origin: str = "trainermon"
    sections: Mapping[str, Mapping[str, Any]]
    ranks: Mapping[int, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()


def write_pack(path: Path, pack: EnvironmentPack, *, world_size: int = 1) -> None:
    """Write a pack (0600), in place of what was at `path`.

    What ranks from 1 to below `world_size` have put there stays: they may have been faster than this one.

    Raises:
        PackError: It cannot be written.
    """

    def is_of_other_rank(name: str) -> bool:
        match = _OF_RANK.search(name)
        return match is not None and 0 < int(match[1]) < world_size

    update_pack(path, members_of(pack), keep=is_of_other_rank)


def update_pack(path: Path, members: Mapping[str, bytes], *, keep: Callable[[str], bool] | None = None) -> None:
    """Put members into the zip at `path`, in place of those of the same name; others stay if `keep` says so, or all.

    Ranks that do so at once take turns, and a reader sees the old file or the new one.

    Raises:
        PackError: It cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _turn(path):
            kept = {name: content for name, content in _members(path).items() if keep is None or keep(name)}
            replace_file(path, _zipped({**kept, **members}))
    except (OSError, zipfile.BadZipFile) as error:
        raise PackError(f"{path}: cannot be written ({error}); choose another place with -o") from error


def members_of(pack: EnvironmentPack) -> dict[str, bytes]:
    """Return the members of a pack's zip: ours, and those that msprobe reads."""
    about = {
        "format": FORMAT,
        "version": VERSION,
        "created_s": round(time.time()),
        "sections": pack.sections,
        "notes": list(pack.notes),
    }
    members = {ABOUT: encoded(about)}
    for rank, shown in pack.ranks.items():
        members[RANK_FILE.format(rank)] = encoded(shown)
    if "variables" in pack.sections:
        members["env"] = encoded(pack.sections["variables"])
    if "packages" in pack.sections:
        lines = [f"{name}={value.get('version', '')}\n" for name, value in pack.sections["packages"].items()]
        members["pip"] = "".join(lines).encode()
    if pack.sections.get("hyperparameters"):
        members["hyperparameters/hyperparameters_static.json"] = encoded(pack.sections["hyperparameters"])
    return members


def encoded(content: Any) -> bytes:
    """Return plain values, dataclasses and enums as JSON."""
    return (json.dumps(as_plain(content), indent=1, ensure_ascii=True, default=str) + "\n").encode()


def _zipped(members: Mapping[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            entry = zipfile.ZipInfo(name, _FIRST_DAY)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = 0o600 << 16
            archive.writestr(entry, content)
    return buffer.getvalue()


def _members(path: Path) -> dict[str, bytes]:
    try:
        with zipfile.ZipFile(path) as archive:
            return {entry.filename: archive.read(entry) for entry in archive.infolist()}
    except (FileNotFoundError, zipfile.BadZipFile):  # what was there is no pack, and goes
        return {}


@contextlib.contextmanager
def _turn(path: Path) -> Iterator[None]:
    lock = path.with_name(f".{path.name}.lock")
    while True:
        descriptor = open_private(lock, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if not _is_still(lock, descriptor):  # whoever had it before has removed it
                continue
            yield
            lock.unlink()
            return
        finally:
            os.close(descriptor)


def _is_still(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False
