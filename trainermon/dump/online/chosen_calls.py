"""A function mode that numbers calls as a dump does, and knows which of them a configuration chooses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from trainermon.dump.debugger_config import DebuggerConfig
from trainermon.dump.files.records import FORWARD
from trainermon.dump.function_modes import ModeSwitch
from trainermon.dump.function_names import FunctionName, name_of
from trainermon.dump.online.findings import FindingsFile
from trainermon.dump.selection import NameSelection
from trainermon.hooks.guard import ContainedCall


class ChosenCalls(TorchFunctionMode):
    """Sees calls of torch functions between `attach` and `detach`; errors of its own are counted, not raised."""

    def __init__(self, config: DebuggerConfig, findings: FindingsFile) -> None:
        super().__init__()
        self.tripped = False
        self._findings = findings
        self._selection = NameSelection(config)
        self._calls: Counter[str] = Counter()
        self._functions: dict[FunctionName, bool] = {}
        self._switch = ModeSwitch(self, self.contain)

    def attach(self) -> None:
        """Start to see calls of torch functions."""
        self._switch.attach()

    def detach(self) -> None:
        """Stop."""
        self._switch.detach()

    def stop_in_child(self) -> None:
        """Do nothing in a forked child process: the files belong to the parent."""
        self.tripped = True

    def trip(self, error: BaseException) -> None:
        """Count a call that was lost to `error`; called in place of raising into training."""
        self._findings.skipped[f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:120]}"] += 1

    def contain(self, function: Callable[..., Any], *bound: Any) -> ContainedCall:
        """Return `function`, with first arguments `bound`, in a form that never raises into training."""
        return ContainedCall(self, function, bound)

    def chosen(
        self, function: Callable[..., Any], args: tuple[Any, ...], caller: Any
    ) -> tuple[str, FunctionName] | None:
        """Return key and name of a call that begins in the frame `caller`; None if it is not chosen.

        A call in a backward repeats one of the forward, whose number is not known: its key has none.
        """
        named = name_of(function, args, caller)
        if named is None:
            return None
        if self._selection.is_by_function and not self._is_chosen_function(named):
            return None
        if torch._C._current_graph_task_id() != -1:
            key = f"{named.stem}.{FORWARD}"
        else:
            key = f"{named.stem}.{self._calls[named.stem]}.{FORWARD}"
            self._calls[named.stem] += 1
        if self._selection.is_by_function:
            return key, named
        is_chosen = self._selection.begins(key)
        self._selection.ends(key)
        return (key, named) if is_chosen else None

    def _is_chosen_function(self, named: FunctionName) -> bool:
        """Return whether calls of a function are chosen, where only its name decides."""
        known = self._functions.get(named)
        if known is None:
            known = self._functions[named] = self._selection.begins(f"{named.stem}.0.{FORWARD}")
        return known
