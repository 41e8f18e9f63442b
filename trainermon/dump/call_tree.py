"""Which call of a dump runs inside which, and the stacks that calls were made from: construct.json and stack.json."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from trainermon.dump.files.lines import LineFile
from trainermon.dump.forms import quoted


class CallTree:
    """Keeps which call runs inside which, and the stacks of the calls; each different stack goes to `lines` once."""

    def __init__(self, lines: LineFile) -> None:
        self._lines = lines
        self._parents: dict[str, str | None] = {}
        self._stacks: dict[tuple[str, ...], tuple[int, list[str]]] = {}

    def put(self, key: str, parent: str | None, stack: Sequence[str] | None) -> str:
        """Record the parent of a call; return what its own line says of it: `, "parent": …, "stack": …`."""
        text = f', "parent": {"null" if parent is None else quoted(parent)}'
        if stack is not None:
            text += f', "stack": {self._stack_number(key, tuple(stack))}'
        self._parents[key] = parent
        return text

    def parents_text(self) -> str:
        """Return the text of construct.json: the parent of each call, by key."""
        return object_text(self._parents)

    def stacks_text(self) -> str:
        """Return the text of stack.json: by number the keys that share a stack, and its frames."""
        return object_text({str(number): (keys, frames) for frames, (number, keys) in self._stacks.items()})

    def _stack_number(self, key: str, frames: tuple[str, ...]) -> int:
        known = self._stacks.get(frames)
        if known is None:
            known = self._stacks[frames] = len(self._stacks), []
            self._lines.put(json.dumps({"stack": known[0], "frames": frames}))
        known[1].append(key)
        return known[0]


def object_text(value: dict[str, Any]) -> str:
    """Return JSON with one line for each key; with `indent` it would take ten times as long."""
    return "{" + ",".join(f"\n {json.dumps(key)}: {json.dumps(item)}" for key, item in value.items()) + "\n}"
