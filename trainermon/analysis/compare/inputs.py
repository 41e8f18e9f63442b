"""The input file of msprobe's compare, compare.json: which dump is held against which."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainermon.core.errors import ConfigError
from trainermon.core.strict import build

_SIDES = ("npu_path", "bench_path", "npu_json_path", "bench_json_path")


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareInput:
    """The content of a compare.json (msprobe's file that says which dumps to compare), in either of its spellings.

    Attributes:
        npu_path: the target: a dump.json, or a folder of steps or ranks.
        bench_path: the golden dump, likewise.
        npu_json_path: the same as `npu_path`.
        bench_json_path: the same as `bench_path`.
        stack_path: without effect: stacks are read from the target's folder.
        stack_json_path: without effect, likewise.
        is_print_compare_log: without effect.
        rank_id: without effect.
    """

    npu_path: str | None = None
    bench_path: str | None = None
    npu_json_path: str | None = None
    bench_json_path: str | None = None
    stack_path: str | None = None
    stack_json_path: str | None = None
    is_print_compare_log: bool = False
    rank_id: str | None = None


def read_compare_input(source: Path | str | Mapping[str, Any]) -> tuple[Path, Path]:
    """Return the paths of the target and the golden dump that a compare.json, or a mapping with its keys, names.

    Relative paths count from the working folder, as in msprobe.

    Raises:
        ConfigError: it cannot be read, has an unknown key, or does not name both sides.
    """
    name = "input_param" if isinstance(source, Mapping) else str(source)
    raw = source if isinstance(source, Mapping) else _read(Path(source))
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{name} holds {type(raw).__name__}, expected an object with npu_path and bench_path")
    named = build(CompareInput, {key: str(value) if isinstance(value, Path) else value for key, value in raw.items()})
    target, golden = named.npu_path or named.npu_json_path, named.bench_path or named.bench_json_path
    if target is None or golden is None:
        raise ConfigError(f"{name} does not name {'npu_path' if target is None else 'bench_path'}: both are needed")
    return Path(target), Path(golden)


def is_compare_input(source: Any) -> bool:
    """Return whether `source` is the path of a compare.json, and not that of a dump."""
    if not isinstance(source, Path | str) or Path(source).suffix != ".json" or not Path(source).is_file():
        return False
    raw = _read(Path(source))
    return isinstance(raw, dict) and not raw.keys().isdisjoint(_SIDES)


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}") from error
