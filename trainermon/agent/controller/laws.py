"""Laws of gradients over all nodes of a job, judged on what each agent folds its ranks' rows into.

An agent judges the ranks of its node, but the ranks that share a reduction are usually on many: no node alone can tell
whether it gave the sum of what all of them had. Here the same relations judge the folds of all ranks.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from trainermon.agent.across_nodes.folded_rows import KINDS, Fold
from trainermon.agent.controller.client import AgentClient
from trainermon.agent.controller.fleet import AgentFleet, AgentHandle
from trainermon.agent.controller.steps import StepInquiry
from trainermon.agent.hang.evidence import spans
from trainermon.alerts.laws.law import Law, LawRelation, LawStep, LawVerdict, TensorPlace
from trainermon.alerts.laws.registry import LAWS
from trainermon.core.values import STATISTICS, Coordinates, Kind, Placement

FEWEST = 2
"""So many told steps in a row a law is broken before that is said."""

JUDGED: Mapping[str, Law] = {law.name: law for law in LAWS if {*law.rows} <= {*KINDS} and law.holds_for_sums}

_log = logging.getLogger(__name__)


class _RankFolds(NamedTuple):
    place: Coordinates
    moments: Mapping[tuple[Kind, Fold], Sequence[float]]


_Told = Sequence[_RankFolds]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BrokenLaw:
    """A law that has not held since a step, as far as was last judged.

    Attributes:
        law: Which.
        attempt: The start of the run.
        step: The first judged step on which it did not.
        ranks: The ranks on which it does not.
        size: How far the worst is from what the law says.
        explained: What rounding explains of that.
        num_steps: How many judged steps in a row.
    """

    law: Law
    attempt: int
    step: int
    ranks: tuple[int, ...]
    size: float
    explained: float
    num_steps: int = 1

    @property
    def text(self) -> str:
        """One sentence that says what went wrong, where, since when and by how much, for a page and a log."""
        return (
            f"{self.law.headline} ({spans(self.ranks)}, since step {self.step}; apart by {self.size:.2g}, "
            f"rounding explains {self.explained:.2g}); look at {self.law.look_at}"
        )


class LawWatch:
    """Judges laws over the ranks of all nodes of a run. Make it inside the event loop.

    Args:
        fleet: The agents.
        client: Speaks to them.

    Attributes:
        num_judgements: Laws judged, each on one step.
    """

    def __init__(self, fleet: AgentFleet, client: AgentClient) -> None:
        self.num_judgements = 0
        self._inquiry = StepInquiry(fleet, client, "api/v1/folds", _told)
        self._runs: dict[str, _AttemptLaws] = {}

    @property
    def findings(self) -> Mapping[str, Sequence[BrokenLaw]]:
        """By run, the laws that are broken now, on at least `FEWEST` judged steps in a row."""
        return {
            run: [each for each in laws.broken.values() if each.num_steps >= FEWEST] for run, laws in self._runs.items()
        }

    async def look(self) -> None:
        """Judge the steps that are new since the last call; skips runs that one agent sees completely."""
        told = await self._inquiry.look()
        known, self._runs = self._runs, {}
        for run, attempt, steps in told:
            laws = known.get(run)
            self._runs[run] = laws = laws if laws is not None and laws.attempt == attempt else _AttemptLaws(attempt)
            for step, answers in steps:
                self.num_judgements += await asyncio.to_thread(laws.judge, run, step, answers)


class _AttemptLaws:
    """The laws of one attempt of a run, and which of them are broken now."""

    def __init__(self, attempt: int) -> None:
        self.attempt = attempt
        self.broken: dict[str, BrokenLaw] = {}
        self._relations: dict[str, LawRelation] = {law.name: law.relation(law.settings) for law in JUDGED.values()}

    def judge(self, run: str, step: int, told: Sequence[tuple[AgentHandle, _Told]]) -> int:
        """Judge the laws on what the agents told of a step; return how many could be. Cost: 0.2 ms for each rank."""
        number, rows = 0, _lined_up(self.attempt, step, told)
        for name, relation in self._relations.items():
            verdict = relation.judge(rows)
            if verdict is None or not verdict.judged.any():
                continue
            number += 1
            before = self.broken.pop(name, None)
            if verdict.broken.any():
                self.broken[name] = found = _broken(JUDGED[name], rows, verdict, before)
                if found.num_steps == FEWEST:
                    _log.error("run %s: %s", run, found.text)
        return number


def _broken(law: Law, rows: LawStep, verdict: LawVerdict, before: BrokenLaw | None) -> BrokenLaw:
    beyond = np.where(verdict.broken, verdict.size - verdict.explained, -np.inf)
    worst = divmod(int(np.argmax(beyond)), beyond.shape[1])
    return BrokenLaw(
        law=law,
        attempt=rows.attempt,
        step=rows.step if before is None else before.step,
        ranks=tuple(sorted(rows.places[row].rank for row in np.flatnonzero(verdict.broken.any(axis=1)).tolist())),
        size=float(verdict.size[worst]),
        explained=float(verdict.explained[worst]),
        num_steps=1 if before is None else before.num_steps + 1,
    )


def _told(ranks: Any) -> _Told:
    return [
        _RankFolds(
            Coordinates(**rows["place"]),
            {
                (Kind(kind), Fold(int(part), str(dtype), tuple(copies), tuple(parts))): [float(one) for one in moments]
                for kind, part, dtype, copies, parts, moments in rows["folds"]
            },
        )
        for rows in ranks.values()
    ]


def _lined_up(attempt: int, step: int, told: Sequence[tuple[AgentHandle, _Told]]) -> LawStep:
    """Return what the ranks of all agents show of a step: each fold is a tensor."""
    ranks = sorted((rank for _, of_agent in told for rank in of_agent), key=lambda rank: rank.place.rank)
    folds = sorted({fold for rank in ranks for _, fold in rank.moments})
    columns = {fold: column for column, fold in enumerate(folds)}
    rows = {kind: np.full((len(ranks), len(STATISTICS), len(folds)), np.nan) for kind in KINDS}
    placements: dict[Kind, list[list[Placement | None]]] = {
        kind: [[None] * len(folds) for _ in ranks] for kind in KINDS
    }
    for number, rank in enumerate(ranks):
        for (kind, fold), moments in rank.moments.items():
            rows[kind][number][:, columns[fold]] = moments
            placements[kind][number][columns[fold]] = fold.placement(rank.place)
    return LawStep(
        step=step,
        attempt=attempt,
        places=[rank.place for rank in ranks],
        tensors=[TensorPlace(f"{fold}", 0, "", 0, None) for fold in folds],
        rows=rows,
        placements=placements,
    )
