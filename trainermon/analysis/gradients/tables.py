"""A comparison of gradients as files: csv, JSON, and msprobe's similarities.csv."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from trainermon.analysis.gradients.pictures import write_pictures
from trainermon.analysis.gradients.similarity import SignSimilarity, Unmatched
from trainermon.analysis.gradients.verdict import SignFault, headline
from trainermon.core.private_files import make_private_folder, replace_file
from trainermon.core.values import as_plain

SCHEMA_VERSION = 1


@dataclasses.dataclass(frozen=True, slots=True)
class GradientsComparison:
    """Two runs compared.

    Attributes:
        run: The first folder.
        other: The second.
        similarities: By step and parameter, in order.
        unmatched: What was not compared.
        faults: Where signs part, in order of steps.
    """

    run: Path
    other: Path
    similarities: tuple[SignSimilarity, ...]
    unmatched: tuple[Unmatched, ...]
    faults: tuple[SignFault, ...]

    @property
    def headline(self) -> str:
        """One sentence: where the signs part first."""
        return headline(self.similarities, self.faults, len(self.unmatched))

    @property
    def steps(self) -> list[int]:
        """The steps that were compared."""
        return sorted({one.step for one in self.similarities})

    @property
    def rows(self) -> dict[tuple[str, int | None], dict[int, SignSimilarity]]:
        """By parameter and rank, in the order in which they were met, what was found at each step."""
        found: dict[tuple[str, int | None], dict[int, SignSimilarity]] = {}
        for one in self.similarities:
            found.setdefault((one.name, one.rank), {})[one.step] = one
        return found


def write_csv(comparison: GradientsComparison, path: Path) -> None:
    """Write one row for each parameter and step.

    Raises:
        OSError: It cannot be written.
    """
    faulty = {fault.similarity for fault in comparison.faults}
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(["step", "parameter", "rank", "elements", "similarity", "fault", "nonfinite"])
    for one in comparison.similarities:
        rank = "" if one.rank is None else one.rank
        fault = "yes" if one in faulty else ""
        table.writerow([one.step, one.name, rank, one.num_elements, one.share, fault, one.nonfinite])
    replace_file(path, text.getvalue().encode())


def as_json(comparison: GradientsComparison) -> str:
    """Return everything that was found as JSON, version `SCHEMA_VERSION`."""
    document = {
        "schema_version": SCHEMA_VERSION,
        "run": str(comparison.run),
        "other": str(comparison.other),
        "headline": comparison.headline,
        "faults": [{**_plain(fault.similarity), "similarity_before": fault.before} for fault in comparison.faults],
        "similarities": [_plain(one) for one in comparison.similarities],
        "unmatched": [as_plain(one) for one in comparison.unmatched],
    }
    return json.dumps(document, indent=1, allow_nan=False) + "\n"


def _plain(one: SignSimilarity) -> dict[str, object]:
    return {
        "step": one.step,
        "parameter": one.name,
        "rank": one.rank,
        "num_elements": one.num_elements,
        "similarity": one.share,
        "nonfinite": one.nonfinite,
    }


def write_similarities(comparison: GradientsComparison, folder: Path) -> None:
    """Write msprobe's `rank<R>/similarities.csv`: a row for each parameter, a column for each step, and a summary.

    Beside it, in `similarities_picture/`, the line of each row, as SVG.

    Its similarity is the share of elements that are greater than zero in both runs or in neither; the summary weighs
    parameters by their elements. What was put together from several ranks stands under rank 0.

    Raises:
        OSError: It cannot be written.
    """
    for rank in sorted({one.rank or 0 for one in comparison.similarities}):
        rows = list(_similarity_rows(comparison, rank))
        text = io.StringIO()
        csv.writer(text, lineterminator="\r\n").writerows(rows)
        make_private_folder(folder / f"rank{rank}")
        replace_file(folder / f"rank{rank}" / "similarities.csv", b"\xef\xbb\xbf" + text.getvalue().encode())
        steps = comparison.steps
        named = [(name, [(s, v) for s, v in zip(steps, row, strict=True) if v != ""]) for name, *row in rows[1:]]
        write_pictures(folder / f"rank{rank}", named, steps)


def _similarity_rows(comparison: GradientsComparison, rank: int) -> Iterator[list[Any]]:
    rows = {key: steps for key, steps in comparison.rows.items() if (key[1] or 0) == rank}
    steps = comparison.steps
    yield ["step", *steps]
    for (name, _), by_step in rows.items():
        yield [name, *(by_step[step].share_positive if step in by_step else "" for step in steps)]
    found = [[by_step[step] for by_step in rows.values() if step in by_step] for step in steps]
    yield ["summary", *map(_weighted, found)]


def _weighted(ones: Sequence[SignSimilarity]) -> float | str:
    total = sum(one.num_elements for one in ones)
    return sum(one.num_equal_positive for one in ones) / total if total else ""
