"""The input file of msprobe's compare, compare.json: which dump is held against which."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from trainermon.monitor.errors import ConfigError
from trainermon.monitor.strict import build


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareInput:
    """The keys of a compare.json, in both of msprobe's spellings.

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


def read_compare_input(path: Path) -> tuple[Path, Path]:
    """Return target and golden dump of a compare.json. Relative paths count from the working folder, as in msprobe.

    Raises:
        ConfigError: it cannot be read, has an unknown key, or does not name both sides.
    """
    try:
        raw = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} holds {type(raw).__name__}, expected an object with npu_path and bench_path")
    named = build(CompareInput, raw)
    target, golden = named.npu_path or named.npu_json_path, named.bench_path or named.bench_json_path
    if target is None or golden is None:
        raise ConfigError(f"{path} does not name {'npu_path' if target is None else 'bench_path'}: both are needed")
    return Path(target), Path(golden)
