"""What the model looks like from outside: types and shapes of every module's inputs and outputs, and who calls it.

Written once, at the end of the first step after it was asked for, in msprobe's form:

    <run>/module_struct/rank0/module_struct.json    {"fc1": {"input": {"config": "tuple[1]", "0": …}, …}}
    <run>/module_struct/rank0/stack_info.csv        module_name,stack_info
"""

from __future__ import annotations

import csv
import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from trainermon.core.outbox import Parcel
from trainermon.core.private_files import make_private_folder, open_private
from trainermon.dump.facts.stacks import call_stack
from trainermon.hooks.guard import FaultGuard
from trainermon.monitor.taps.micro_steps import MicroSteps
from trainermon.monitor.taps.training import TapHandle, WatchedModule

logger = logging.getLogger("trainermon")

FOLDER = "module_struct"


class StructureRecorder:
    """Records the first training forward of each module, and writes types, shapes and callers to files in `parcel`.

    Args:
        modules: The modules.
        steps: Tells whether a training forward runs.
        guard: Contains errors of the hooks.
        parcel: The folder.
        structure: Whether types and shapes are recorded.
        stacks: Whether the lines of the script that call each module are.
    """

    def __init__(  # noqa: PLR0913  # what is looked at, and what is written
        self,
        modules: Sequence[WatchedModule],
        steps: MicroSteps,
        guard: FaultGuard,
        parcel: Parcel,
        *,
        structure: bool,
        stacks: bool,
    ) -> None:
        self._modules = modules
        self._steps = steps
        self._guard = guard
        self._parcel = parcel
        self._wants_structure = structure
        self._wants_stacks = stacks
        self._structure: dict[str, dict[str, dict[str, str]]] = {}
        self._stacks: dict[str, tuple[str, ...]] = {}
        self._handles: list[TapHandle] = []
        self.is_done = not (structure or stacks)

    def attach(self) -> None:
        """Put a hook behind each module, unless everything is written; nothing if they are there."""
        if self.is_done or self._handles:
            return
        for module in self._modules:
            hook = self._guard.wrap(self._behind, module)
            self._handles.append(module.module.register_forward_hook(hook, with_kwargs=True))

    def detach(self) -> None:
        """Remove all hooks that record the model's structure."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def step_ended(self) -> None:
        """Write what was recorded, if anything, and stop. A file system that refuses is only logged."""
        if self.is_done or not (self._structure or self._stacks):
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

    def _behind(
        self, module: WatchedModule, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        name = f"{module.stage}:{module.name}" if module.stage else module.name
        if not self._steps.counting or name in self._structure or name in self._stacks:
            return
        if self._wants_structure:
            inputs = (*args, *(value for value in kwargs.values() if isinstance(value, Tensor)))
            self._structure[name] = {"input": _describe(inputs), "output": _describe(output)}
        if self._wants_stacks:
            self._stacks[name] = call_stack()

    def _write(self) -> None:
        make_private_folder(self._parcel.content)
        if self._wants_structure:
            with _open(self._parcel.content / "module_struct.json") as file:
                json.dump(self._structure, file, indent=2)
        if self._wants_stacks:
            with _open(self._parcel.content / "stack_info.csv") as file:
                rows = csv.writer(file)
                rows.writerow(["module_name", "stack_info"])
                rows.writerows([name, "\n".join(frames)] for name, frames in self._stacks.items())


def _describe(value: Any) -> dict[str, str]:
    """Return the type of `value`, and size and dtype of the tensors that it holds at its first level."""
    if isinstance(value, Tensor):
        return {"config": "tensor", "tensor": _size(value)}
    if isinstance(value, dict):
        items = [(str(key), item) for key, item in value.items()]
    elif isinstance(value, list | tuple):
        items = [(str(index), item) for index, item in enumerate(value)]
    else:
        return {"config": str(type(value))}
    config = f"{type(value).__name__}[{len(items)}]"
    return {"config": config, **{key: _size(x) if isinstance(x, Tensor) else str(type(x)) for key, x in items}}


def _size(tensor: Tensor) -> str:
    shape = "nested" if tensor.is_nested else tuple(tensor.shape)  # a nested one may have no shape to ask for
    return f"size={shape}, dtype={tensor.dtype}"


def _open(path: Path) -> Any:
    descriptor = open_private(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    return os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace", newline="")
