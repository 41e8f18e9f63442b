"""Numbers of a step, as a recorded `validation_loss`, that are not finite where every tensor that was stored is."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import NamedTuple

from trainermon.analysis.diagnosis.evidence import StepEvidence, open_store
from trainermon.analysis.diagnosis.findings import BadTensor, Diagnosis, DiagnosisVerdict, Symptom
from trainermon.analysis.diagnosis.wording import counted, rank_list
from trainermon.core.catalogue import CLIP_RATIO_SERIES, GLOBAL_NORM_SERIES, ROLLOUT_SERIES, SKIPPED_SERIES
from trainermon.core.values import Kind

# A framework that scales the loss skips a step of infinite norm and goes on; what `rl` measures of nothing is NaN.
_OF_SKIPPED = ", ".join(f"'{name}'" for name in (GLOBAL_NORM_SERIES, CLIP_RATIO_SERIES))
_NOT_JUDGED = ", ".join(f"'{name}'" for name in ROLLOUT_SERIES)


class _BadNumber(NamedTuple):
    step: int
    name: str
    ranks: list[int]
    nans: int
    infs: int
    num_steps: int


def with_recorded(run_dir: Path, finite: Diagnosis, evidence: StepEvidence, step: int | None) -> Diagnosis:
    """Return the diagnosis of the recorded numbers that were not finite first; `finite` if none was.

    With `step`, only that step is looked at. Of several numbers that began on one step, all are named.
    """
    found = [] if evidence.attempt is None else _bad_numbers(run_dir, evidence.attempt, step)
    if not found:
        return finite
    first = min(one.step for one in found)
    bad = [one for one in found if one.step == first]
    one, later = bad[0], [other for other in found if other.step > first]
    what = "NaN" if one.nans else "infinite"
    names = ", ".join(other.name for other in bad)
    return dataclasses.replace(
        finite,
        verdict=DiagnosisVerdict.LOCATED,
        symptom=Symptom.NONFINITE,
        headline=f"The recorded {names} was not finite on {rank_list(one.ranks)} in step {first}",
        reason=f"The recorded {one.name} was {what} in {counted(one.num_steps, 'step')}, in step {first} first."
        " Every parameter, gradient and result of the model that was stored is finite",
        step=first,
        rank=one.ranks[0] if len(one.ranks) == 1 else None,
        tensor=BadTensor(slot=f"recorded {one.name}", count=one.nans + one.infs, nans=one.nans, infs=one.infs),
        consequences=tuple(f"the recorded {other.name} was not finite from step {other.step} on" for other in later),
    )


def _bad_numbers(run_dir: Path, attempt: int, step: int | None) -> list[_BadNumber]:
    query = f"""
        WITH skipped AS (SELECT step, rank FROM all_stats
            WHERE attempt = $attempt AND kind = '{Kind.STEP}' AND name = '{SKIPPED_SERIES}' AND max > 0),
        bad AS (SELECT step, name || CASE slot WHEN '' THEN '' ELSE ' of group ' || slot END AS name, rank, nans, infs
            FROM all_stats WHERE attempt = $attempt AND kind = '{Kind.STEP}' AND nans + infs > 0
                AND ($step IS NULL OR step = $step) AND name NOT IN ({_NOT_JUDGED})
                AND NOT (name IN ({_OF_SKIPPED}) AND (step, rank) IN (SELECT step, rank FROM skipped)))
        SELECT min(step), name, list_sort(list_distinct(list(rank) FILTER (step = first))),
            (sum(nans) FILTER (step = first))::BIGINT, (sum(infs) FILTER (step = first))::BIGINT,
            count(DISTINCT step)
        FROM (SELECT *, min(step) OVER (PARTITION BY name) AS first FROM bad) GROUP BY name ORDER BY 1, 2
    """  # noqa: S608  # our own names
    with open_store(run_dir) as connection:
        if connection is None:
            return []
        return [_BadNumber(*row) for row in connection.execute(query, {"attempt": attempt, "step": step}).fetchall()]
