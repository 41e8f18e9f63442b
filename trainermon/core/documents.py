"""Reads files that people write, JSON or YAML, as plain values: soon, or not at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trainermon.core.errors import ConfigError

MAX_JSON_BYTES = 1 << 20
MAX_YAML_BYTES = 1 << 18
"""PyYAML needs about 10 s for a MiB."""
MAX_REPEATED = 100_000
"""How many values the aliases of a YAML file may stand for together."""


def read_document(path: Path, *, is_yaml: bool | None = None, loader: Any = None) -> Any:
    """Read a JSON or YAML file; return its content as dicts, lists and scalars; None for an empty YAML file.

    `is_yaml` None: the suffix decides, `.yaml` and `.yml` are YAML. `loader` is a subclass of `yaml.SafeLoader`, where
    that itself is not wanted. Aliases that stand for many values are refused: a few lines can stand for more than there
    is memory.

    Raises:
        ConfigError: It cannot be read, is too long, is not UTF-8, or is no document of its kind.
    """
    if is_yaml is None:
        is_yaml = path.suffix in (".yaml", ".yml")
    most = MAX_YAML_BYTES if is_yaml else MAX_JSON_BYTES
    try:
        with path.open("rb") as file:
            content = file.read(most + 1)
        if len(content) > most:
            raise ConfigError(f"has more than {most} bytes, which no file of its kind needs: is it the right one?")
        return _parse(content.decode(), is_yaml=is_yaml, loader=loader)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"cannot be read ({error}); give the path of a JSON or YAML file") from error


def _parse(text: str, *, is_yaml: bool, loader: Any) -> Any:
    try:
        return _load_yaml(text, loader) if is_yaml else json.loads(text)
    except ImportError as error:
        raise ConfigError("YAML needs the package pyyaml; install it or write the file as JSON") from error
    except RecursionError as error:
        raise ConfigError("is nested too deeply") from error
    except Exception as error:  # yaml's own errors are known only where yaml is installed, and it lets out ValueError
        said = " ".join(str(error).split())
        raise ConfigError(f"is not valid {'YAML' if is_yaml else 'JSON'}: {said}") from error


def _load_yaml(text: str, loader: Any) -> Any:
    import yaml  # only users of YAML need the package in the training process

    class DocumentLoader(loader or yaml.SafeLoader):  # type: ignore[misc]  # always a SafeLoader
        num_repeated = 0

        def compose_node(self, parent: Any, index: Any) -> Any:
            event = self.peek_event() if self.check_event(yaml.events.AliasEvent) else None
            node = super().compose_node(parent, index)
            if event is not None:
                self.num_repeated += _num_nodes(node, {})
                if self.num_repeated > MAX_REPEATED:
                    trouble = f"the aliases stand for more than {MAX_REPEATED} values: write out what is meant"
                    raise yaml.composer.ComposerError(None, None, trouble, event.start_mark)
            return node

    return yaml.load(text, Loader=DocumentLoader)  # noqa: S506  # a subclass of SafeLoader


def _num_nodes(node: Any, known: dict[int, int]) -> int:
    """Return how many nodes there are in a node of YAML, each as often as aliases repeat it."""
    if not isinstance(node.value, list):
        return 1
    if node.end_mark is None:  # it is not yet at its end, so it holds itself
        return MAX_REPEATED + 1
    if id(node) not in known:
        parts = (part for item in node.value for part in (item if isinstance(item, tuple) else (item,)))
        known[id(node)] = 1 + sum(_num_nodes(part, known) for part in parts)
    return known[id(node)]
