"""Which entries of a dump are recorded, and which of their tensors."""

from __future__ import annotations

import re

from trainermon.dump.debugger_config import DebuggerConfig
from trainermon.dump.files.records import BACKWARD, FORWARD, PARAMETERS_GRAD
from trainermon.dump.function_kinds import is_core, only_moves

MODULE_PREFIXES = ("Module.", "Cell.")
# An entry's slots that are its outputs; the others are its inputs.
OUTPUTS = ("output",)


class NameSelection:
    """Decides by its name, as msprobe does, whether an entry of a dump is recorded.

    Asked at the beginning and end of each. The configuration's `scope` is a window: it opens with the entry of its
    first name and closes with the end of that of its last. An item of `list` that is the full name of a module also
    chooses everything that runs while the module does.

    Attributes:
        is_by_function: True where neither `scope` nor `list` nor `data_mode` is set: then only a function's kind
            (`risk_level`) decides.
    """

    def __init__(self, config: DebuggerConfig) -> None:
        self._scope = config.scope
        self._parts = config.list
        self._risk = "ALL" if config.scope or config.list else config.risk_level
        modes = set(config.data_mode) - {"all"}
        self._directions = modes & {FORWARD, BACKWARD} or {FORWARD, BACKWARD}
        self._sides = modes & {"input", "output"} or {"input", "output"}
        both = len(self._directions) == len(self._sides) == 2
        self.is_by_function = both and not (self._scope or self._parts)
        self._is_open = not config.scope
        self._running: set[str] = set()
        self._chosen: dict[str, bool] = {}
        self._listed: dict[str, bool] = {}

    def begins(self, key: str) -> bool:
        """Return whether the entry `key`, which begins, is chosen by its name; the answer holds until `ends`."""
        if self.is_by_function:
            return self._is_kind_listed(key)
        known = self._chosen.get(key)
        if known is None:
            if self._scope and key == self._scope[0]:
                self._is_open = True
            if key in self._parts and key.startswith(MODULE_PREFIXES):
                self._running.add(key)
            known = self._chosen[key] = self._is_open and self._is_listed(key)
        return known

    def records(self, key: str) -> bool:
        """Return whether the entry `key` is recorded: its name and direction (forward, backward) are both chosen."""
        return self.begins(key) and self._has_direction(key)

    def could_record(self, key: str) -> bool:
        """Return whether the entry `key`, which has not begun, may turn out to be recorded."""
        if self.is_by_function:
            return self._is_kind_listed(key)
        return self._has_direction(key) and (bool(self._scope) or self._is_listed(key))

    def ends(self, key: str) -> bool:
        """Return whether the entry `key`, which ends, is recorded; a scope that ends with this entry closes."""
        if self.is_by_function:
            return self._is_kind_listed(key)
        wanted = self.records(key)
        self._chosen.pop(key, None)
        self._running.discard(key)
        if self._scope and key == self._scope[1]:
            self._is_open = False
        return wanted

    def has_side(self, slot: str) -> bool:
        """Return whether the side of the tensor in `slot` (`input.0`, `output.1`), input or output, is recorded."""
        return ("output" if slot.startswith(OUTPUTS) else "input") in self._sides

    def _is_kind_listed(self, key: str) -> bool:
        """Return whether what is called by the entry `key`, whichever call of it that is, is recorded."""
        called = key.rsplit(".", 2)[0]  # without number and direction
        known = self._listed.get(called)
        if known is None:
            known = self._listed[called] = self._is_listed(key)
        return known

    def _is_listed(self, key: str) -> bool:
        if self._parts:
            return bool(self._running) or any(_matches(key, part) for part in self._parts)
        if self._risk == "ALL" or key.startswith(MODULE_PREFIXES):
            return True
        name = key.split(".")[-3]
        return is_core(key, name) if self._risk == "CORE" else not only_moves(key, name)

    def _has_direction(self, key: str) -> bool:
        backward = f".{BACKWARD}" in key or f".{PARAMETERS_GRAD}" in key
        return (BACKWARD if backward else FORWARD) in self._directions


def _matches(key: str, part: str) -> bool:
    pattern = re.fullmatch(r"name-regex\((.*)\)", part)
    return bool(re.search(pattern[1], key)) if pattern else part in key
