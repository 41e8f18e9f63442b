"""Series under the names that msprobe's monitor gives them: file, name and columns of a row.

The statistics of a series are one row. Its file is that of its kind; its name is that of the parameter, or of the
module with `.input` or `.output` behind it and a number where there are several.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from trainermon.core.values import Kind, Moments, Placement, SeriesKey

OTHER = "other"
SCALARS = "scalars"
FILES: Mapping[Kind, str] = {
    Kind.ACTV: "actv",
    Kind.ACTV_GRAD: "actv_grad",
    Kind.GRAD_UNREDUCED: "grad_unreduced",
    Kind.GRAD_REDUCED: "grad_reduced",
    Kind.PARAM_ORIGIN: "param_origin",
    Kind.PARAM_USED: "param_used",
    Kind.PARAM_UPDATED: "param_updated",
    Kind.EXP_AVG: "exp_avg",
    Kind.EXP_AVG_SQ: "exp_avg_sq",
    Kind.STATE: "state",
    Kind.UPDATE: "update",
    Kind.RATIO: "ratio",
    Kind.ACTV_RECOMPUTED: "actv_recomputed",
    Kind.BUFFER: "buffer",
    Kind.FEATURE: "feature",
}
"""File of each kind; loss and numbers of the step are in `SCALARS`, what else is not named in `OTHER`.

msprobe has no files `scalars`, `param_used`, `state`, `update`, `ratio`, `actv_recomputed`, `buffer`, `feature`.
"""

METRICS: Mapping[Kind, str] = {
    Kind.ACTV: "actv",
    Kind.ACTV_GRAD: "actv_grad",
    Kind.GRAD_UNREDUCED: "pre_grad",
    Kind.GRAD_REDUCED: "post_grad",
    Kind.PARAM_ORIGIN: "param_origin",
    Kind.PARAM_UPDATED: "param_updated",
    Kind.EXP_AVG: "exp_avg",
    Kind.EXP_AVG_SQ: "exp_avg_sq",
}
"""Last part of the tags of each kind."""

OF_MODULES = (Kind.ACTV, Kind.ACTV_RECOMPUTED, Kind.ACTV_GRAD)
OF_SCALARS = (Kind.LOSS, Kind.STEP)


class FeatureFile(NamedTuple):
    """One of msprobe's csv files of features (numbers computed of a module).

    Attributes:
        suffix: What is added to the module's name.
        columns: Its columns.
        has_micro_step: Whether it has a column for micro steps.
    """

    suffix: str
    columns: tuple[str, ...]
    has_micro_step: bool


FEATURE_FILES: Mapping[str, FeatureFile] = {
    "attention_hook": FeatureFile("attention", ("entropy", "softmax_max"), has_micro_step=True),
    "linear_hook": FeatureFile("linear", ("sr", "kernel_norm"), has_micro_step=False),
    "moe_router_weight_hook": FeatureFile("moe_router", ("router_weight_similarity",), has_micro_step=False),
    "moe_router_logit_hook": FeatureFile("moe_router", ("per_token_expert_entropy",), has_micro_step=True),
    SCALARS: FeatureFile("", ("value",), has_micro_step=True),
}
"""Files with columns of their own, by name."""

FEATURES: Mapping[str, tuple[str, str]] = {
    "attention_entropy": ("attention_hook", "entropy"),
    "attention_max_probability": ("attention_hook", "softmax_max"),
    "stable_rank": ("linear_hook", "sr"),
    "spectral_norm": ("linear_hook", "kernel_norm"),
    "router_weight_similarity": ("moe_router_weight_hook", "router_weight_similarity"),
    "router_token_entropy": ("moe_router_logit_hook", "per_token_expert_entropy"),
}
"""File and column of the features that msprobe has too, by slot. The column holds the mean over rows, heads, tokens."""


class SeriesPlace(NamedTuple):
    """Where a series stands in files of msprobe's form.

    Attributes:
        file: First part of the file's name.
        name: What stands in the column `name`.
        stage: Virtual pipeline stage.
        micro_step: Micro step, None where the file has no such column.
        column: The one column that the mean of the series is, '' where it has all of the file's.
    """

    file: str
    name: str
    stage: int
    micro_step: int | None
    column: str = ""


class SeriesNames:
    """Gives each series of one rank its place in msprobe's files.

    A place that was given once stays, whatever series join.
    """

    def __init__(self) -> None:
        self._places: list[SeriesPlace] = []

    def places(self, keys: Sequence[SeriesKey]) -> Sequence[SeriesPlace]:
        """Return the place of each of `keys`, which begin with those of the last call."""
        known = len(self._places)
        if len(keys) > known:
            tensors = _tensors_of_modules(keys)
            self._places += [_place(key, tensors) for key in keys[known:]]
        return self._places


def _tensors_of_modules(keys: Iterable[SeriesKey]) -> dict[tuple[str, int, str], set[str]]:
    """Return, by module, stage and side (in or out), the paths of its tensors."""
    found: dict[tuple[str, int, str], set[str]] = {}
    for key in keys:
        if key.kind in OF_MODULES:
            side, _, path = key.slot.partition(".")
            found.setdefault((key.name, key.stage, side), set()).add(path)
    return found


def _place(key: SeriesKey, tensors: Mapping[tuple[str, int, str], set[str]]) -> SeriesPlace:
    call = f"#{key.call}" if key.call else ""
    if key.kind in OF_MODULES:
        side, _, path = key.slot.partition(".")
        number = "_" + path.replace(".", "_") if len(tensors[key.name, key.stage, side]) > 1 else ""
        return SeriesPlace(FILES[key.kind], f"{key.name}.{side}{number}{call}", key.stage, key.micro_step or 0)
    if key.kind is Kind.FEATURE and key.slot in FEATURES:
        file, column = FEATURES[key.slot]
        form = FEATURE_FILES[file]
        micro_step = (key.micro_step or 0) if form.has_micro_step else None
        return SeriesPlace(file, f"{key.name}.{form.suffix}", key.stage, micro_step, column)
    name = f"{key.name}.{key.slot}" if key.slot else key.name
    if key.kind in OF_SCALARS:
        return SeriesPlace(SCALARS, name + call, key.stage, key.micro_step, "value")
    file = FILES.get(key.kind, OTHER)
    if file != "grad_unreduced" and key.micro_step is not None:
        name += f":micro{key.micro_step}"
        return SeriesPlace(file, name + call, key.stage, None)
    return SeriesPlace(file, name + call, key.stage, key.micro_step)


def _finite_only(value: Callable[[Moments], float]) -> Callable[[Moments], float]:
    return lambda row: value(row) if row.finite else math.nan


COLUMNS: Mapping[str, Callable[[Moments], float]] = {
    "norm": _finite_only(lambda row: row.norm),
    "min": _finite_only(lambda row: row.min),
    "max": _finite_only(lambda row: row.max),
    "mean": _finite_only(lambda row: row.mean),
    "zeros": lambda row: row.zero_ratio,
    "nans": lambda row: row.nonfinite,
    "infs": lambda row: row.infs,
    "rms": lambda row: row.rms,
    "std": lambda row: row.std,
    "count": lambda row: row.count,
    "sum": lambda row: row.sum,
    "sum_sq": lambda row: row.sum_sq,
}
"""Statistics by the names that `ops` has for them: over finite elements, NaN if there is none.

