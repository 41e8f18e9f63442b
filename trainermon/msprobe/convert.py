"""`trainermon convert`: csv files of msprobe's form into event files or a database; what MindFormers left into csv."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import math
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from trainermon.core.errors import ConfigError, StoreError
from trainermon.core.naming import SCALARS
from trainermon.core.strict import shown
from trainermon.core.terminal.interrupts import end_workers, leave_interrupts
from trainermon.core.terminal.progress import ProgressBar, counted
from trainermon.mindformers import convert as mindformers
from trainermon.msprobe.csv_files import TIME_FORMAT
from trainermon.msprobe.csv_tables import KINDS, CsvTableRow, rank_folders, read_tables
from trainermon.msprobe.trend_database import FILE, write_database

_UNFINISHED = ".unfinished"


def csv2tensorboard_by_step(  # noqa: PLR0913, PLR0917  (the signature that users of msprobe know)
    monitor_path: str | Path,
    time_start: str | None = None,
    time_end: str | None = None,
    process_num: int = 1,
    data_type_list: Sequence[str] | None = None,
    output_dirpath: str | Path | None = None,
) -> Path:
    """Convert msprobe's csv files of every rank to TensorBoard event files `<output>/rank<r>/<kind>/`.

    Return that folder.

    Args:
        monitor_path: Folder of the ranks' folders.
        time_start: Earliest start of a rank's folder, as `Dec03_21-34-40`; of several the newest is taken.
        time_end: Latest start.
        process_num: Processes that share the ranks.
        data_type_list: Kinds to convert; all by default.
        output_dirpath: Where to write; by default a new folder in `monitor_path`. Event files that are there already
            are replaced.

    Raises:
        StoreError: There is nothing to convert.
        ConfigError: A kind is unknown, or the package tensorboard is not installed.
    """
    kinds = tuple(data_type_list or KINDS)
    for kind in kinds:
        if kind not in KINDS:
            raise ConfigError(f"data_type_list: found {shown(kind)}, expected some of {', '.join(KINDS)}")
    if isinstance(process_num, bool) or process_num < 1:
        raise ConfigError(f"process_num: found {shown(process_num)}, expected 1 or more")
    folders = rank_folders(Path(monitor_path), time_start, time_end)
    now = datetime.datetime.now().astimezone()
    output = Path(output_dirpath or Path(monitor_path) / f"{now:{TIME_FORMAT}}-csv2tensorboard_by_step")
    jobs = [(folder, output / f"rank{rank}", kinds) for rank, folder in folders.items()]
    if process_num == 1:
        for job in counted(jobs, len(jobs), "ranks"):
            _convert_rank(*job)
    else:
        pool = ProcessPoolExecutor(min(process_num, len(jobs)), initializer=leave_interrupts)
        try:
            list(counted(pool.map(_convert_rank, *zip(*jobs, strict=True)), len(jobs), "ranks"))
        finally:
            end_workers(pool)
            _remove_unfinished(output)
    return output


def _convert_rank(folder: Path, output: Path, kinds: Sequence[str]) -> None:
    from trainermon.exporters.event_files import EventFile

    steps: dict[str, dict[int, list[CsvTableRow]]] = {}
    for kind, rows in read_tables(folder, kinds):
        of_kind = steps.setdefault(kind, {})
        for row in rows:
            of_kind.setdefault(row.step, []).append(row)
    for kind, of_kind in steps.items():
        unfinished = output / f".{kind}{_UNFINISHED}"
        try:
            with contextlib.closing(EventFile(unfinished)) as file:
                for step, rows in sorted(of_kind.items()):
                    file.add(list(_scalars(kind, rows).items()), step, 0.0)
            _put_in_place(unfinished, output / kind)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)


def _put_in_place(unfinished: Path, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for old in folder.glob("events.out.tfevents.*"):
        old.unlink()
    for path in unfinished.iterdir():
        path.replace(folder / path.name)


def _remove_unfinished(output: Path) -> None:
    """Remove what worker processes have left that were ended."""
    for path in output.glob(f"rank*/.*{_UNFINISHED}"):
        shutil.rmtree(path, ignore_errors=True)


def _scalars(kind: str, rows: Iterable[CsvTableRow]) -> dict[str, float]:
    from trainermon.msprobe.tensorboard import tag_of, tagged

    if kind == SCALARS:
        numbers: dict[str, dict[int | None, float]] = {}
        for row in rows:
            numbers.setdefault(row.name, {})[row.micro_step] = row.values.get("value", math.nan)
        return dict(tagged(numbers))
    return {
        f"{tag_of(row.stage, row.name, row.micro_step)}/{op}": value for row in rows for op, value in row.values.items()
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `trainermon convert`."""
    forms = parser.add_subparsers(dest="form", required=True, metavar="FORM")
    events = forms.add_parser("csv2tensorboard", help="event files, one folder per rank and kind")
    database = forms.add_parser("csv2db", help=f"a SQLite database {FILE}, as `msprobe data2db` writes it")
    left = forms.add_parser("mindformers", help="csv files of what MindFormers' monitor has left, for the other two")
    left.add_argument("folder", type=Path, help="folder of folders rank_0, rank_1 …: dump_path, or tensorboard_dir")
    left.add_argument("-o", "--output", type=Path, required=True, help="where to write; as FOLDER of the other forms")
    for form in (events, database):
        form.add_argument("folder", type=Path, help="folder of the ranks' folders: <run>/csv, or msprobe's output")
        form.add_argument("--start", metavar="TIME", help="earliest start of a folder, as Dec03_21-34-40")
        form.add_argument("--end", metavar="TIME", help="latest start of a folder")
    events.add_argument("-o", "--output", type=Path, help="where to write; by default a new folder in FOLDER")
    events.add_argument("--kinds", nargs="+", choices=KINDS, metavar="KIND", help="kinds to convert; all by default")
    events.add_argument("--processes", type=int, default=1, metavar="N", help="processes that share the ranks")
    database.add_argument("--db", type=Path, required=True, help=f"folder to write {FILE} to")
    database.add_argument("--mapping", type=Path, metavar="JSON", help="parts of names, and what to write for them")
    database.add_argument(
        "--micro-step", choices=("true", "false"), default="true", help="number micro steps through as steps"
    )


