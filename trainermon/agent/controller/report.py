"""What an agent says of its ranks, taken out of its JSON with care: it may be of another version, or not an agent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainermon.agent.orders.answers import AgentReport, FiringAlert, RankSummary
from trainermon.core.errors import ConfigError

MAX_RANKS = 100_000


def parse_report(plain: Any) -> AgentReport:
    """Parse an agent's JSON on its ranks and alerts; unknown keys are ignored.

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
            step=None if plain["step"] is None else int(plain["step"]),
            steps_per_s=max(0.0, float(plain["steps_per_s"])),
            ranks=tuple({state.rank: state for state in ranks}.values()),
            alerts=tuple(_alert(entry) for entry in plain["alerts"]),
            silenced=tuple(_alert(entry) for entry in plain.get("silenced", ())),
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
        rank=rank,
        alive=plain["alive"] is True,
        step=int(plain["step"]),
        phase=str(plain["phase"]),
        lag_s=float(plain["lag_s"]),
        place=place,
    )


def _alert(plain: Mapping[str, Any]) -> FiringAlert:
    return FiringAlert(
        id=str(plain.get("id", "")),
        rule=str(plain["rule"]),
        severity=str(plain["severity"]),
        rank=int(plain["rank"]),
        step=int(plain["step"]),
        message=str(plain["message"])[:500],
    )
