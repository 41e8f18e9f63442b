"""The state of run and ranks, as the page and controllers ask for it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

import trainermon
from trainermon.agent.assembly import AgentParts
from trainermon.agent.lifecycle.lock import RUNNING
from trainermon.agent.turn.rank_files import RankFiles
from trainermon.alerts.rules import AlertRule
from trainermon.core.catalogue import LOSS_SERIES
from trainermon.core.values import Coordinates, Kind, measured_as_plain
from trainermon.exporters.views import RunHistory

AXES = ("dp", "tp", "pp", "cp", "ep")


class RunOverview:
    """Describes the state of a run and its ranks, for the page and for controllers.

    Args:
        parts: Those of the agent.
        rank_files: What the ranks wrote about themselves.
        host: Name of this node.
    """

    def __init__(self, parts: AgentParts, rank_files: RankFiles, *, host: str) -> None:
        self._state = RUNNING
        self._feed = parts.views.feed
        self._settings = parts.settings
        self._pipeline = parts.pipeline
        self._watch = parts.watch
        self._alerting = parts.alerting
        self._history = parts.views.history
        self._reactions = parts.orders.reactions
        self._rank_files = rank_files
        self._host = host
        self._shown: set[str] = set()  # kinds that have had a value

    def show_state(self, state: str) -> None:
        """Set the agent's state, and send it to open pages if it has changed."""
        if self._state != state:
            self._state = state
            self._feed.publish("state", {"state": state})

    def plain(self) -> dict[str, Any]:
        """Return the state of run and ranks as a mapping ready for JSON."""
        headers = self._pipeline.headers.values()
        latest = self._history.latest
        return {
            "run_id": self._settings.run_id,
            "attempt": max((header.attempt for header in headers), default=0),
            "host": self._host,
            "state": self._state,
            "step": latest.step if latest else None,
            "started_s": min((header.started_s for header in headers), default=None),
            "world_size": self._world_size,
            "output": self._settings.output,
            "ranks": self._ranks(time.monotonic()),
            "loss": measured_as_plain(latest.loss) if latest else None,
            "grad_norm": measured_as_plain(latest.grad_norm) if latest else None,
            "step_time_s": measured_as_plain(latest.step_time_s) if latest else None,
            "tokens_per_second": measured_as_plain(latest.tokens_per_second) if latest else None,
            "alerts_firing": self._alerting.num_firing,
            "bytes_per_step": self._rank_files.bytes_per_step,
            "skipped_records": self._pipeline.num_lost_files,
            "lag_s": self._reactions.lag_s,
            "version": trainermon.__version__,
            "model": self._model(),
            "heatmaps": self._heatmaps(),
            "rank_quantities": self._history.rank_quantities(),
            "rules": len(self._alerting.rules),
            "rules_without_loss": num_without_loss(self._alerting.rules, self._history),
            "takes_orders": True,
            "diagnosis_pages": True,
            "problem": self._pipeline.status.store_error,
        }

    @property
    def _world_size(self) -> int:
        headers = self._pipeline.headers.values()
        return max((header.coordinates.world_size for header in headers), default=0)

    def _heatmaps(self) -> list[dict[str, Any]]:
        """Return the heat maps with a value: a rank may know of series that its settings never let it collect."""
        offered = self._history.heatmaps()
        for entry in offered:
            kind = entry["kind"]
            if kind not in self._shown and has_values(self._history.heatmap(kind, entry["statistics"][0], 1)):
                self._shown.add(kind)
        return [entry for entry in offered if entry["kind"] in self._shown]

    def _model(self) -> dict[str, Any] | None:
        """Return {"parameters", "is_whole"}: how many the ranks of this node account for; None until one is counted."""
        counted = self._rank_files.num_parameters
        is_whole = len(self._rank_files) >= self._world_size
        return {"parameters": counted, "is_whole": is_whole} if counted else None

    def _ranks(self, now_s: float) -> list[dict[str, Any]]:
        headers = self._pipeline.headers
        return [
            {
                "rank": state.rank,
                "place": place_of(headers[state.rank].coordinates) if state.rank in headers else {},
                "alive": state.alive,
                "step": state.step,
                "phase": state.phase.name.lower(),
                "lag_s": round(now_s - state.changed_s, 3),
            }
            for state in self._watch.states
        ]


def num_without_loss(rules: Sequence[AlertRule], history: RunHistory) -> int:
    """Return how many rules look at the loss alone and see none, as the run has steps but records no loss."""
    if history.latest is None or history.lines([LOSS_SERIES])["series"][LOSS_SERIES]:
        return 0
    return sum(rule.on.kinds == (Kind.LOSS,) for rule in rules)


def place_of(coordinates: Coordinates) -> dict[str, int]:
    """Return where a rank stands on each axis that the job is split over."""
    return {axis: getattr(coordinates, axis) for axis in AXES if getattr(coordinates, f"{axis}_size") > 1}


def has_values(heatmap: bytes) -> bool:
    """Return whether a heat map, as the page gets it, has any cell with a value."""
    start = 4 + int.from_bytes(heatmap[:4], "little")
    return not bool(np.isnan(np.frombuffer(heatmap, "<f4", offset=start)).all())
