"""`trainermon convert mindformers`: what MindFormers' monitor has left, as csv files of msprobe's form.

    <output>/Dec03_21-34-40-rank0-mindformers/grad_unreduced_1-100.csv

Those are what `trainermon convert csv2tensorboard` and `csv2db` read.
"""

from __future__ import annotations

import csv
import datetime
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from trainermon.core.errors import StoreError
from trainermon.core.private_files import replace_file
from trainermon.core.terminal.progress import counted
from trainermon.mindformers.dumped_numbers import DumpedNumber, rank_folders, read_folder

KINDS: Mapping[str, str] = {
    "local_norm": "grad_unreduced",
    "adam_m_norm": "exp_avg",
    "adam_v_norm": "exp_avg_sq",
}
"""By the part of a tag before the parameter's name: the kind whose `norm` it is."""
SCALARS = "scalars"
TIME_FORMAT = "%b%d_%H-%M-%S"
_BY_SAMPLES = ("-vs-samples", " vs samples")
LEADING, MICRO_STEP = ("vpp_stage", "name", "step"), "micro_step"
STAGE = 0


class _CsvLine(NamedTuple):
    """A line of a csv file, and the kind whose file it is in."""

    kind: str
    step: int
    name: str
    value: float


def convert(folder: Path, output: Path) -> list[Path]:
    """Write the numbers of every rank's folder below `folder` to csv files of msprobe's form; return their folders.

    Numbers against samples are left out: they are those against steps once more. Several numbers of one tag and step
    are the micro steps'. Nothing in `folder` is changed.

    Raises:
        StoreError: There is no rank's folder, or no number in any.
        ConfigError: There are event files, and the package tensorboard is not installed.
    """
    began = datetime.datetime.now().astimezone()
    folders = rank_folders(folder)
    written = []
    for rank, place in counted(folders.items(), len(folders), "ranks"):
        lines = list(_lines(read_folder(place)))
        if lines:
            target = output / f"{began:{TIME_FORMAT}}-rank{rank}-mindformers"
            _write(target, lines)
            written.append(target)
    if not written:
        raise StoreError(f"{folder}: found no number of MindFormers' monitor; it removes its arrays as it reads them")
    return written


def _lines(numbers: Iterable[DumpedNumber]) -> Iterator[_CsvLine]:
    for step, tag, value in numbers:
        metric, _, parameter = tag.partition("/")
        kind = KINDS.get(metric, SCALARS) if parameter else SCALARS
        if not tag.endswith(_BY_SAMPLES):
            yield _CsvLine(kind, step, tag if kind == SCALARS else parameter, value)


def _write(folder: Path, lines: Iterable[_CsvLine]) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    of_kind: dict[str, list[_CsvLine]] = {}
    for line in sorted(lines, key=lambda line: line.step):
        of_kind.setdefault(line.kind, []).append(line)
    for kind, found in of_kind.items():
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        if kind == SCALARS:
            writer.writerow((*LEADING, MICRO_STEP, "value"))
            writer.writerows(_with_micro_steps(found))
        else:
            writer.writerow((*LEADING, "norm"))
            writer.writerows((STAGE, line.name, line.step, f"{line.value:.9g}") for line in found)
        path = folder / f"{kind}_{found[0].step}-{found[-1].step}.csv"
        replace_file(path, text.getvalue().encode(errors="replace"))


def _with_micro_steps(lines: Sequence[_CsvLine]) -> Iterator[tuple[object, ...]]:
    """Yield rows with a column of micro steps: NaN where the step has one number of that name."""
    of_step: dict[tuple[int, str], list[float]] = {}
    for line in lines:
        of_step.setdefault((line.step, line.name), []).append(line.value)
    for (step, name), values in of_step.items():
        for number, value in enumerate(values):
            yield STAGE, name, step, number if len(values) > 1 else "nan", f"{value:.9g}"
