"""Which points a step of a rank becomes for InfluxDB, within the series budget that `/metrics` has too.

What is a label there is a tag here, and what is a metric of a rank is a field of the rank's one point. Of modules there
is one point each, with what is known of all their elements. A step that tells nothing new of a series has no point of
it: values are never repeated.

The choice of modules depends on the rank's table alone, which only grows: `RankPoints` is given the table as it was
known when a segment ended, so that sending a segment again gives the same points.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import orjson

from trainermon.core.catalogue import ACCELERATOR_SERIES, STEP_TIME_SERIES
from trainermon.core.values import STATISTICS, Kind, Placement, SeriesKey, StatBlock
from trainermon.exporters.influxdb.line_protocol import PointLines, point, series_text, time_text
from trainermon.exporters.prometheus.module_series import ModuleSeries
from trainermon.exporters.prometheus.scalar_series import ScalarSeries, collectives, losses, step_values
from trainermon.exporters.store.segment_follower import StoredSeries

Array = npt.NDArray[Any]

_COUNT, _MIN, _MAX, _SUM, _SUM_SQ, _ZEROS, _NANS, _INFS = range(len(STATISTICS))
_COUNTS = ("count", "nonfinite", "zeros")
_NUMBERS = ("max", "mean", "min", "rms")
_STEP = "trainermon_step"
_ACCELERATOR = "trainermon_accelerator"
# By metric: measurement and field, where these are not the metric's own name and `value`.
_FIELDS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "trainermon_loss": (_STEP, "loss"),
        "trainermon_global_gradient_norm": (_STEP, "global_gradient_norm"),
        "trainermon_clip_ratio": (_STEP, "clip_ratio"),
        "trainermon_loss_scale": (_STEP, "loss_scale"),
        "trainermon_skipped_steps_total": (_STEP, "skipped_steps"),
        "trainermon_tokens_total": (_STEP, "tokens"),
        "trainermon_tokens_per_second": (_STEP, "tokens_per_second"),
        "trainermon_collectives_total": ("trainermon_collective", "collectives"),
        "trainermon_collectives_in_flight": ("trainermon_collective", "in_flight"),
        "trainermon_collective_wait_seconds_total": ("trainermon_collective", "wait_seconds"),
        "trainermon_collective_bytes_total": ("trainermon_collective", "bytes"),
        "trainermon_unseen_collectives_total": ("trainermon_collective", "unseen"),
        "trainermon_unfinished_collectives_total": ("trainermon_collective", "unfinished"),
    }
)


class _StepField(NamedTuple):
    """One number of the step: where it stands, and which rows it is made of."""

    series: str
    name: str
    scalar: ScalarSeries


class RankPoints:
    """Converts the blocks (steps) of one rank into points for InfluxDB.

    Args:
        run_id: Value of the tag `run`.
        rank: Value of the tag `rank`.
        table: The rank's series; rows of a block are numbered by it.
        budget: The largest number of series in InfluxDB.
    """

    def __init__(self, run_id: str, rank: int, table: Sequence[StoredSeries], *, budget: int) -> None:
        keys = [row.key for row in table]
        placements = [Placement(dtype="", shape=(row.num_elements,)) for row in table]
        self._tags = {"run": run_id, "rank": str(rank)}
        self._step = series_text(_STEP, self._tags)
        duration = ScalarSeries("", {}, _ids(i for i, key in enumerate(keys) if _is_step_time(key)), adds_up=False)
        self._fields = [self._field(scalar) for scalar in (*losses(keys), *step_values(keys), *collectives(keys))]
        self._fields.append(_StepField(self._step, "duration_seconds", duration))
        self._fields += self._accelerator(keys)
        self._kinds = list(dict.fromkeys(key.kind for key in keys))
        self._kind_of = _ids(self._kinds.index(key.kind) for key in keys)
        self._nonfinite = [
            "" if kind is Kind.CHECKSUM else self._text("trainermon_nonfinite_elements", {"kind": kind.value})
            for kind in self._kinds
        ]
        gradients = [i for i, key in enumerate(keys) if key.kind is Kind.GRAD_REDUCED]
        self._norms = {
            "gradient_norm": _ids(gradients),
            "gradient_norm_part": _ids(i for i in gradients if table[i].placement.in_global_norm),
        }
        used = len({field.series for field in self._fields} | {self._step}) + len(self._kinds)
        self._modules = ModuleSeries.choose(keys, placements, room=max(0, budget - used))
        self._prefixes = [self._text(f"trainermon_{shown.kind.value}", shown.labels) for shown in self._modules.shown]
        self._rows = np.zeros((len(STATISTICS), len(keys)))

    def lines(self, block: StatBlock, *, attempt: int) -> PointLines:
        """Return the points of one block in line protocol; its `series` are positions in the table."""
        series, values = np.asarray(block.series), np.asarray(block.values)
        time = time_text(block.time_s)
        self._rows[:] = 0.0
        self._rows[:, series] = values
        points = [
            point(where, {"step": block.step} | ({"attempt": attempt} if where == self._step else {}), known, time)
            for where, known in self._scalars().items()
        ]
        modules = self._module_points(block.step, series, values, time)
        text = [line for line, _ in points] + self._nonfinite_points(block.step, time) + modules.text
        return PointLines(text, sum(missing for _, missing in points) + modules.num_nonfinite)

    def _scalars(self) -> dict[str, dict[str, float]]:
        """Return, by series and field, the values of the step that are not about a module."""
        rows = self._rows
        fields: dict[str, dict[str, float]] = {self._step: {}}
        for where, name, scalar in self._fields:
            if rows[_COUNT, scalar.ids].any():
                fields.setdefault(where, {})[name] = _value(rows, scalar)
        for name, ids in self._norms.items():
            if rows[_COUNT, ids].any():
                is_finite = not (rows[_NANS, ids].any() or rows[_INFS, ids].any())
                fields[self._step][name] = math.sqrt(rows[_SUM_SQ, ids].sum()) if is_finite else math.nan
        return fields

    def _nonfinite_points(self, step: int, time: str) -> list[str]:
        counts, nans, infs = (
            np.bincount(self._kind_of, weights=self._rows[row], minlength=len(self._kinds))
            for row in (_COUNT, _NANS, _INFS)
        )
        return [
            f"{where}step={step}i,value={int(bad)}i{time}"
            for where, bad, count in zip(self._nonfinite, (nans + infs).tolist(), counts.tolist(), strict=True)
            if count and where
        ]

    def _module_points(self, step: int, series: Array, values: Array, time: str) -> PointLines:
        size = len(self._prefixes)
        groups = self._modules.groups[series]
        is_told = np.bincount(groups, minlength=size + 1)[:size] > 0
        count, sums, squares, zeros, nans, infs = (
            np.bincount(groups, weights=values[row], minlength=size + 1)[:size][is_told]
            for row in (_COUNT, _SUM, _SUM_SQ, _ZEROS, _NANS, _INFS)
        )
        least, most = np.full(size + 1, np.inf), np.full(size + 1, -np.inf)
        np.minimum.at(least, groups, values[_MIN])
        np.maximum.at(most, groups, values[_MAX])
        least, most = least[:size][is_told], most[:size][is_told]
        finite = count - nans - infs
        with np.errstate(divide="ignore", invalid="ignore"):
            columns = np.stack([count, nans + infs, zeros, most, sums / finite, least, np.sqrt(squares / finite)])
        prefixes = list(itertools.compress(self._prefixes, is_told))
        end = f",step={step}i{time}"
        whole = np.isfinite(columns).all(axis=0)
        if whole.all():
            return PointLines(_module_lines(prefixes, columns, end), 0)
        lines = _module_lines(itertools.compress(prefixes, whole), columns[:, whole], end)
        num_nonfinite = 0
        for place in np.flatnonzero(~whole).tolist():
            counts, numbers = columns[:3, place].astype(np.int64).tolist(), columns[3:, place].tolist()
            integers = {**dict(zip(_COUNTS, counts, strict=True)), "step": step}
            text, missing = point(prefixes[place], integers, dict(zip(_NUMBERS, numbers, strict=True)), time)
            lines.append(text)
            num_nonfinite += missing
        return PointLines(lines, num_nonfinite)

    def _field(self, scalar: ScalarSeries) -> _StepField:
        measurement, name = _FIELDS.get(scalar.metric, (scalar.metric, "value"))
        return _StepField(self._text(measurement, scalar.labels), name, scalar)

    def _accelerator(self, keys: Sequence[SeriesKey]) -> list[_StepField]:
        """Return the fields of the rank's accelerator; [] if nothing is known of one."""
        where = self._text(_ACCELERATOR, {})
        ids = {key.name: number for number, key in enumerate(keys) if key.kind is Kind.STEP}
        return [
            _StepField(where, name.removeprefix("accelerator_"), ScalarSeries("", {}, _ids([ids[name]]), adds_up=False))
            for name in ACCELERATOR_SERIES
            if name in ids
        ]

    def _text(self, measurement: str, tags: Mapping[str, str]) -> str:
        return series_text(measurement, {**self._tags, **tags})


