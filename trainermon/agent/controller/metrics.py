"""The controller's own `/metrics`: is it finding its agents, and what becomes of alerts and escalations."""

from __future__ import annotations

import itertools
import os
import resource
import time
from collections.abc import Mapping
from pathlib import Path

from trainermon.agent.controller.controller import Controller
from trainermon.core.metric import Metric, MetricType
from trainermon.exporters.prometheus.openmetrics import (
    OPENMETRICS,
    TEXT,
    MetricSamples,
    prefers_openmetrics,
    render_families,
)
from trainermon.exporters.prometheus.process_series import process_families

_START_S = time.time()


def _metric(name: str, text: str, unit: str = "") -> Metric:
    kind = MetricType.COUNTER if name.endswith("_total") else MetricType.GAUGE
    return Metric(name=name, type=kind, help=text, unit=unit, labels=(), cost="1")


METRICS = (
    _metric("trainermon_controller_agents", "Agents that are found."),
    _metric("trainermon_controller_agents_up", "Agents that have answered the last question."),
    _metric("trainermon_controller_ranks", "Ranks that agents know of."),
    _metric("trainermon_controller_living_ranks", "Ranks that live, as their agents last said."),
    _metric("trainermon_controller_polls_total", "Questions asked of agents."),
    _metric("trainermon_controller_poll_failures_total", "Questions that an agent did not answer in time."),
    _metric("trainermon_controller_poll_duration_seconds", "Wall time of the last round of questions.", "seconds"),
    _metric("trainermon_controller_discovery_failures_total", "Looks for agents that failed."),
    _metric(
        "trainermon_controller_last_discovery_timestamp_seconds", "Unix time of the last look that worked.", "seconds"
    ),
    _metric("trainermon_controller_received_alerts_total", "Alerts in the notifications of Alertmanager."),
    _metric("trainermon_controller_ignored_alerts_total", "Alerts that ask for nothing here, or began long ago."),
    _metric("trainermon_controller_duplicate_alerts_total", "Alerts that came again."),
    _metric("trainermon_controller_escalations_total", "Escalations that were accepted."),
    _metric("trainermon_controller_suppressed_escalations_total", "Escalations that a limit has kept from happening."),
    _metric("trainermon_controller_failed_escalations_total", "Escalations after which no rank has written a dump."),
    _metric("trainermon_controller_open_escalations", "Escalations that are not finished."),
    _metric(
        "trainermon_controller_checksum_comparisons_total",
        "Comparisons of the checksums of replicas on several nodes: one group of ranks on one step each.",
    ),
    _metric("trainermon_controller_checksum_mismatches_total", "Those in which replicas were not equal."),
    _metric("trainermon_controller_law_judgements_total", "Laws judged over several nodes, each on one step."),
    _metric("trainermon_controller_broken_laws", "Laws that do not hold of the gradients of several nodes, now."),
    _metric("trainermon_controller_diverged_ranks", "Ranks whose parameters are not what their replicas are, now."),
    _metric("trainermon_controller_errors_total", "Faults of the controller that were caught, logged and survived."),
    _metric("trainermon_controller_cpu_seconds_total", "User and system CPU time of the controller.", "seconds"),
    _metric("trainermon_controller_resident_memory_bytes", "Resident memory of the controller.", "bytes"),
    _metric("trainermon_controller_start_timestamp_seconds", "Unix time of its start.", "seconds"),
)


def render_metrics(controller: Controller, accept: str) -> tuple[bytes, str]:
    """Return the controller's `/metrics` and its content type, in the format that the `Accept` header asks for."""
    openmetrics = prefers_openmetrics(accept)
    values = _values(controller)
    families = ((metric, [MetricSamples((f"{metric.name} ",), (values[metric.name],))]) for metric in METRICS)
    body = render_families(itertools.chain(families, process_families()), openmetrics=openmetrics)
    return body, OPENMETRICS if openmetrics else TEXT


def _values(controller: Controller) -> Mapping[str, float]:
    fleet, counts, replicas = controller.fleet, controller.counts, controller.replicas
    diverged = {
        (run, rank) for run, found in replicas.findings.items() for each in found.values() for rank in each.ranks
    }
    reports = [agent.report for agent in fleet.agents.values() if agent.report]
    usage = resource.getrusage(resource.RUSAGE_SELF)
    resident_pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    values: dict[str, float] = {
        "agents": len(fleet.agents),
        "agents_up": sum(agent.is_up for agent in fleet.agents.values()),
        "ranks": sum(len(report.ranks) for report in reports),
        "living_ranks": sum(len(report.living) for report in reports),
        "polls_total": fleet.num_polls,
        "poll_failures_total": fleet.num_poll_failures,
        "poll_duration_seconds": fleet.poll_duration_s,
        "discovery_failures_total": fleet.num_discovery_failures,
        "last_discovery_timestamp_seconds": fleet.discovered_s,
        "received_alerts_total": counts["received"],
        "ignored_alerts_total": counts["ignored"],
        "duplicate_alerts_total": counts["duplicate"],
        "escalations_total": counts["accepted"],
        "suppressed_escalations_total": counts["suppressed"],
        "failed_escalations_total": controller.dispatcher.num_failed,
        "open_escalations": len(controller.journal.open),
        "checksum_comparisons_total": replicas.num_comparisons,
        "checksum_mismatches_total": replicas.num_mismatches,
        "law_judgements_total": controller.laws.num_judgements,
        "broken_laws": sum(map(len, controller.laws.findings.values())),
        "diverged_ranks": len(diverged),
        "errors_total": controller.num_faults + controller.dispatcher.num_faults,
        "cpu_seconds_total": usage.ru_utime + usage.ru_stime,
        "resident_memory_bytes": resident_pages * os.sysconf("SC_PAGE_SIZE"),
        "start_timestamp_seconds": _START_S,
    }
    return {f"trainermon_controller_{name}": value for name, value in values.items()}
