"""Which packages an interpreter finds: names, versions, where an editable one comes from."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import re
import sys
from collections.abc import Sequence
from pathlib import PurePath
from typing import NamedTuple

from trainermon.core.environment.secrets import Redactor

_INSTALLED = ("site-packages", "dist-packages")
_RELEASE = re.compile(r"v?(\d+!)?(\d+(?:\.\d+)*)(.*)")
_SPELLINGS = (
    ("alpha", "a"),
    ("beta", "b"),
    ("preview", "rc"),
    ("pre", "rc"),
    ("c", "rc"),
    ("rev", "post"),
    ("r", "post"),
)


class PackageVersion(NamedTuple):
    """What is known of an installed package.

    Attributes:
        version: As its metadata say; "" if they do not.
        source: Where it was installed from, with the commit, if that was no index; else "".
        record: 64 bits of the hash of the list of its files with their hashes; "" if there is none.
    """

    version: str
    source: str = ""
    record: str = ""


def collect_packages(redactor: Redactor) -> dict[str, PackageVersion]:
    """Return the packages that this interpreter finds, by normalised name; of a name that is there twice, the first.

    Reads the metadata of each; imports none. What a package carries for itself alone is not counted: setuptools and ray
    put folders of their own on `sys.path` when they are imported.
    """
    found: dict[str, PackageVersion] = {}
    for distribution in importlib.metadata.distributions(path=_own_folders(sys.path)):
        try:
            name, version = distribution.metadata["Name"], distribution.version
            record, origin = distribution.read_text("RECORD"), distribution.read_text("direct_url.json")
        except (KeyError, OSError, UnicodeError):
            continue
        if name:
            digest = hashlib.sha256((record or "").encode()).hexdigest()[:16] if record else ""
            source = _source(origin, redactor) if origin else ""
            found.setdefault(normal_name(name), PackageVersion(version or "", source, digest))
    return dict(sorted(found.items()))


def _own_folders(folders: Sequence[str]) -> list[str]:
    """Return the folders that packages are installed into: none within one that is there, too, but for eggs."""
    installed = {PurePath(folder) for folder in folders if PurePath(folder).name in _INSTALLED}
    return [folder for folder in folders if folder.endswith(".egg") or installed.isdisjoint(PurePath(folder).parents)]


def normal_name(name: str) -> str:
    """Return a package's name as PEP 503 normalises it.

    >>> normal_name("Flash_Attn")
    'flash-attn'
    """
    return re.sub(r"[-_.]+", "-", name).lower()


def same_version(one: str, other: str) -> bool:
    """Return whether two versions are equal by PEP 440: `2.0` is `2.0.0`, `1.0rc1` is `1.0-c1`; `+cpu` counts.

    >>> same_version("2.0", "2.0.0"), same_version("1.0-RC.1", "1.0rc1"), same_version("2.1+cpu", "2.1")
    (True, True, False)
    """
    return _canonical(one) == _canonical(other)


def _canonical(version: str) -> tuple[str, ...]:
    public, _, local = version.strip().lower().partition("+")
    match = _RELEASE.fullmatch(public)
    if match is None:
        return (version.strip(),)
    numbers = [int(number) for number in match[2].split(".")]
    while len(numbers) > 1 and not numbers[-1]:
        numbers.pop()
    epoch = (match[1] or "0!").lstrip("0") or "!"
    suffix = re.sub(r"^-(\d+)$", r"post\1", match[3])
    suffix = re.sub(r"[-_.]", "", suffix)
    suffix = re.sub(r"[a-z]+", lambda found: dict(_SPELLINGS).get(found[0], found[0]), suffix)
    suffix = re.sub(r"([a-z])(?!\d|[a-z])", r"\g<1>0", suffix)
    return epoch, ".".join(map(str, numbers)), suffix, re.sub(r"[-_.]", ".", local)


def _source(text: str, redactor: Redactor) -> str:
    try:
        origin = json.loads(text)
        url, commit = str(origin.get("url", "")), str(origin.get("vcs_info", {}).get("commit_id", ""))
        is_editable = bool(origin.get("dir_info", {}).get("editable"))
    except (ValueError, AttributeError):
        return ""
    return " ".join(filter(None, [redactor.text(url), commit, "editable" if is_editable else ""]))
