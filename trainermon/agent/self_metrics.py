"""What `/metrics` shows of an agent beside the blocks: brought up to date at each scrape, from the agent's parts."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterable

from trainermon.agent.assembly import AgentParts
from trainermon.agent.watch import RankState
from trainermon.alerts.engine import RuleEngine
from trainermon.core.control import Phase
from trainermon.exporters.prometheus.exposition import Exposition


def show_agent(parts: AgentParts, *, num_faults: int) -> None:
    """Set what the agent's parts have counted; `num_faults` are those that its loop has survived."""
    metrics, pipeline, exports = parts.metrics, parts.pipeline.status, parts.exports
    metrics.set_alerts(parts.alerts.latest.values(), now_s=time.time())
    metrics.set("trainermon_commits_total", pipeline.num_commits)
    metrics.set("trainermon_refused_rows_total", pipeline.set_aside.num_rows)
    metrics.set("trainermon_damaged_segments", len(pipeline.set_aside.damaged))
    metrics.set("trainermon_errors_total", pipeline.num_consumer_errors + num_faults + exports.num_errors)
    decisions = parts.escalator.decisions
    num_ordered = sum(bool(decision.ranks) for decision in decisions)
    metrics.set("trainermon_escalations_total", num_ordered)
    metrics.set("trainermon_suppressed_escalations_total", len(decisions) - num_ordered)
    metrics.set("trainermon_integrity_checks_total", parts.integrity.num_checked)
    metrics.set("trainermon_integrity_mismatches_total", parts.integrity.num_mismatches)
    for exporter, values in exports.metrics().items():
        for name, value in values.items():
            metrics.set(name, value, exporter=exporter)
    _show_ranks(metrics, parts.watch.ranks.values())
    _show_comparisons(metrics, parts.engine, {rank for rank, state in parts.watch.ranks.items() if state.alive})


def _show_ranks(metrics: Exposition, states: Iterable[RankState]) -> None:
    """Set the phases and heartbeats of the ranks that live; what is gone stays forgotten."""
    living = [state for state in states if state.alive]
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
