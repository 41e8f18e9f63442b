"""The monitor itself: is what the other dashboards show complete, recent and cheap."""

from __future__ import annotations

from typing import Any

from trainermon.dashboards.grafana import queries as q
from trainermon.dashboards.grafana.panels import Board, ColourScale, Panel, PanelQuery, PanelRow, PanelView

_NO_AGENT = "No agent answers"
_NO_EXPORTER = "No exporter is turned on"
_NOT_DURABLE = "No exporter that follows the store is turned on"


def _stat(title: str, text: str, query: str, **other: Any) -> Panel:
    fields: dict[str, Any] = {
        "decimals": 0,
        "thresholds": q.MUST_BE_ZERO,
        "width": 3,
        "height": 4,
        "empty": _NO_AGENT,
        **other,
    }
    prometheus = (PanelQuery(text=query),)
    return Panel(title=title, text=text, view=PanelView.STAT, prometheus=prometheus, **fields)


def _by_node(title: str, text: str, expression: str, unit: str = "short") -> Panel:
    return Panel(
        title=title,
        text=text,
        view=PanelView.LINES,
        prometheus=(PanelQuery(text=expression, legend="{{instance}}"),),
        unit=unit,
        scale=ColourScale(low=0),
        width=8,
        empty=_NO_AGENT,
    )


def _by_exporter(title: str, text: str, metric: str, *, unit: str = "short", empty: str = _NO_EXPORTER) -> Panel:
    return Panel(
        title=title,
        text=text,
        view=PanelView.LINES,
        prometheus=(
            PanelQuery(
                text=f"sum by (exporter) (rate({metric}{{{q.RUN}}}{q.RATE}))",
                legend="{{exporter}}",
            ),
        ),
        unit=unit,
        scale=ColourScale(low=0, high=0.1),
        width=8,
        empty=empty,
    )


_NOW = PanelRow(
    title="Now",
    panels=(
        _stat(
            "Agents",
            "Agents that answer, one per node.",
            f"count(trainermon_exposed_series{{{q.RUN}}})",
            thresholds=(),
            colour="text",
        ),
        _stat(
            "Lag",
            "Time from the end of a step to its evaluation by the rules, largest over nodes.",
            f"max(trainermon_journal_lag_seconds{{{q.RUN}}})",
            unit="s",
            decimals=2,
            thresholds=((0, q.GOOD), (5, q.WARN), (30, q.BAD)),
        ),
        _stat(
            "Since last commit",
            "Time since the store was last written, longest over nodes.",
            q.age(f"min(trainermon_last_commit_timestamp_seconds{{{q.RUN}}})"),
            unit="s",
            thresholds=((0, q.GOOD), (120, q.WARN), (600, q.BAD)),
            empty="Nothing committed yet",
        ),
        _stat(
            "Errors",
            "Faults inside the agents in the time shown, which were caught, logged and survived.",
            f"sum(increase(trainermon_errors_total{{{q.RUN}}}[$__range]))",
        ),
        _stat(
            "Detached ranks",
            "Ranks whose monitor met a fault and took itself out of training, which goes on.",
            f"sum(trainermon_detached_ranks_total{{{q.RUN}}})",
        ),
        _stat(
            "Records skipped",
            "Records that ranks did not write because the journal was too slow or full.",
            f"sum(trainermon_skipped_records_total{{{q.RUN}}})",
        ),
        _stat(
            "Files lost",
            "Journal files that the spool's budget removed before the agent had read them.",
            f"sum(trainermon_lost_files_total{{{q.RUN}}})",
        ),
        _stat(
            "Does not add up",
            "Steps in the time shown on which what the ranks report did not add up: the monitor itself is wrong there.",
            f"sum(increase(trainermon_integrity_mismatches_total{{{q.RUN}}}[$__range]))",
        ),
    ),
)

_AGENTS = PanelRow(
    title="Agents, by node",
    panels=(
        _by_node(
            "Lag",
            "Time from the end of a step to its evaluation by the rules, newest record.",
            f"trainermon_journal_lag_seconds{{{q.RUN}}}",
            "s",
        ),
        _by_node(
            "Since last commit",
            "Time since the store was last written.",
            q.age(f"trainermon_last_commit_timestamp_seconds{{{q.RUN}}}"),
            "s",
        ),
        _by_node(
            "Time to render /metrics",
            "Time that collecting and rendering the previous exposition took; Prometheus gives up after its timeout, "
            "usually 10 s.",
            f"trainermon_collection_duration_seconds{{{q.RUN}}}",
            "s",
        ),
        _by_node(
            "CPU",
            "CPU time of the agent: 100 % is one core.",
            f"rate(trainermon_agent_cpu_seconds_total{{{q.RUN}}}{q.RATE})",
            "percentunit",
        ),
        _by_node(
            "Memory",
            "Resident memory of the agent.",
            f"trainermon_agent_resident_memory_bytes{{{q.RUN}}}",
            "bytes",
        ),
        Panel(
            title="Series",
            text="Series in the exposition of all nodes; those of ranks that are shown merged into a parent module to "
            "stay within the budget, and those that are not shown at all. The store keeps all of them.",
            view=PanelView.LINES,
            prometheus=tuple(
                PanelQuery(text=f"sum({metric}{{{q.RUN}}})", legend=legend, colour=colour)
                for metric, legend, colour in (
                    ("trainermon_exposed_series", "shown", "green"),
                    ("trainermon_rolled_up_series", "merged", q.NEUTRAL),
                    ("trainermon_left_out_series", "left out", q.WARN),
                )
            ),
            scale=ColourScale(low=0),
            width=8,
            empty=_NO_AGENT,
        ),
    ),
)

