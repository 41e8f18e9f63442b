"""How far off a trusted device is, by operation, direction and type: a baseline excuses errors of the same size."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence

import torch

from trainermon.accuracy.judge import Judgement, Status

SCHEMA_VERSION = 1
AS_BASELINE = "about as far off as the baseline"
PEER = 3.0
"""A result so many times as far off as the worst of a trusted device is no fault of this one."""


def kind_of(key: str, judgement: Judgement) -> str:
    """Return operation, direction and type of a result of the call `key`, `linear.backward.float32`."""
    words = key.split(".")
    return f"{words[1] if len(words) > 1 else key}.{words[-1]}.{judgement.dtype}"


def excused(key: str, judgement: Judgement, worst: Mapping[str, float]) -> Judgement:
    """Return the judgement, as a warning where it is an error that the trusted device about makes, too.

    `worst` are the largest errors of that device by kind, in allowances. NaN and infinite errors are never excused.
    """
    is_finite_error = judgement.status is Status.ERROR and math.isfinite(judgement.worst)
    if not is_finite_error or judgement.worst > PEER * worst.get(kind_of(key, judgement), 0.0):
        return judgement
    return dataclasses.replace(judgement, status=Status.WARNING, reason=AS_BASELINE)


def learn(key: str, judgement: Judgement, worst: dict[str, float]) -> None:
    """Put the error of a trusted device into `worst`, unless it is not finite or was not judged."""
    if judgement.status is not Status.SKIP and math.isfinite(judgement.worst):
        kind = kind_of(key, judgement)
        worst[kind] = max(worst.get(kind, 0.0), judgement.worst)


def baseline_text(worst: Mapping[str, float], sources: Sequence[str]) -> str:
    """Return the JSON text of a baseline file: schema, version of torch, the sources, and `worst` by kind."""
    values = {
        "schema": SCHEMA_VERSION,
        "torch": torch.__version__,
        "dumps": list(sources),
        "worst": {kind: worst[kind] for kind in sorted(worst)},
    }
    return json.dumps(values, indent=1) + "\n"
