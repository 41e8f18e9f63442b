"""Which numbers of a step a tracking service is told, and under which names."""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Sequence

import numpy as np

from trainermon.core.catalogue import (
    CLIP_RATIO_SERIES,
    GLOBAL_NORM_SERIES,
    LEARNING_RATE_SERIES,
    LOSS_SERIES,
    STEP_TIME_SERIES,
    TOKENS_PER_SECOND_SERIES,
)
from trainermon.core.journal import Header
from trainermon.core.naming import COLUMNS, SCALARS, SeriesNames, SeriesPlace, feature_value
from trainermon.core.values import STATISTICS, Kind, Moments, StatBlock
from trainermon.exporters.histogram_bars import HistogramBars, bars_of, histograms_of

ALWAYS = (
    LOSS_SERIES,
    GLOBAL_NORM_SERIES,
    STEP_TIME_SERIES,
    LEARNING_RATE_SERIES,
    f"{LEARNING_RATE_SERIES}.*",
    CLIP_RATIO_SERIES,
    TOKENS_PER_SECOND_SERIES,
)
"""Names, or patterns of names, of the numbers that every run tells."""
NORM_PART = "gradient_norm_part"
_FORBIDDEN = re.compile(r"[^\w./: -]", re.ASCII)


class StepNumbers:
    """Picks and names the numbers of the steps of one rank.

    Numbers of the step have their own name (`loss`, `learning_rate.0`), with several micro steps the mean. Of tensors
    each statistic has a name `kind/series/statistic`, such as `grad_reduced/h.0.attn.weight/norm`.

    Args:
        patterns: What is told beside `ALWAYS`: globs for the name of a number, or for `kind/series`.
        ops: Statistics of tensors.
    """

    def __init__(self, patterns: Sequence[str], ops: Sequence[str]) -> None:
        self._wanted = re.compile("|".join(fnmatch.translate(pattern) for pattern in (*ALWAYS, *patterns)))
        self._ops = [op for op in ops if op in COLUMNS]
        self._attempt = -1
        self._names = SeriesNames()
        self._keys: list[str | None] = []

    def of(self, header: Header, block: StatBlock) -> dict[str, float]:
        """Return the step's numbers by name; one that is not finite is told as it is.

        Cost: 2 µs for each series that is not wanted.
        """
        places = self._places(header)
        values = np.asarray(block.values, np.float64).reshape(len(STATISTICS), -1)
        micro_steps: dict[str, list[float]] = {}
        found: dict[str, float] = {}
        square_sum, has_norm = 0.0, False
        for number, column in zip(np.asarray(block.series).tolist(), values.T.tolist(), strict=True):
            moments, place, name = Moments(*column), places[number], self._keys[number]
            placement = header.placements[number]
            if header.series[number].kind is Kind.GRAD_REDUCED and placement is not None and placement.in_global_norm:
                square_sum, has_norm = square_sum + (math.nan if moments.nonfinite else moments.sum_sq), True
            if name is None:
                continue
            if place.file == SCALARS:
                micro_steps.setdefault(name, []).append(feature_value(place, moments))
            elif place.column:
                found[f"{name}/{place.column}"] = feature_value(place, moments)
            else:
                found |= {f"{name}/{op}": COLUMNS[op](moments) for op in self._ops}
        found |= {name: sum(each) / len(each) for name, each in micro_steps.items()}
        if has_norm:
            found[NORM_PART] = math.sqrt(square_sum)
        return found

    def histograms_of(self, header: Header, block: StatBlock) -> dict[str, HistogramBars]:
        """Return the step's histograms of the tensors that are told, by `kind/series/histogram`."""
        self._places(header)
        values = np.asarray(block.values, np.float64).reshape(len(STATISTICS), -1)
        column_of = {number: column for column, number in enumerate(np.asarray(block.series).tolist())}
        found = {}
        for number, counts in histograms_of(block).items():
            bars = bars_of(counts, Moments(*values[:, column_of[number]].tolist()))
            if self._keys[number] is not None and bars is not None:
                found[f"{self._keys[number]}/histogram"] = bars
        return found

    def _places(self, header: Header) -> Sequence[SeriesPlace]:
        if header.attempt != self._attempt:
            self._attempt, self._names, self._keys = header.attempt, SeriesNames(), []
        places = self._names.places(header.series)
        for key, place in zip(header.series[len(self._keys) :], places[len(self._keys) :], strict=True):
            name = _name_of(place)
            is_told = key.kind is not Kind.CHECKSUM and self._wanted.match(name)
            self._keys.append(_FORBIDDEN.sub("_", name) if is_told else None)
        return places


def _name_of(place: SeriesPlace) -> str:
    """Return a series' name, with its virtual stage and micro step where they are not the first.

    >>> _name_of(SeriesPlace("grad_reduced", "h.0.weight", 0, None)), _name_of(SeriesPlace("actv", "h.0.output", 1, 2))
    ('grad_reduced/h.0.weight', 'actv/vp1:h.0.output:micro2')
    """
    if place.file == SCALARS:
        return place.name
    stage = f"vp{place.stage}:" if place.stage else ""
    micro_step = f":micro{place.micro_step}" if place.micro_step else ""
    return f"{place.file}/{stage}{place.name}{micro_step}"
