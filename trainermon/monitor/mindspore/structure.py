"""What the model looks like from outside: what every cell takes and returns, and who calls it; written once.

The files are those of a session of torch, `module_struct/rank<r>/module_struct.json` and `stack_info.csv`.
"""

from __future__ import annotations

import csv
import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from mindspore import Tensor

from trainermon.core.outbox import Parcel
from trainermon.core.private_files import make_private_folder, open_private
from trainermon.dump.facts.stacks import call_stack
from trainermon.hooks.containment import PlainFaultGuard
from trainermon.hooks.mindspore import hooks
from trainermon.monitor.mindspore.micro_steps import CellSteps
from trainermon.monitor.mindspore.training import WatchedCell

logger = logging.getLogger("trainermon")

FOLDER = "module_struct"


class CellStructure:
    """Records the first training forward of each cell, and writes types, shapes and callers to files in `parcel`.

    Args:
        cells: The cells.
        steps: Tells whether a training forward runs.
        guard: Contains errors of the hooks.
        parcel: The folder.
        structure: Whether types and shapes are recorded.
        stacks: Whether the lines of the script that call each cell are.
    """

    def __init__(  # noqa: PLR0913  # what is looked at, and what is written
        self,
        cells: Sequence[WatchedCell],
        steps: CellSteps,
        guard: PlainFaultGuard,
        parcel: Parcel,
        *,
        structure: bool,
        stacks: bool,
    ) -> None:
        self._cells = cells
        self._steps = steps
        self._guard = guard
        self._parcel = parcel
        self._wants_structure, self._wants_stacks = structure, stacks
        self._structure: dict[str, dict[str, dict[str, str]]] = {}
        self._stacks: dict[str, tuple[str, ...]] = {}
        self._handles: list[hooks.HookHandle] = []
        self.is_done = not (structure or stacks)

    @property
    def has_seen(self) -> bool:
        """Whether a call of a cell was seen."""
        return bool(self._structure or self._stacks)

    def attach(self) -> None:
        """Hook each cell, unless everything is written; nothing if the hooks are there."""
        if self.is_done or self._handles:
            return
        for cell in self._cells:
            name = f"{cell.stage}:{cell.name}" if cell.stage else cell.name
            self._handles += [
                hooks.before_with_kwargs(cell.cell, self._guard.wrap(self._before, name)),
                hooks.behind(cell.cell, self._guard.wrap(self._behind, name)),
            ]

    def detach(self) -> None:
        """Remove all hooks that record the model's structure."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def step_ended(self) -> None:
        """Write what was recorded, if anything, and stop. A file system that refuses is only logged."""
        if self.is_done or not self.has_seen:
            return
        self.is_done = True
        self.detach()
        try:
            self._write()
        except OSError as error:
            logger.warning("the structure of the model could not be written to %s: %s", self._parcel.content, error)
        else:
            self._parcel.send()
            logger.info("the structure of the model will be in %s", self._parcel.final)

    def _before(self, name: str, _cell: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> None:
        if not self._steps.counting:
            return
        if self._wants_structure and name not in self._structure:
            tensors = [value for value in (kwargs or {}).values() if isinstance(value, Tensor)]
            self._structure[name] = {"input": _describe((*args, *tensors))}
        if self._wants_stacks and name not in self._stacks:
            self._stacks[name] = call_stack()

    def _behind(self, name: str, _cell: Any, _args: Any, output: Any) -> None:
        found = self._structure.get(name)
        if found is not None and self._steps.counting:
            found.setdefault("output", _describe(output))

    def _write(self) -> None:
        folder = self._parcel.content
        make_private_folder(folder)
        if self._wants_structure:
            with open(folder / "module_struct.json", "w", encoding="utf-8", opener=open_private) as file:
                json.dump(self._structure, file, indent=2)
        if self._wants_stacks:
            path = folder / "stack_info.csv"
            with open(path, "w", encoding="utf-8", errors="backslashreplace", newline="", opener=open_private) as file:
                rows = csv.writer(file)
                rows.writerow(["module_name", "stack_info"])
                rows.writerows([name, "\n".join(frames)] for name, frames in self._stacks.items())


def _describe(value: Any) -> dict[str, str]:
    """Return the type of `value`, and shape and dtype of the tensors that it holds at its first level."""
    if isinstance(value, Tensor):
        return {"config": "tensor", "tensor": _size(value)}
    if isinstance(value, Mapping):
        items = [(str(key), item) for key, item in value.items()]
    elif isinstance(value, list | tuple):
        items = [(str(index), item) for index, item in enumerate(value)]
    else:
        return {"config": str(type(value))}
    return {"config": f"{type(value).__name__}[{len(items)}]", **{key: _size(item) for key, item in items}}


def _size(item: Any) -> str:
    return f"size={tuple(item.shape)}, dtype={item.dtype}" if isinstance(item, Tensor) else str(type(item))
