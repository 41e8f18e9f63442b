"""YAML without aliases: a few lines of these stand for gigabytes."""

from __future__ import annotations

from typing import Any

import yaml


class _PlainLoader(yaml.SafeLoader):
    def compose_node(self, parent: Any, index: Any) -> Any:
        """Return the next node, unless it stands for another one."""
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()  # type: ignore[no-untyped-call]
            raise yaml.YAMLError(
                f"the alias *{event.anchor} in line {event.start_mark.line + 1}: write out what it stands for"
            )
        return super().compose_node(parent, index)


def load_plain(text: str) -> Any:
    """Parse a YAML document into dicts, lists and scalars; aliases are refused: they can make a small file huge.

    Raises:
        yaml.YAMLError: It is no YAML, or has an alias.
        ValueError, RecursionError: A date or a number is none, or it is nested too deeply.
    """
    return yaml.load(text, Loader=_PlainLoader)  # noqa: S506  (a SafeLoader)
