"""Reads what was collected: packs of ours and of msprobe's, directories of runs. Nothing is unpacked to disk."""

from __future__ import annotations

import json
import re
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainermon.analysis.environment.files import JSON, LOGS, TOML, YAML
from trainermon.analysis.environment.launchers import options_of
from trainermon.core.environment.pack import ABOUT, FORMAT, SECTIONS, VERSION, EnvironmentPack
from trainermon.core.errors import PackError

MAX_BYTES = 1 << 30
"""Of all members together."""
MAX_RATIO = 200
MAX_MEMBERS = 100_000
_RATIO_FROM = 1 << 20  # bytes; a short text of one letter shrinks more, and does no harm
_RANK = re.compile(r"ranks/rank(\d+)\.json")
_OF_STEP = re.compile(r"(dataset|weights)/step(\d+)/rank(\d+)/(?:dataset|weight)\.json")
_RANDOM = re.compile(r"random/rank(\d+)\.json")
_TEXTS = (*LOGS, *YAML, *JSON, *TOML, ".sh")
_HYPERPARAMETERS = re.compile(r"hyperparameters/hyperparameters_(static|dynamic)\.json")


def read_pack(path: Path) -> EnvironmentPack:
    """Return what was collected: from a zip of ours or of msprobe's, or from the directory of a run.

    Raises:
        PackError: It is none of these, is damaged, or unfolds to more than 1 GiB or 200 times its size.
    """
    if path.is_dir():
        return _read_run(path)
    members = _members(path)
    try:
        return _ours(path, members) if ABOUT in members else _of_msprobe(path, members)
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise PackError(f"{path}: damaged ({type(error).__name__}: {error}); collect it again") from error


def _members(path: Path) -> dict[str, bytes]:
    if not path.is_file():
        raise PackError(f"{path}: no such file; expected a pack (`trainermon env collect -o pack.zip`) or a run")
    if path.suffix in _TEXTS:
        raise PackError(
            f"{path}: found a text, expected a pack; collect it first: trainermon env collect {path} -o pack.zip "
            "(scripts, YAML, JSON and TOML; of a log give the configuration that it was started with)"
        )
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
            _check(path, entries)
            return {entry.filename: _content(path, archive, entry) for entry in entries if not entry.is_dir()}
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, NotImplementedError, RuntimeError, ValueError) as error:
        said = " ".join(str(error).split()) or type(error).__name__
        raise PackError(f"{path}: not a whole zip file ({said}); collect it again, or copy it again") from error


def _check(path: Path, entries: list[zipfile.ZipInfo]) -> None:
    if len(entries) > MAX_MEMBERS:
        raise PackError(f"{path}: {len(entries):,} members, expected at most {MAX_MEMBERS:,}; this is no pack")
    total = 0
    for entry in entries:
        parts = entry.filename.replace("\\", "/").split("/")
        if ".." in parts or entry.filename.startswith(("/", "\\")) or ":" in parts[0]:
            raise PackError(f"{path}: member {entry.filename!r} leads out of the pack; do not trust this file")
        total += entry.file_size
        if entry.file_size > _RATIO_FROM and entry.file_size > MAX_RATIO * max(1, entry.compress_size):
            raise PackError(
                f"{path}: member {entry.filename!r} unfolds to {entry.file_size:,} bytes, more than "
                f"{MAX_RATIO} times its size; do not trust this file"
            )
    if total > MAX_BYTES:
        raise PackError(f"{path}: unfolds to {total:,} bytes, expected at most {MAX_BYTES:,}; do not trust this file")


