"""What `/metrics` shows of an agent beside the blocks: brought up to date at each scrape, from the agent's parts."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection

from trainermon.agent.assembly import AgentParts
from trainermon.agent.turn.faults import TurnFaults
from trainermon.agent.watch import RankState
from trainermon.alerts.engine import RuleEngine
from trainermon.core.control import Phase
from trainermon.exporters.prometheus.exposition import Exposition
from trainermon.exporters.prometheus.process_series import process_families


class AgentMetrics:
    """Renders the agent's `/metrics`: the ranks' and its own, at the moment of a scrape."""

    def __init__(self, parts: AgentParts, faults: TurnFaults) -> None:
        self._parts = parts
        self._faults = faults
        self._metrics = parts.views.metrics

    def render(self, accept: str) -> tuple[bytes, str]:
        """Return the text of `/metrics` and its content type, in the format that the `Accept` header asks for."""
        _show_agent(self._metrics, self._parts, num_faults=self._faults.total)
        return self._metrics.render(accept, process_families())


def _show_agent(metrics: Exposition, parts: AgentParts, *, num_faults: int) -> None:
    """Set what the agent's parts have counted; `num_faults` are those that its loop has survived."""
    pipeline, exports, alerting = parts.pipeline.status, parts.exports, parts.alerting
    alerts, now_s = alerting.book.latest.values(), time.time()
    metrics.set_alerts(alerts, now_s=now_s, muted=alerting.handling.muted(alerts, now_s))
    metrics.set("trainermon_commits_total", pipeline.num_commits)
    metrics.set("trainermon_refused_rows_total", pipeline.set_aside.num_rows)
    metrics.set("trainermon_damaged_segments", len(pipeline.set_aside.damaged))
    metrics.set("trainermon_errors_total", pipeline.num_consumer_errors + num_faults + exports.num_errors)
    decisions = alerting.escalator.decisions
    num_ordered = sum(bool(decision.ranks) for decision in decisions)
    metrics.set("trainermon_escalations_total", num_ordered)
    metrics.set("trainermon_suppressed_escalations_total", len(decisions) - num_ordered)
    metrics.set("trainermon_integrity_checks_total", parts.integrity.num_checked)
    metrics.set("trainermon_integrity_mismatches_total", parts.integrity.num_mismatches)
    for exporter, values in exports.metrics().items():
        for name, value in values.items():
            metrics.set(name, value, exporter=exporter)
    _show_ranks(metrics, parts.watch.living)
    _show_comparisons(metrics, alerting.engine, {state.rank for state in parts.watch.living})


def _show_ranks(metrics: Exposition, living: Collection[RankState]) -> None:
    """Set the phases and heartbeats of the ranks that live; what is gone stays forgotten."""
    phases = Counter(state.phase for state in living)
    for phase in Phase:
        metrics.set("trainermon_ranks_in_phase", phases[phase], phase=phase.name.lower())
    age_to_time_s = time.time() - time.monotonic()
    for state in living:
        name = "trainermon_last_heartbeat_timestamp_seconds"
        metrics.set(name, age_to_time_s + state.changed_s, rank=state.rank)


def _show_comparisons(metrics: Exposition, engine: RuleEngine, living: Collection[int]) -> None:
    """Set what the rules that compare ranks have found about those that live."""
    for rank, ratio in engine.slowness.items():
        if rank in living:
            metrics.set("trainermon_rank_slowness_ratio", ratio, rank=rank)
            metrics.set("trainermon_rank_straggling", rank in engine.stragglers, rank=rank)
    metrics.set("trainermon_checksum_comparisons_total", engine.checksum_comparisons)
    for rank, number in engine.checksum_mismatches.items():
        if rank in living:
            metrics.set("trainermon_checksum_mismatches_total", number, rank=rank)