def main(arguments: argparse.Namespace) -> int:
    """Convert csv files to TensorBoard or to a trend database (`trainermon convert`), print where to, and return 0.

    Raises:
        StoreError, ConfigError: As the conversions.
    """
    with ProgressBar("reading tables"):
        lines = _convert(arguments)
    sys.stdout.writelines(lines)
    return 0


def _convert(arguments: argparse.Namespace) -> list[str]:
    if arguments.form == "mindformers":
        return [f"{written}\n" for written in mindformers.convert(arguments.folder, arguments.output)]
    if arguments.form == "csv2tensorboard":
        written = csv2tensorboard_by_step(
            arguments.folder,
            arguments.start,
            arguments.end,
            arguments.processes,
            arguments.kinds,
            arguments.output,
        )
    else:
        written = arguments.db / FILE
        folders = rank_folders(arguments.folder, arguments.start, arguments.end)
        mapping = _read_mapping(arguments.mapping)
        number = write_database(folders, written, mapping=mapping, micro_steps=arguments.micro_step == "true")
        return [f"{number} rows of {len(folders)} rank{'' if len(folders) == 1 else 's'}\n", f"{written}\n"]
    return [f"{written}\n"]


def _read_mapping(path: Path | None) -> Mapping[str, str]:
    if path is None:
        return {}
    try:
        mapping: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StoreError(f"{path} cannot be read: {error}") from error
    if not isinstance(mapping, dict) or not all(isinstance(value, str) for value in mapping.values()):
        raise StoreError(f"{path}: expected an object of names and names")
    return mapping
