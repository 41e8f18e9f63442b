"""What an agent answers: the state of its ranks, and how it has taken an order."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any

from trainermon.core.values import Command, as_plain


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RankSummary:
    """One rank, as an agent reports it to the controller.

    Attributes:
        rank: Its number.
        alive: Whether its process lives.
        step: The step it is on.
        phase: What it does: `step`, `setup`, `dump` …
        lag_s: Seconds since its last sign of life.
        place: Its position on each axis of the job (`tp`, `dp` …).
    """

    rank: int
    alive: bool
    step: int
    phase: str
    lag_s: float
    place: Mapping[str, int]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FiringAlert:
    """An alert that fires, as an agent reports it to the controller; `step` is its first one, `id` the alert's."""

    id: str
    rule: str
    severity: str
    rank: int
    step: int
    message: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AgentReport:
    """An agent's report to the controller on its ranks and alerts.

    Attributes:
        run_id: The run that it follows.
        attempt: How often that was started.
        host: Its node.
        world_size: Number of ranks of the job.
        step: The last step that its ranks have finished, as its page shows; None before that.
        steps_per_s: Pace of its fastest rank; 0 if it is not known.
        ranks: Its ranks, each number once.
        alerts: The alerts that fire and are not silenced.
        dumps: By id of a command, then by rank, what became of its dump.
        silenced: The other alerts that fire.
    """

    run_id: str
    host: str
    attempt: int
    world_size: int
    step: int | None
    steps_per_s: float
    ranks: tuple[RankSummary, ...]
    alerts: tuple[FiringAlert, ...]
    dumps: Mapping[str, Mapping[int, str]]
    silenced: tuple[FiringAlert, ...] = ()

    @property
    def living(self) -> list[RankSummary]:
        """The summaries of the ranks that are alive."""
        return [state for state in self.ranks if state.alive]

    @property
    def living_ranks(self) -> list[int]:
        """The numbers of the living ranks."""
        return [state.rank for state in self.living]


class OrderStatus(str, enum.Enum):
    """How an agent has taken an order.

    `accepted`: its ranks were told; `duplicate`: they had been told before; `suppressed` by a limit; `late`: every rank
    is past the step; `ignored`: nothing in it is for this agent.
    """

    ACCEPTED = "accepted"
    DUPLICATE = "duplicate"
    SUPPRESSED = "suppressed"
    LATE = "late"
    IGNORED = "ignored"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OrderAnswer:
    """What the sender of an order is told; None is what does not apply, and is left out of the JSON.

    Attributes:
        status: How it was taken.
        id: The command that ranks carry out.
        command: The same with all that was filled in.
        ranks: Those that carry it out.
        late: Those that are past its first step.
        first_step: Of the command.
        reason: Why nothing was ordered.
        ignored: Why alerts of the notification were left out.
    """

    status: OrderStatus
    id: str | None = None
    command: Command | None = None
    ranks: tuple[int, ...] | None = None
    late: tuple[int, ...] | None = None
    first_step: int | None = None
    reason: str | None = None
    ignored: tuple[str, ...] | None = None

    def plain(self) -> dict[str, Any]:
        """Return the answer as a mapping ready for JSON, without what is None."""
        return {key: value for key, value in as_plain(self).items() if value is not None}
