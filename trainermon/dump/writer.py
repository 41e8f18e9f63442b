"""Writes a dump such that a killed process loses nothing that was captured.

While capturing, entries are appended to a partial file (`lines.py`). At the end dump_info.json, stack.json,
sources.json and construct.json are put in place by rename, and dump.json last: its rename is the commit.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from trainermon.core.errors import DumpError
from trainermon.core.private_files import open_private, replace_file
from trainermon.core.values import DumpTask, SourceMode
from trainermon.dump.files.call_tree import CallTree, object_text
from trainermon.dump.files.framework import FrameworkTensors
from trainermon.dump.files.lines import LineFile, Places
from trainermon.dump.files.records import (
    CONSTRUCT_FILE,
    DUMP_FILE,
    INFO_FILE,
    LINES_BYTES,
    PARTIAL_FILE,
    SOURCES_FILE,
    STACK_FILE,
    TENSOR_FOLDER,
    DumpInfo,
)
from trainermon.dump.files.sources import sources_text
from trainermon.dump.files.tensor_folder import TensorFolder
from trainermon.dump.forms import TensorLeaf, json_text, quoted

TASKS = (*DumpTask, "structure")


class DumpWriter:
    """Writes one dump of one rank and step (dump.json, stack.json, construct.json, sources.json, info, tensor files).

    Files are 0600, folders 0700. The dump survives the death of the process, not that of the machine: nothing is
    synchronised to the disk, so that no step waits for one.

    Args:
        directory: The folder.
        info: What is noted about the dump as a whole.
        task: `statistics`, `tensor` (the tensors too) or `structure`.
        max_bytes: Beyond them no tensor is written any more (counted in the info), while statistics go on.
        final: Where the dump will be moved afterwards; None: it stays.

    Attributes:
        saves_any: Whether the tensors of any entry may be saved as files.

    Raises:
        DumpError: unknown task, or the directory cannot be written.
    """

    level = "L0"
    main_file = DUMP_FILE
    with_structure = True
    source = SourceMode.FUNCTIONS
    # How long lines may wait to be written, if not as long as usual: what a killed process may lose.
    max_wait_s: float | None = None
    # Whether every tensor of every entry is recorded; and whether with a checksum.
    _takes_all = True
    _with_checksums = False

    def __init__(
        self,
        directory: Path,
        info: DumpInfo,
        *,
        task: str = "statistics",
        max_bytes: int = 1 << 30,
        final: Path | None = None,
    ) -> None:
        if task not in TASKS:
            raise DumpError(f"task of a dump is {task!r}, expected one of {', '.join(TASKS)}")
        self.directory = Path(directory)
        self.task = task
        self.info = dataclasses.replace(info, complete=False, bytes_written=0, over_quota=0)
        self.with_tensors = task == "tensor"
        self.tensors = self._framework_tensors()
        self.saves_any = self._saves_any()
        self._adds_to_forms = self.saves_any or self._with_checksums
        self._tensors = self._tensor_folder(max_bytes, self.directory if final is None else final)
        self._readings = self.tensors.reader()
        self._data: Places = {}
        self._root: Places = {}
        self._published = -1
        self._classes: frozenset[type] = frozenset()
        self._pid = os.getpid()
        try:
            self._tensors.prepare(is_used=self.saves_any)
            with contextlib.suppress(FileNotFoundError):
                (self.directory / self.main_file).unlink()
            self._lines = LineFile(self.directory / PARTIAL_FILE, self.max_wait_s)
        except OSError as error:
            raise DumpError(f"cannot write a dump in {self.directory}: {error}") from error
        self._tree = CallTree(self._lines)
        self._lines.put(json_text({"info": _plain(self.info), "task": task, "level": self.level}))
        self.flush()
        atexit.register(self._flush_at_exit)

    @property
    def bytes_written(self) -> int:
        """Bytes written so far: files of tensors, and the file of lines."""
        return self._tensors.num_bytes + self._lines.num_bytes

    def next_order(self) -> int:
        """Return the next number, from 1, in the order in which values became known."""
        return self._readings.next_order()

    def record(self, key: str, leaves: Sequence[TensorLeaf]) -> None:
        """Start the statistics of the tensors in `leaves` as they are now, for the entry `key`.

        Save the tensors if the task asks. The forms in `leaves` get the result. A tensor that was recorded before and
        is unchanged keeps its statistics and order.
        """
        if not self._takes_all:
            leaves = self._chosen(key, leaves)
        for error in self._readings.read(leaves):
            self.count_error(error)
        if self._adds_to_forms:
            self._add_to_forms(key, leaves)

    def reread(self, tensors: Sequence[Any]) -> None:
        """Drop the statistics remembered for `tensors`: a collective has changed them, which torch does not count."""
        self._readings.reread(tensors)

    def wants(self, key: str) -> bool:  # noqa: ARG002  # for those that choose
        """Return whether the entry `key`, which begins, is to be recorded: here always; subclasses choose."""
        return True

    def could_want(self, key: str) -> bool:  # noqa: ARG002  # for those that choose
        """Return whether the entry `key`, which has not begun, may come to be recorded: here always.

        Subclasses choose.
        """
        return True

    def saves(self, key: str) -> bool:  # noqa: ARG002  # for those that choose
        """Return whether the tensors of the entry `key` are saved as files, not their statistics alone."""
        return self.with_tensors

    def add(
        self, key: str, value: dict[str, Any], *, parent: str | None = None, stack: Sequence[str] | None = None
    ) -> None:
        """Append an entry whose tensors were recorded.

        Args:
            key: Its name, `Module.h.0.Linear.forward.0`.
            value: What it took and gave, with `TensorForm`s for tensors.
            parent: Key of the enclosing call; None: there is none.
            stack: The lines of the script that made the call; written once for all entries that share it. None: not
                known.
        """
        self._put(f'{{"key": {quoted(key)}{self._tree.put(key, parent, stack)}', value, self._data, key)

    def leave_out(self, key: str, *, parent: str | None) -> None:
        """Append, of the entry `key` that is not wanted, only its place in the call tree; `parent` None: at the top."""
        self.add_node(key, parent=parent)

    def add_gradients(self, key: str, value: dict[str, Any]) -> None:
        """Append the gradients of a module's parameters, which have no place in the tree of calls."""
        self._put(f'{{"key": {quoted(key)}', value, self._data, key)

    def add_root(self, key: str, value: dict[str, Any]) -> None:
        """Append an entry of the model as a whole.

        It goes to the info file, as msprobe's files have no place for it.
        """
        self._put(f'{{"root": {quoted(key)}', value, self._root, key)

    def add_node(self, key: str, *, parent: str | None, stack: Sequence[str] | None = None) -> None:
        """Append only the place of the call `key` in the call tree: its parent's key, and the script's lines."""
        if self._lines.put(f'{{"node": {quoted(key)}{self._tree.put(key, parent, stack)}}}'):
            self.flush()

    def flush(self) -> None:
        """Write everything that waits in memory to the file; if the process is killed later, this much can be read.

        Raises:
            DumpError: The disk is full.
        """
        self._readings.resolve()
        for error in self._lines.flush():
            self.count_error(error)

    def flush_at_once(self) -> None:
        """Flush, unless that would wait for a device; called before a call that may never return."""
        if not self._readings.waits_for_device:
            self.flush()

    def take_classes(self, classes: Iterable[type]) -> None:
        """Add the classes of modules whose source code is to be kept."""
        self._classes = self._classes.union(classes)

    def take_notes(self, notes: Sequence[str]) -> None:
        """Replace the notes (sentences on what the reader of the dump should know) in the dump's info."""
        if self.info.notes != tuple(notes):
            self.info = dataclasses.replace(self.info, notes=tuple(notes))

    def count_error(self, error: BaseException) -> None:
        """Count an entry that was lost to an error; the first one's text is kept."""
        text = self.info.first_error or f"{type(error).__name__}: {error}"
        self.info = dataclasses.replace(self.info, errors=self.info.errors + 1, first_error=text)

    def close(self, **changes: Any) -> DumpInfo:
        """Write the dump's final files, remove the file of lines, and return the final info with `changes` in it.

        `changes` are fields of `DumpInfo`.

        Raises:
            DumpError: a file cannot be written; the partial file is left and can be read.
        """
        if changes or self._lines.is_waiting or self._published != self.bytes_written:
            self.publish(**changes)
        atexit.unregister(self._flush_at_exit)
        self._lines.close()
        with contextlib.suppress(OSError):  # the dump is whole all the same
            (self.directory / PARTIAL_FILE).unlink()
        return self.info

    def publish(self, **changes: Any) -> DumpInfo:
        """Write the dump's files with what there is so far, and stay open for more.

        Return the info, with the fields `changes` set.

        Raises:
            DumpError: a file cannot be written.
        """
        self._tensors.write_waiting()
        try:
            self.flush()
            self.info = dataclasses.replace(
                self.info,
                **changes,
                complete=not self.info.errors,
                bytes_written=self.bytes_written,
                over_quota=self._tensors.over_quota,
            )
            if self.with_structure:
                _write(self.directory / STACK_FILE, self._tree.stacks_text())
                _write(self.directory / CONSTRUCT_FILE, self._tree.parents_text())
                self._write_sources()
            lines = self._lines.text()
            _write(self.directory / INFO_FILE, "".join(self._info_text(lines)))
            replace_file(self.directory / self.main_file, "".join(self._dump_text(lines)).encode())
            self._published = self.bytes_written
        except OSError as error:
            raise DumpError(f"cannot finish the dump in {self.directory}: {error}") from error
        return self.info

    def _write_sources(self) -> None:
        if self.source is SourceMode.OFF:
            return
        try:
            text = sources_text(self._tree.frames(), self._classes, whole_files=self.source is SourceMode.FILES)
            _write(self.directory / SOURCES_FILE, text)
        except Exception as error:  # noqa: BLE001  # whatever a loader of the user's raises, the numbers are there
            with contextlib.suppress(OSError):
                (self.directory / SOURCES_FILE).unlink()  # a full disk may have cut it off
            self.count_error(error)

    def _info_text(self, lines: str) -> Iterator[str]:
        info = {**_plain(self.info), LINES_BYTES: self._lines.num_bytes}
        yield object_text(info).removesuffix("\n}") + ',\n "root": {'
        yield ", ".join([f"{quoted(key)}: {lines[at : at + size]}" for key, (at, size) in self._root.items()])
        yield "}\n}"

    def _dump_text(self, lines: str) -> Iterator[str]:
        head = {
            "task": self.task,
            "level": self.level,
            "framework": self.tensors.framework,
            "dump_data_dir": str(self._tensors.final.absolute()) if self.saves_any else None,
        }
        yield object_text(head).removesuffix("\n}") + ',\n "data": {'
        yield ",".join([f"\n  {quoted(key)}: {lines[at : at + size]}" for key, (at, size) in self._data.items()])
        yield "\n }\n}\n"

    def _put(self, head: str, value: dict[str, Any], places: Places, key: str) -> None:
        if self._lines.put(head + ', "value": ', value, places, key):
            self.flush()

    def _flush_at_exit(self) -> None:
        """Keep what a script has captured that ends by an exception; a forked child has nothing to keep."""
        if os.getpid() == self._pid:
            with contextlib.suppress(DumpError, OSError, RuntimeError):
                self.flush()

    def _saves_any(self) -> bool:
        return self.with_tensors

    def _chosen(self, key: str, leaves: Sequence[TensorLeaf]) -> Sequence[TensorLeaf]:  # noqa: ARG002  # for those that choose
        return leaves

    def _add_to_forms(self, key: str, leaves: Sequence[TensorLeaf]) -> None:
        if self.saves_any and self.saves(key):
            for leaf in leaves:
                self._save(file_stem(key, leaf.slot), leaf)

    def _framework_tensors(self) -> FrameworkTensors:
        """Return what is asked about tensors: torch's here; subclasses write those of other frameworks."""
        from trainermon.dump.torch_tensors import TorchTensors  # loads torch, which other frameworks do without

        return TorchTensors()

    def _tensor_folder(self, max_bytes: int, final: Path) -> TensorFolder:
        return TensorFolder(self.directory / TENSOR_FOLDER, max_bytes, self.tensors, final=final / TENSOR_FOLDER)

    def _save(self, name: str, leaf: TensorLeaf) -> None:
        try:
            self._tensors.save(name, leaf, line_bytes=self._lines.num_bytes)
        except Exception as error:  # noqa: BLE001  # a full disk, a type that cannot be saved: its statistics are known
            self.count_error(error)


def file_stem(key: str, slot: str) -> str:
    """Return msprobe's name, without ending, for the file of the tensor in `slot` of the entry `key`.

    `Module.h.0.Linear.forward.0` and `input.1` give `Module.h.0.Linear.forward.0.input.1`. In a key of level debug the
    slot comes before the last part.
    """
    return f"{key}.{slot}" if slot else key


def _plain(info: DumpInfo) -> dict[str, Any]:
    """Return what `dataclasses.asdict` does, which takes ten times as long."""
    plain = _fields(info)
    plain["operations"] = tuple(map(dataclasses.asdict, info.operations))
    plain["layout"] = _fields(info.layout)
    return plain


def _fields(instance: Any) -> dict[str, Any]:
    return {field.name: getattr(instance, field.name) for field in dataclasses.fields(instance)}


def _write(path: Path, text: str) -> None:
    """Write a file that nobody reads before the dump is committed; one that is there already is replaced whole."""
    content = text.encode()
    try:
        with open(path, "xb", opener=open_private) as file:
            file.write(content)
    except FileExistsError:
        replace_file(path, content)
