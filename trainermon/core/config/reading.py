"""How a file or a mapping becomes a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainermon.core.config import mindformers, msprobe
from trainermon.core.config.schema import MonitorConfig
from trainermon.core.documents import read_document
from trainermon.core.errors import ConfigError
from trainermon.core.strict import build


def load_config(source: str | Path | Mapping[str, Any] | None) -> tuple[MonitorConfig, tuple[str, ...]]:
    """Read a configuration from a file or mapping.

    Return it, and a sentence for every key without (or with another) effect.

    Args:
        source: Path of a `.json`, `.yaml` or `.yml` file, a mapping of the same keys, or None for the defaults.

    Raises:
        ConfigError: The file cannot be read or parsed, or a key is unknown, wrong or at odds with another.
    """
    if source is None:
        return MonitorConfig(), ()
    if isinstance(source, Mapping):
        return parse_config(source)
    if not isinstance(source, str | Path):
        raise ConfigError(
            f"configuration: found {type(source).__name__}, expected the path of a file, a mapping, or None"
        )
    path = Path(source)
    try:
        return parse_config(read_mapping(path))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def parse_config(raw: Mapping[str, Any]) -> tuple[MonitorConfig, tuple[str, ...]]:
    """Return the configuration of a mapping, and a sentence for each key that has no effect, or another one.

    Raises:
        ConfigError: A key is unknown, wrong or at odds with another.
    """
    translate = mindformers.translated if mindformers.is_for_mindformers(raw) else msprobe.translated
    wanted, notes = translate(raw)
    return build(MonitorConfig, wanted, ""), notes


def read_mapping(path: Path) -> Mapping[str, Any]:
    """Return the keys and values of a JSON or YAML file; an empty one has none.

    Raises:
        ConfigError: It cannot be read or parsed, or is no mapping.
    """
    value = read_document(path)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"found a {type(value).__name__} at the top, expected a mapping of keys to values")
    return value
