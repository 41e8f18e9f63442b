"""`trainermon restore`: the files of a dump whose process was killed, put in place from its lines."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trainermon.core.errors import DumpError
from trainermon.core.terminal.progress import ProgressBar, counted
from trainermon.dump.files.reader import load_partial
from trainermon.dump.files.records import (
    CONSTRUCT_FILE,
    DEBUG_FILE,
    DUMP_FILE,
    INFO_FILE,
    PARTIAL_FILE,
    STACK_FILE,
    TENSOR_FOLDER,
)

DEBUG_LEVEL = "debug"


def restore_dump(directory: Path) -> int:
    """Write dump.json and the other final files of a dump whose process was killed, from the lines that it left.

    Then msprobe's tools can read it. The dump stays marked as not complete, and its lines stay where they are. Tensors
    that it names but did not write any more are left out.

    Returns:
        The number of entries.

    Raises:
        DumpError: There are no lines of a killed process, or a file cannot be written.
    """
    partial = directory / PARTIAL_FILE
    try:
        raw = load_partial(partial)
        folder = directory / TENSOR_FOLDER
        data = _with_present_files(raw.data, folder)
        head = {
            "task": raw.task,
            "level": raw.level,
            "framework": "pytorch",
            "dump_data_dir": str(folder.absolute()) if folder.is_dir() else None,
        }
        _replace(directory / STACK_FILE, raw.stacks)
        _replace(directory / CONSTRUCT_FILE, raw.construct)
        _replace(directory / INFO_FILE, {**raw.info, "complete": False, "root": raw.root})
        _replace(directory / (DEBUG_FILE if raw.level == DEBUG_LEVEL else DUMP_FILE), {**head, "data": data})
    except FileNotFoundError as error:
        raise DumpError(f"{directory} holds no {PARTIAL_FILE}: no process was killed while it wrote there") from error
    except OSError as error:
        raise DumpError(f"cannot restore the dump in {directory}: {error}") from error
    return len(raw.data)


def unfinished(root: Path) -> Iterator[Path]:
    """Yield the dump folders at and below `root` that are unfinished: their process was killed, or is still writing."""
    yield from sorted(path.parent for path in root.rglob(PARTIAL_FILE))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `trainermon restore`."""
    parser.add_argument("directory", type=Path, help="a dump, or a folder of dumps; none may still be written")


def main(arguments: argparse.Namespace) -> int:
    """Restore every dump of a killed process below a path (`trainermon restore`), and print them.

    Return 0, or 1 if there was none.
    """
    with ProgressBar("looking for unfinished dumps"):
        found = list(unfinished(arguments.directory))
        numbers = [restore_dump(directory) for directory in counted(found, len(found), "dumps")]
    sys.stdout.writelines(f"{folder}: {number} entries\n" for folder, number in zip(found, numbers, strict=True))
    if not found:
        sys.stdout.write(f"{arguments.directory}: no dump of a killed process\n")
    return 0 if found else 1


def _with_present_files(value: Any, folder: Path) -> Any:
    if isinstance(value, dict):
        lost = isinstance(value.get("data_name"), str) and not (folder / Path(value["data_name"]).name).is_file()
        items = {name: item for name, item in value.items() if not (lost and name == "data_name")}
        return {name: _with_present_files(item, folder) for name, item in items.items()}
    return [_with_present_files(item, folder) for item in value] if isinstance(value, list) else value


def _replace(path: Path, value: Mapping[str, Any]) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(json.dumps(value), encoding="utf-8")
    temporary.chmod(0o600)
    temporary.replace(path)