_LOSSES = PanelRow(
    title="What was lost or refused",
    panels=(
        Panel(
            title="Records and files lost",
            text="Records that ranks did not write, journal files that were removed unread, rows that could not be "
            "stored, segments that are damaged. Must be 0.",
            view=PanelView.LINES,
            prometheus=(
                PanelQuery(
                    text=f"sum(trainermon_skipped_records_total{{{q.RUN}}})",
                    legend="records skipped",
                    colour=q.WARN,
                ),
                PanelQuery(text=f"sum(trainermon_lost_files_total{{{q.RUN}}})", legend="files lost", colour=q.BAD),
                PanelQuery(
                    text=f"sum(trainermon_refused_rows_total{{{q.RUN}}})", legend="rows set aside", colour="purple"
                ),
                PanelQuery(
                    text=f"sum(trainermon_damaged_segments{{{q.RUN}}})", legend="segments set aside", colour="orange"
                ),
            ),
            decimals=0,
            scale=ColourScale(low=0, high=1),
            width=8,
            empty=_NO_AGENT,
        ),
        Panel(
            title="Faults",
            text="Faults inside agents, edits of the configuration that were refused, steps that did not add up.",
            view=PanelView.LINES,
            prometheus=tuple(
                PanelQuery(text=f"sum({metric}{{{q.RUN}}})", legend=legend, colour=colour)
                for metric, legend, colour in (
                    ("trainermon_errors_total", "errors", q.BAD),
                    ("trainermon_refused_configurations_total", "configurations refused", q.WARN),
                    ("trainermon_integrity_mismatches_total", "steps that do not add up", "purple"),
                )
            ),
            decimals=0,
            scale=ColourScale(low=0, high=1),
            width=8,
            empty=_NO_AGENT,
        ),
        Panel(
            title="Checks",
            text="Steps per second on which it was checked whether what the ranks report adds up, and whether replicas "
            "have the same checksums.",
            view=PanelView.LINES,
            prometheus=tuple(
                PanelQuery(text=f"sum(rate({metric}{{{q.RUN}}}{q.RATE}))", legend=legend, colour=colour)
                for metric, legend, colour in (
                    ("trainermon_integrity_checks_total", "sums", q.NEUTRAL),
                    ("trainermon_checksum_comparisons_total", "checksums", "green"),
                )
            ),
            unit="ops",
            scale=ColourScale(low=0),
            width=8,
            empty=_NO_AGENT,
        ),
    ),
)

_EXPORTERS = PanelRow(
    title="Exporters",
    panels=(
        _by_exporter(
            "Steps taken per second",
            "Steps of ranks that an exporter has taken.",
            "trainermon_exported_steps_total",
            unit="ops",
        ),
        _by_exporter(
            "Steps dropped per second",
            "Steps of ranks that an exporter failed at and left out. Must be 0.",
            "trainermon_export_dropped_steps_total",
            unit="ops",
        ),
        _by_exporter(
            "Calls that failed per second",
            "Calls of an exporter that failed.",
            "trainermon_export_errors_total",
            unit="ops",
        ),
        _by_exporter(
            "Busy",
            "Share of the time that an exporter has worked or waited for its server; at 100 % of a node it is too "
            "slow.",
            "trainermon_export_busy_seconds_total",
            unit="percentunit",
        ),
        _by_exporter(
            "Points taken per second",
            "Points that the server has taken.",
            "trainermon_exported_points_total",
            unit="ops",
            empty=_NOT_DURABLE,
        ),
        Panel(
            title="Waiting for the server",
            text="Size of the committed segments that the server does not have yet. Grows while it is away, and falls "
            "again afterwards: nothing is lost.",
            view=PanelView.LINES,
            prometheus=(
                PanelQuery(
                    text=f"sum by (exporter) (trainermon_export_waiting_bytes{{{q.RUN}}})",
                    legend="{{exporter}}",
                ),
            ),
            unit="bytes",
            scale=ColourScale(low=0),
            width=8,
            empty=_NOT_DURABLE,
        ),
        Panel(
            title="Points refused, values left out, requests repeated",
            text="Points that the server refused for good (they are in the dead-letter file), values that it cannot "
            "hold because they are not finite, and requests that were sent again.",
            view=PanelView.LINES,
            prometheus=tuple(
                PanelQuery(text=f"sum(rate({metric}{{{q.RUN}}}{q.RATE}))", legend=legend, colour=colour)
                for metric, legend, colour in (
                    ("trainermon_export_rejected_points_total", "refused", q.BAD),
                    ("trainermon_export_nonfinite_values_total", "not finite", "purple"),
                    ("trainermon_export_retries_total", "repeated", q.WARN),
                )
            ),
            unit="ops",
            scale=ColourScale(low=0, high=1),
            empty=_NOT_DURABLE,
        ),
        Panel(
            title="Since the server last accepted",
            text="Time since the last request that the server has accepted, longest over nodes.",
            view=PanelView.LINES,
            prometheus=(
                PanelQuery(
                    text=q.age(f"min by (exporter) (trainermon_export_last_success_timestamp_seconds{{{q.RUN}}})"),
                    legend="{{exporter}}",
                ),
            ),
            unit="s",
            scale=ColourScale(low=0),
            empty=_NOT_DURABLE,
        ),
    ),
)

BOARD = Board(
    name="monitor",
    title="The monitor itself",
    text="Is what the other dashboards show complete, recent and cheap.",
    rows=(_NOW, _AGENTS, _LOSSES, _EXPORTERS),
)
