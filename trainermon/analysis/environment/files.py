"""Configuration files as names and values: YAML, JSON and TOML, with the whole path as the name."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trainermon.core.documents import MAX_YAML_BYTES, read_document
from trainermon.core.errors import ConfigError, PackError

YAML, JSON, TOML = (".yaml", ".yml"), (".json",), (".toml",)
LOGS = (".log", ".txt")


def read_configuration(path: Path) -> dict[str, Any]:
    """Return the values of a configuration file by their dotted paths; lists of plain values are values.

    Raises:
        PackError: It cannot be read, or is none of its kind.
    """
    try:
        document = _toml(path) if path.suffix in TOML else _document(path, is_yaml=path.suffix in YAML)
    except (ConfigError, OSError, UnicodeError, ValueError, RecursionError) as error:
        raise PackError(f"{path}: {' '.join(str(error).split())}") from error
    if document is not None and not isinstance(document, Mapping):
        raise PackError(f"{path}: found a {type(document).__name__} at the top, expected names and values")
    return dict(flattened(document or {}))


def flattened(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield nested values by dotted path: `optimizer.params.lr`, `layers.0.size`.

    >>> dict(flattened({"a": {"b": 1}, "c": [1, 2], "d": [{"e": 3}]}))
    {'a.b': 1, 'c': [1, 2], 'd.0.e': 3}
    """
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from flattened(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple) and any(isinstance(item, Mapping | list | tuple) for item in value):
        for number, item in enumerate(value):
            yield from flattened(item, f"{name}.{number}" if name else str(number))
    elif name:
        yield name, list(value) if isinstance(value, tuple) else value


def _document(path: Path, *, is_yaml: bool) -> Any:
    if not is_yaml or importlib.util.find_spec("yaml") is None:
        return read_document(path, is_yaml=is_yaml)
    import yaml

    class InertLoader(yaml.SafeLoader):
        """Takes objects of Python, which Lightning writes (tuples, namespaces), as the values that they are made of."""

    def plain(loader: Any, _kind: str, node: Any) -> Any:
        if isinstance(node, yaml.MappingNode):
            return loader.construct_mapping(node, deep=True)
        is_list = isinstance(node, yaml.SequenceNode)
        return loader.construct_sequence(node, deep=True) if is_list else loader.construct_scalar(node)

    InertLoader.add_multi_constructor("tag:yaml.org,2002:python/", plain)
    return read_document(path, is_yaml=True, loader=InertLoader)


def _toml(path: Path) -> Any:
    try:
        tomllib = importlib.import_module("tomllib")
    except ImportError as error:
        raise ConfigError("TOML needs Python 3.11 or newer; write the file as JSON or YAML") from error
    if path.stat().st_size > MAX_YAML_BYTES:
        raise ConfigError(f"has more than {MAX_YAML_BYTES} bytes, which no file of its kind needs")
    return tomllib.loads(path.read_text(encoding="utf-8"))
