"""TensorBoard event files with the tags that msprobe's converter gives them.

    <run>/tensorboard/rank0/actv/events.out.tfevents…      vp0:fc1.input:micro0/norm, and as a histogram …:micro0

Needs the package tensorboard (`pip install tensorboard`), but neither torch nor TensorFlow.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from trainermon.core.journal import Header
from trainermon.core.naming import COLUMNS, SCALARS, SeriesNames, feature_value
from trainermon.core.values import Moments, StatBlock
from trainermon.exporters.event_files import EventFile
from trainermon.exporters.export import Exporter, ExportSettings
from trainermon.exporters.histogram_bars import HistogramBars, bars_of, histograms_of
from trainermon.msprobe.csv_files import rows_of

FOLDER = "tensorboard"


class TensorBoardExporter(Exporter):
    """Writes the statistics and histograms of each step to one TensorBoard event file per rank and kind.

    A later attempt replaces the steps that it repeats.
    """

    def __init__(self, settings: ExportSettings) -> None:
        self._root = settings.run_dir / FOLDER
        self._ops = [op for op in settings.ops if op in COLUMNS]
        self._attempts: dict[int, int] = {}
        self._names: dict[int, SeriesNames] = {}
        self._files: dict[tuple[int, str], EventFile] = {}

    def write(self, header: Header, block: StatBlock) -> None:
        """Add one step of one rank to the rank's event files."""
        rank = header.coordinates.rank
        if self._attempts.get(rank) != header.attempt:
            self._attempts[rank], self._names[rank] = header.attempt, SeriesNames()
            self._close([place for place in self._files if place[0] == rank])
        scalars: dict[str, list[tuple[str, float]]] = {}
        numbers: dict[str, dict[int | None, float]] = {}
        counted = histograms_of(block)
        histograms: dict[str, list[tuple[str, HistogramBars, Moments]]] = defaultdict(list)
        for row in rows_of(self._names[rank], header, block):
            tag = tag_of(row.place.stage, row.place.name, row.place.micro_step)
            of_file = scalars.setdefault(row.place.file, [])
            if row.place.file == SCALARS:
                of_step = numbers.setdefault(row.place.name, {})
                of_step[row.place.micro_step] = feature_value(row.place, row.moments)
            elif row.place.column:
                of_file.append((f"{tag}/{row.place.column}", feature_value(row.place, row.moments)))
            else:
                of_file += [(f"{tag}/{op}", COLUMNS[op](row.moments)) for op in self._ops]
                bars = bars_of(counted[row.number], row.moments) if row.number in counted else None
                if bars is not None:
                    histograms[row.place.file].append((tag, bars, row.moments))
        if numbers:
            scalars[SCALARS] = list(tagged(numbers))
        for kind, values in scalars.items():
            if (rank, kind) not in self._files:
                folder = self._root / f"rank{rank}" / kind
                self._files[rank, kind] = EventFile(folder, block.step if folder.exists() else None)
            self._files[rank, kind].add(values, block.step, block.time_s, histograms[kind])

    def flush(self) -> None:
        """Write everything added to the files, where TensorBoard can read it."""
        for file in self._files.values():
            file.flush()

    def close(self) -> None:
        """Close all event files."""
        self._close(list(self._files))

    def _close(self, places: Sequence[tuple[int, str]]) -> None:
        for place in places:
            self._files.pop(place).close()


def tagged(numbers: Mapping[str, Mapping[int | None, float]]) -> Iterator[tuple[str, float]]:
    """Yield (tag, value) for TensorBoard from the numbers of a step, given by name and micro step.

    The tag is the name; with several micro steps that is their mean, and each has a tag of its own besides.

    >>> list(tagged({"loss": {0: 1.0, 1: 3.0}, "lr": {None: 0.5}}))
    [('loss', 2.0), ('loss:micro0', 1.0), ('loss:micro1', 3.0), ('lr', 0.5)]
    """
    for name, values in numbers.items():
        yield name, sum(values.values()) / len(values)
        for micro_step, value in values.items():
            if micro_step is not None:
                yield f"{name}:micro{micro_step}", value


def tag_of(stage: int | str, name: str, micro_step: int | str | None) -> str:
    """Return the TensorBoard tag of a series, without the statistic; what UTF-8 cannot hold becomes `?`.

    >>> tag_of(0, "fc1.input", 1), tag_of(0, "fc1.weight", None)
    ('vp0:fc1.input:micro1', 'vp0:fc1.weight')
    """
    tag = f"vp{stage}:{name}" + ("" if micro_step is None else f":micro{micro_step}")
    return tag.encode(errors="replace").decode()
