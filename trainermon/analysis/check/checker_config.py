"""msprobe's configuration of its checker: the block `acc_check` or `run_ut` of config.json, or its config.yaml."""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from torch.nn import functional

from trainermon.accuracy.families import undecided
from trainermon.accuracy.legacy_standards import operation_of
from trainermon.core.errors import ConfigError

BLOCKS = ("acc_check", "run_ut")
MAX_DECIMALS = 20
# For results that msprobe has quantised to integers.
QUANTISED = ("npu_rms_norm_dynamic_quant", "npu_dynamic_quant", "npu_quant_lightning_indexer")
# What a run_ut block says of its networked mode.
_ONLINE = ("is_online", "nfs_path", "host", "port", "rank_list", "tls_path")
_HOMES = (torch, torch.Tensor, functional, torch.linalg, torch.special, torch.fft)
_NPU = "npu_"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CheckerConfig:
    """msprobe's configuration of its checker.

    Attributes:
        white_list: Operations that are judged, `conv2d`; empty: all.
        black_list: Operations that are not, even if they are in `white_list`.
        error_data_path: Where inputs and results of wrong calls are saved.
        precision: Decimals of the measures in the file of details, 0 to 20.
        quantization_api_list: Operations whose integer results may be off by one.
    """

    white_list: tuple[str, ...] = ()
    black_list: tuple[str, ...] = ()
    error_data_path: Path = Path()
    precision: int = 14
    quantization_api_list: tuple[str, ...] = QUANTISED

    def allows(self, key: str) -> bool:
        """Return whether the call with this key in a dump, `Functional.linear.0.forward`, is judged."""
        operation = operation_of(key.rpartition(".")[0])
        return operation not in self.black_list and (not self.white_list or operation in self.white_list)


_TYPES: Mapping[str, type] = {
    "white_list": list,
    "black_list": list,
    "error_data_path": str,
    "precision": int,
    "quantization_api_list": list,
}


def read_checker_config(path: Path) -> CheckerConfig:
    """Return the configuration in `path`: config.json with blocks for tasks, or config.yaml with the keys themselves.

    Raises:
        ConfigError: There is no such file, or a key, a value or the name of an operation in it is wrong.
    """
    document = _document(path)
    keys = {name for name in document if name in _TYPES}
    blocks = [name for name in BLOCKS if name in document]
    if path.suffix == ".json" and not keys:
        if len(blocks) > 1 and document[blocks[0]] != document[blocks[1]]:
            raise ConfigError(f"{path}: found the blocks {blocks[0]} and {blocks[1]}, which differ: leave one out")
        where, given = (f"{path}: {blocks[0]}", document[blocks[0]]) if blocks else (str(path), {})
    else:
        where, given = str(path), document
    if not isinstance(given, dict):
        raise ConfigError(f"{where}: found {given!r}, expected keys such as white_list")
    return _config(where, given)


def read_network_config(path: Path) -> Mapping[str, Any]:
    """Return the keys of msprobe's networked mode in a config.json: host, port, tls_path and others.

    Raises:
        ConfigError: The file cannot be read, or the block does not say `is_online`.
    """
    block = _document(path).get("run_ut")
    if not isinstance(block, dict) or not block.get("is_online"):
        raise ConfigError(f'{path}: expected "run_ut" with "is_online": true')
    found = {key: block[key] for key in _ONLINE if block.get(key) not in (None, "")}
    for key, kind in (("host", str), ("port", int), ("tls_path", str), ("nfs_path", str), ("rank_list", list)):
        if key in found and (not isinstance(found[key], kind) or isinstance(found[key], bool)):
            raise ConfigError(f"{path}: run_ut: {key}: found {found[key]!r}, expected {kind.__name__}")
    ranks = found.get("rank_list", [])
    if not all(type(rank) is int and rank >= 0 for rank in ranks):
        raise ConfigError(f"{path}: run_ut: rank_list: found {ranks!r}, expected numbers of ranks")
    return found


def _document(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        document = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read {path}: {' '.join(str(error).split())}") from error
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise ConfigError(f"{path}: found {type(document).__name__}, expected keys and their values")
    return document


def _config(where: str, given: Mapping[str, Any]) -> CheckerConfig:
    if given.get("is_online"):
        raise ConfigError(f"{where}: is_online: `trainermon check follow --config FILE` takes calls over a network")
    values: dict[str, Any] = {}
    for key, value in given.items():
        if key in _ONLINE:
            continue
        if key not in _TYPES:
            raise ConfigError(f"{where}: unknown key {key!r}{_meant(str(key), _TYPES)}")
        if not isinstance(value, _TYPES[key]) or isinstance(value, bool):
            raise ConfigError(f"{where}: {key}: found {value!r}, expected {_TYPES[key].__name__}")
        values[key] = _value(f"{where}: {key}", key, value)
    return CheckerConfig(**values)


def _value(where: str, key: str, value: Any) -> Any:
    match key:
        case "precision":
            if not 0 <= value <= MAX_DECIMALS:
                raise ConfigError(f"{where}: found {value}, expected 0 to {MAX_DECIMALS}")
            return value
        case "error_data_path":
            if not Path(value).is_dir():
                raise ConfigError(f"{where}: there is no folder {value}")
            return Path(value)
        case _:
            return tuple(_operation(where, name) for name in value)


def _operation(where: str, name: object) -> str:
    """Return the name of an operation if torch or an NPU has one of it."""
    if not isinstance(name, str):
        raise ConfigError(f"{where}: found {name!r}, expected the name of an operation")
    last = name.rpartition(".")[2]
    if last.startswith(_NPU) or not undecided([name]) or any(hasattr(home, last) for home in _HOMES):
        return name
    raise ConfigError(f"{where}: unknown operation {name!r}{_meant(name, {n for home in _HOMES for n in dir(home)})}")


def _meant(found: str, known: Collection[str]) -> str:
    close = difflib.get_close_matches(found, sorted(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
