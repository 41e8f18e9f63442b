"""Which call of a dump runs inside which, and the stacks that calls were made from: construct.json and stack.json."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from trainermon.dump.files.lines import LineFile
from trainermon.dump.forms import json_text, quoted

_LINE, _END = "\n ", "\n}"


class CallTree:
    """Keeps, for the calls of a dump, which call runs inside which, and the lines of the script (stack) that made each.

    Each different stack is written to `lines` once, with a number. `parents_text` and `stacks_text` give the texts of
    construct.json and stack.json.
    """

    def __init__(self, lines: LineFile) -> None:
        self._lines = lines
        self._parents: dict[str, str | None] = {}
        self._stacks: dict[tuple[str, ...], tuple[int, list[str]]] = {}

    def put(self, key: str, parent: str | None, stack: Sequence[str] | None) -> str:
        """Record the parent and the stack of the call `key`; return the JSON items for the call's own line in the dump.

        They are `, "parent": "…", "stack": 3`: the parent's key (null at the top), and the number of the stack, left
        out where `stack` is None.
        """
        text = f', "parent": {"null" if parent is None else quoted(parent)}'
        if stack is not None:
            text += f', "stack": {self._stack_number(key, tuple(stack))}'
        self._parents[key] = parent
        return text

    def parents_text(self) -> str:
        """Return the text of construct.json: a JSON object from the key of each call to its parent's key, or null."""
        items = [
            f"\n {quoted(key)}: {'null' if parent is None else quoted(parent)}" for key, parent in self._parents.items()
        ]
        return f"{{{','.join(items)}\n}}"

    def stacks_text(self) -> str:
        """Return the text of stack.json: a JSON object from each stack's number to `[keys of the calls, frames]`."""
        items = [
            f'\n "{number}": [{_strings_text(keys)}, {_strings_text(frames)}]'
            for frames, (number, keys) in self._stacks.items()
        ]
        return f"{{{','.join(items)}\n}}"

    def frames(self) -> set[str]:
        """Return the frames of all stacks, each once."""
        return set(itertools.chain.from_iterable(self._stacks))

    def _stack_number(self, key: str, frames: tuple[str, ...]) -> int:
        known = self._stacks.get(frames)
        if known is None:
            known = self._stacks[frames] = len(self._stacks), []
            self._lines.put(f'{{"stack": {known[0]}, "frames": {_strings_text(frames)}}}')
        known[1].append(key)
        return known[0]


def _strings_text(strings: Iterable[str]) -> str:
    return f"[{', '.join(map(quoted, strings))}]"


def object_text(value: dict[str, Any]) -> str:
    """Return `value` as the text of a JSON object with one key on each line.

    `json.dumps(value, indent=1)` would take ten times as long.
    """
    return f"{{{','.join([f'{_LINE}{quoted(key)}: {json_text(item)}' for key, item in value.items()])}{_END}"