def _content(path: Path, archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> bytes:
    with archive.open(entry) as file:
        content = file.read(entry.file_size + 1)
    if len(content) > entry.file_size:  # the directory of the zip may lie
        raise PackError(f"{path}: member {entry.filename!r} is longer than it says; do not trust this file")
    return content


def _parsed(path: Path, members: Mapping[str, bytes], name: str) -> Any:
    try:
        return json.loads(members[name].decode())
    except UnicodeDecodeError as error:
        raise PackError(f"{path}: member {name!r} is not UTF-8 ({error.reason}); collect it again") from error
    except (ValueError, RecursionError) as error:
        raise PackError(f"{path}: member {name!r} is not JSON ({error}); collect it again") from error


def _mapping(path: Path, members: Mapping[str, bytes], name: str) -> dict[str, Any]:
    found = _parsed(path, members, name)
    if not isinstance(found, dict):
        raise PackError(
            f"{path}: member {name!r}: found {type(found).__name__}, expected names and values; collect it again"
        )
    return found


def _ours(path: Path, members: Mapping[str, bytes]) -> EnvironmentPack:
    about = _mapping(path, members, ABOUT)
    if about.get("format") != FORMAT or about.get("version") != VERSION:
        raise PackError(
            f"{path}: format {about.get('format')!r}, version {about.get('version')!r}; expected {FORMAT!r}, version "
            f"{VERSION}: read it with the trainermon that wrote it"
        )
    sections = about.get("sections", {})
    if not isinstance(sections, dict) or not all(isinstance(section, dict) for section in sections.values()):
        raise PackError(f"{path}: member {ABOUT!r} has no sections of names and values; collect it again")
    ranks = {int(match[1]): _mapping(path, members, name) for name in members if (match := _RANK.fullmatch(name))}
    known = {name: sections[name] for name in SECTIONS if name in sections}
    for section in ("layout", "torch", "hyperparameters", "model", "code"):
        _take_first_rank(known, ranks, section)
    libraries: Mapping[str, str] = next(
        (ranks[rank]["libraries"] for rank in sorted(ranks) if ranks[rank].get("libraries")), {}
    )
    native = {f"native.{name}": {"version": file} for name, file in libraries.items()}
    if native:
        known["packages"] = {**known.get("packages", {}), **native}
    return EnvironmentPack(source=str(path), sections=known, ranks=ranks, notes=tuple(map(str, about.get("notes", ()))))


def _take_first_rank(sections: dict[str, Any], ranks: Mapping[int, Mapping[str, Any]], section: str) -> None:
    """Add what the first rank showed of itself to what was collected without a job; the job knows better."""
    shown = next((ranks[rank][section] for rank in sorted(ranks) if ranks[rank].get(section)), None)
    if shown is not None:
        sections[section] = {**sections.get(section, {}), **shown}


def _of_msprobe(path: Path, members: Mapping[str, bytes]) -> EnvironmentPack:
    sections: dict[str, dict[str, Any]] = {}
    ranks: dict[int, dict[str, Any]] = {}
    for name in sorted(members):
        if name == "env":
            sections["variables"] = _mapping(path, members, name)
        elif name == "pip":
            sections["packages"] = _pip(path, members[name])
        elif _HYPERPARAMETERS.fullmatch(name):
            sections.setdefault("hyperparameters", {}).update(_mapping(path, members, name))
        elif match := _OF_STEP.fullmatch(name):
            shown = ranks.setdefault(int(match[3]), {})
            _add_step(shown, match[1], int(match[2]), _mapping(path, members, name))
        elif match := _RANDOM.fullmatch(name):
            ranks.setdefault(int(match[1]), {})["random"] = {"calls": _mapping(path, members, name)}
    if not sections and not ranks:
        raise PackError(
            f"{path}: neither a pack of trainermon ({ABOUT}) nor one of msprobe (env, pip); is it another zip?"
        )
    return EnvironmentPack(source=str(path), origin="msprobe", sections=sections, ranks=ranks)


def _pip(path: Path, content: bytes) -> dict[str, dict[str, str]]:
    try:
        lines = content.decode().splitlines()
    except UnicodeDecodeError as error:
        raise PackError(f"{path}: member 'pip' is not UTF-8 ({error.reason}); collect it again") from error
    pairs = (line.partition("=") for line in lines if line.strip())
    return {name.strip(): {"version": version.lstrip("=").strip()} for name, _, version in pairs}


def _add_step(shown: dict[str, Any], kind: str, step: int, content: dict[str, Any]) -> None:
    if kind == "weights":
        if step == 0 or "weights" not in shown:
            shown["weights"] = content
    else:
        shown.setdefault("data", {})[str(step)] = dict(_leaves(content))


def _leaves(content: Any, name: str = "") -> Any:
    """Yield the features of each tensor in msprobe's tree of arguments, by its dotted name."""
    if isinstance(content, dict) and set(content) == {"max", "min", "mean", "norm"}:
        yield name, content
    elif isinstance(content, dict):
        for key, value in content.items():
            yield from _leaves(value, f"{name}.{key}" if name else str(key))


def _read_run(path: Path) -> EnvironmentPack:
    ranks: dict[int, Any] = {}
    sections: dict[str, Any] = {}
    for file in sorted(path.glob("ranks/rank*.json")):
        about = _about_rank(file)
        if about.get("environment") is not None:
            ranks[int(about["rank"])] = {"layout": _layout(about)}
            sections = sections or _kept(about["environment"])
    if not ranks:
        runs = sorted({str(file.parents[1]) for file in path.glob("*/ranks/rank*.json")})
        if runs:
            raise PackError(f"{path}: found a folder of runs; expected one of them: {runs[-1]}")
        raise PackError(f"{path}: no settings of an environment in ranks/; expected a run with `environment: true`")
    _take_first_rank(sections, ranks, "layout")
    return EnvironmentPack(source=str(path), origin="run", sections=sections, ranks=ranks)


def _kept(environment: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a rank kept by section; the arguments of its script are hyperparameters."""
    sections = {name: section for name, section in environment.items() if isinstance(section, Mapping)}
    arguments = environment.get("arguments")
    if isinstance(arguments, list):
        sections["hyperparameters"] = {**sections.get("hyperparameters", {}), **options_of(list(map(str, arguments)))}
    return sections


def _about_rank(file: Path) -> dict[str, Any]:
    try:
        about = json.loads(file.read_text(encoding="utf-8"))
        int(about["rank"]), dict(about.get("environment") or {}), dict(about.get("coordinates") or {})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PackError(f"{file}: cannot be read ({error}); is it a run's directory?") from error
    return dict(about)


def _layout(about: Mapping[str, Any]) -> dict[str, Any]:
    coordinates = about.get("coordinates", {})
    sizes = {name: value for name, value in coordinates.items() if name.endswith("size")}
    return {"framework": about.get("framework"), **sizes}
