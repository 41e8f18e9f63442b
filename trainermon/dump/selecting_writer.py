"""A dump of a chosen part: by name, direction and side, with checksums, slices, and tensors that are written later."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainermon.dump.debugger_config import MIB, DebuggerConfig
from trainermon.dump.files.framework import FrameworkTensors
from trainermon.dump.files.records import DEBUG_FILE, DUMP_FILE, PARAMETERS_GRAD, TENSOR_FOLDER, DumpInfo
from trainermon.dump.files.tensor_folder import TensorFolder
from trainermon.dump.forms import TensorLeaf
from trainermon.dump.selection import NameSelection
from trainermon.dump.writer import DumpWriter

_SIDES = {"input_args": "input", "input_kwargs": "input", "parameters": "input", "input": "input"}
_SIDES |= {"output": "output", "output_kwargs": "output"}


class SelectingWriter(DumpWriter):
    """Writes into a dump only the entries and tensors that `config` (`PrecisionDebugger`'s) chooses.

    What it leaves out still stands in construct.json, as with msprobe.
    """

    def __init__(self, directory: Path, info: DumpInfo, config: DebuggerConfig) -> None:
        self.level = config.level
        self.main_file = DEBUG_FILE if config.level == "debug" else DUMP_FILE
        self.with_structure = config.extra_info and config.level != "debug"
        self.source = config.source
        self.max_wait_s = config.flush_s
        self._config = config
        self._selection = NameSelection(config)
        # what is not wanted is left out then, and not asked about again
        self._with_checksums = config.with_checksums
        self._takes_all = self._selection.is_by_function and config.task != "structure"
        task = "statistics" if config.task == "overflow_check" else config.task
        super().__init__(directory, info, task=task, max_bytes=int(config.max_mb * MIB))

    def wants(self, key: str) -> bool:
        """Return whether the configuration chooses the entry `key`, which begins, by its name."""
        return self._selection.begins(key)

    def could_want(self, key: str) -> bool:
        """Return whether the entry `key`, which has not begun, may turn out to be chosen.

        If not, it need not be prepared.
        """
        return self._selection.could_record(key)

    def saves(self, key: str) -> bool:
        """Return whether the tensors of the entry `key` are saved as files, not their statistics alone."""
        return self.with_tensors or (
            bool(self._config.tensor_list) and any(part in key for part in self._config.tensor_list)
        )

    def add(
        self, key: str, value: dict[str, Any], *, parent: str | None = None, stack: Sequence[str] | None = None
    ) -> None:
        """Append an entry to the dump; if it is not chosen, append only its place in the call tree.

        `key`, `value`, `parent` and `stack` are as in `DumpWriter.add`.
        """
        if self._takes_all:
            super().add(key, value, parent=parent, stack=stack)
            return
        if not self._selection.ends(key) or self.task == "structure":
            self.add_node(key, parent=parent, stack=stack if self.task == "structure" else None)
            return
        sides = {name: item for name, item in value.items() if self._selection.has_side(_SIDES.get(name, "input"))}
        sides |= {name: item for name, item in value.items() if name not in _SIDES}
        super().add(key, sides, parent=parent, stack=stack)

    def leave_out(self, key: str, *, parent: str | None) -> None:
        """Append, of the entry `key` that is not chosen, only its place in the call tree; `parent` None: at the top."""
        self._selection.ends(key)
        super().leave_out(key, parent=parent)

    def add_gradients(self, key: str, value: dict[str, Any]) -> None:
        """Append the entry `key` with the gradients of a module's parameters, if the configuration asks for it."""
        if self._takes_all or (self._selection.ends(key) and self.task != "structure"):
            super().add_gradients(key, value)

    def _chosen(self, key: str, leaves: Sequence[TensorLeaf]) -> Sequence[TensorLeaf]:
        if self.task == "structure" or not self._selection.records(key):
            return ()
        return [leaf for leaf in leaves if PARAMETERS_GRAD in key or self._selection.has_side(leaf.slot)]

    def _add_to_forms(self, key: str, leaves: Sequence[TensorLeaf]) -> None:
        super()._add_to_forms(key, leaves)
        if self._with_checksums:
            for leaf in leaves:
                self._add_checksum(leaf)

    def _saves_any(self) -> bool:
        return self.with_tensors or bool(self._config.tensor_list)

    def _tensor_folder(self, max_bytes: int, final: Path) -> TensorFolder:
        folder = self.directory / TENSOR_FOLDER
        return SlicedTensors(folder, max_bytes, final / TENSOR_FOLDER, self._config, self.tensors)

    def _add_checksum(self, leaf: TensorLeaf) -> None:
        reading = leaf.form.reading
        if reading is None:
            return
        try:
            reading.checksum = reading.checksum or self.tensors.checksum(leaf.tensor)
        except (RuntimeError, TypeError, ValueError) as error:  # it costs its own checksum, not the entry
            self.count_error(error)
        if reading.checksum:
            # `md5` is where msprobe has, and looks for, a CRC-32
            leaf.form.add("crc32", reading.checksum)
            leaf.form.add("md5", reading.checksum)


class SlicedTensors(TensorFolder):
    """Saves the tensors of a dump as files, cut to the slices that `config` asks for.

    With `async_dump` only at the end of the step.

    Args:
        path: The folder.
        max_bytes: Beyond them nothing is saved any more.
        final: Where the folder will be moved afterwards.
        config: The debugger's configuration.
        tensors: The framework's.
    """

    def __init__(
        self, path: Path, max_bytes: int, final: Path, config: DebuggerConfig, tensors: FrameworkTensors
    ) -> None:
        super().__init__(path, max_bytes, tensors, final=final, file_format=config.file_format)
        self._config = config
        self._waiting: list[tuple[Any, str]] = []
        self._waiting_bytes = 0

    def write_waiting(self) -> None:
        """Write the files of the tensors that `async_dump` has only copied so far."""
        for tensor, path in self._waiting:
            self._tensors.save(tensor, path)
        self._waiting.clear()
        self._waiting_bytes = 0

    def _store(self, tensor: Any, path: str) -> int:
        if not (self._config.slice or self._config.async_dump):
            return self._tensors.save(tensor, path)
        tensor = self._tensors.sliced(tensor, self._config.slice)
        size = self._tensors.num_bytes(tensor)
        if not self._config.async_dump or self._waiting_bytes + size > self._config.max_async_mb * MIB:
            return self._tensors.save(tensor, path)
        self._waiting.append((self._tensors.copied(tensor), path))
        self._waiting_bytes += size
        return size