def _module_lines(prefixes: Iterable[str], columns: Array, end: str) -> list[str]:
    """Return the lines of modules all of whose values are finite; this is where the time goes."""
    counts = columns[:3].astype(np.int64).tolist()
    numbers = zip(*[iter(_texts(columns[3:].T))] * len(_NUMBERS), strict=True)
    return [
        f"{prefix}count={n}i,nonfinite={bad}i,zeros={nil}i,max={high},mean={mean},min={low},rms={rms}{end}"
        for prefix, n, bad, nil, (high, mean, low, rms) in zip(prefixes, *counts, numbers, strict=True)
    ]


def _texts(values: Array) -> list[str]:
    """Return the shortest texts that read back as the same finite float64, row by row; four times as fast as `repr`."""
    plain = np.ascontiguousarray(values, np.float64).ravel()
    text = orjson.dumps(plain, option=orjson.OPT_SERIALIZE_NUMPY).decode()
    return text[1:-1].split(",") if plain.size else []


def _value(rows: Array, scalar: ScalarSeries) -> float:
    finite = float((rows[_COUNT, scalar.ids] - rows[_NANS, scalar.ids] - rows[_INFS, scalar.ids]).sum())
    total = float(rows[_SUM, scalar.ids].sum())
    if scalar.adds_up:
        return total if finite else math.nan
    return total / finite if finite else math.nan


def _is_step_time(key: SeriesKey) -> bool:
    return key.kind is Kind.STEP and key.name == STEP_TIME_SERIES


def _ids(values: Iterable[int]) -> Array:
    return np.fromiter(values, dtype=np.intp)
