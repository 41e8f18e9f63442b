"""What an agent says of its ranks, taken out of its JSON with care: it may be of another version, or not an agent."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from trainermon.core.errors import ConfigError

MAX_RANKS = 100_000


@dataclasses.dataclass(frozen=True, slots=True)
class RankSummary:
    """One rank: its number, step, life, phase, seconds without a sign, and its place on each axis of the job."""

    rank: int
    step: int
    alive: bool
    phase: str
    lag_s: float
    place: Mapping[str, int]


@dataclasses.dataclass(frozen=True, slots=True)
class FiringAlert:
    """One alert of an agent's own rules that is firing."""

    rule: str
    severity: str
    rank: int
    step: int
    message: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AgentReport:
    """An agent's report on its ranks and alerts.

    Attributes:
        run_id: Of its run.
        attempt: Of its run.
        host: Its node.
        world_size: Ranks of the job.
        steps_per_s: Pace of its fastest rank; 0 if it is not known.
        ranks: Its ranks by number.
        alerts: Which alerts are on.
        dumps: By command, by rank, what became of its dump.
    """

    run_id: str
    attempt: int
    host: str
    world_size: int
    steps_per_s: float
    ranks: Mapping[int, RankSummary]
    alerts: tuple[FiringAlert, ...]
    dumps: Mapping[str, Mapping[int, str]]

    @property
    def living(self) -> list[RankSummary]:
        """The summaries of the ranks that are alive."""
        return [state for state in self.ranks.values() if state.alive]

    @property
    def living_ranks(self) -> list[int]:
        """The numbers of the living ranks."""
        return [state.rank for state in self.living]


def parse_report(plain: Any) -> AgentReport:
    """Return the report in an agent's JSON; unknown keys are ignored.

    Raises:
        ConfigError: A key is missing or has an impossible value.
    """
    try:
        ranks = [_rank(entry) for entry in plain["ranks"]]
        return AgentReport(
            run_id=str(plain["run_id"]),
            attempt=int(plain["attempt"]),
            host=str(plain["host"]),
            world_size=int(plain["world_size"]),
            steps_per_s=max(0.0, float(plain["steps_per_s"])),
            ranks={state.rank: state for state in ranks},
            alerts=tuple(_alert(entry) for entry in plain["alerts"]),
            dumps={
                str(command): {int(rank): str(status) for rank, status in statuses.items()}
                for command, statuses in plain["dumps"].items()
            },
        )
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise ConfigError(f"the answer is not that of an agent of this version: {error!r}") from None


def _rank(plain: Mapping[str, Any]) -> RankSummary:
    rank = int(plain["rank"])
    if not 0 <= rank < MAX_RANKS:
        raise ValueError(f"rank {rank}")
    place = {str(axis): int(index) for axis, index in plain["place"].items()}
    return RankSummary(
        rank, int(plain["step"]), plain["alive"] is True, str(plain["phase"]), float(plain["lag_s"]), place
    )


def _alert(plain: Mapping[str, Any]) -> FiringAlert:
    severity, message = str(plain["severity"]), str(plain["message"])[:500]
    return FiringAlert(str(plain["rule"]), severity, int(plain["rank"]), int(plain["step"]), message)