`nans` counts every element that is not finite. A set of one number, such as a share, shows that number as all of norm,
min, max and mean.
"""


def tag_of(place: SeriesPlace, kind: Kind, rank: int) -> str:
    """Return the tag of a series of a kind in `METRICS`, as in `0:fc1.input:1/rank0/actv`."""
    micro_step = "" if place.micro_step is None else f":{place.micro_step}"
    return f"{place.stage}:{place.name}{micro_step}/rank{rank}/{METRICS[kind]}"


def feature_value(place: SeriesPlace, row: Moments) -> float:
    """Return what stands in the one column of a feature or scalar: the mean; for `sr` its root, a ratio of norms.

    A scalar that was not finite is NaN, or infinity, whose sign is not known.
    """
    if place.file == SCALARS and row.nonfinite:
        return math.nan if row.nans else math.inf
    return math.sqrt(row.mean) if place.column == "sr" else row.mean


def with_shape(ops: Sequence[str]) -> tuple[str, ...]:
    """Return the columns of a csv file: the statistics `ops`, then `shape` and `dtype` if they are not among them."""
    return (*ops, *(op for op in ("shape", "dtype") if op not in ops))


def statistics_row(key: SeriesKey, row: Moments) -> Moments:
    """Return the moments that msprobe's files show of a series.

    Where a row describes a share of elements, they are those of that one number.
    """
    if key.kind is not Kind.MG_DIRECTION or not row.finite:
        return row
    share = row.mean
    return Moments(1.0, share, share, share, share * share, float(share == 0.0), 0.0, 0.0)


def shape_of(placement: Placement | None, row: Moments) -> list[int] | None:
    """Return the shape, for msprobe's files, of what this rank holds: flat if it is a part, None if unknown."""
    if placement is None or not placement.dtype:
        return None
    if math.prod(placement.shape) == row.count:
        return list(placement.shape)
    return [int(row.count)]


def dtype_of(placement: Placement | None) -> str | None:
    """Return a tensor's dtype as torch prints it (`torch.float32`), for msprobe's files; None if it is not known."""
    return f"torch.{placement.dtype.removeprefix('torch.')}" if placement and placement.dtype else None
