"""Alerts and escalations: what fires, since when, and what was done about it."""

from __future__ import annotations

from trainermon.dashboards.grafana import queries as q
from trainermon.dashboards.grafana.panels import Board, ColourScale, Panel, PanelQuery, PanelRow, PanelView, TableColumn

_SEVERITY = tuple((name, name, colour) for name, colour in q.SEVERITIES.items())
_NO_AGENT = "No agent answers"


def _count(title: str, metric: str, *, text: str, bad: str = "") -> Panel:
    return Panel(
        title=title,
        text=text,
        view=PanelView.STAT,
        prometheus=(PanelQuery(text=f"sum(increase({metric}{{{q.RUN}}}[$__range]))"),),
        decimals=0,
        thresholds=((0, q.GOOD), (0.5, bad)) if bad else (),
        colour=q.NEUTRAL,
        width=3,
        height=4,
        empty=_NO_AGENT,
    )


_NOW = PanelRow(
    title="Now",
    panels=(
        *(
            Panel(
                title=severity.capitalize(),
                text=f"Alerts of severity {severity} that are on, over all ranks.",
                view=PanelView.STAT,
                prometheus=(
                    PanelQuery(
                        text=f'sum(trainermon_alerts_firing{{{q.RUN},severity="{severity}"}})',
                    ),
                ),
                decimals=0,
                thresholds=((0, q.GOOD), (1, colour)),
                width=3,
                height=4,
                empty="No such rule",
            )
            for severity, colour in q.SEVERITIES.items()
        ),
        _count(
            "Escalations",
            "trainermon_escalations_total",
            text="Alerts in the time shown that were followed by an order to dump.",
        ),
        _count(
            "Suppressed",
            "trainermon_suppressed_escalations_total",
            text="Alerts in the time shown whose dump was kept from happening by quota or rate limit.",
            bad=q.WARN,
        ),
        _count(
            "Dumps",
            "trainermon_dumps_total",
            text="Dumps and replays that ranks finished in the time shown; `trainermon diagnose` explains them.",
        ),
        _count(
            "Dumps that failed",
            "trainermon_dump_failures_total",
            text="Dumps and replays in the time shown that were late, refused, over quota or failed.",
            bad=q.BAD,
        ),
        Panel(
            title="Alerts that are on",
            text="Rule, rank, and the step on which it began; an alert that is over stays for a minute. Click a rank "
            "for its layers. What a rule means and what to do stands in the runbook.",
            view=PanelView.TABLE,
            prometheus=(
                PanelQuery(
                    text=f"max by (severity, rule, rank) (trainermon_alert_first_step{{{q.RUN}}})",
                    column="since step",
                ),
            ),
            columns=(
                TableColumn(name="severity", texts=_SEVERITY, width=120),
                TableColumn(name="rule"),
                TableColumn(name="rank", unit="none", link="layers", width=100),
                TableColumn(name="since step", unit="locale", width=140),
            ),
            height=9,
            empty="No alert is on",
        ),
        Panel(
            title="Alerts, by rule",
            text="How many alerts of each rule have begun in the run: the ten rules with most of them.",
            view=PanelView.RANKING,
            prometheus=(
                PanelQuery(
                    text=f"sort_desc(topk(10, sum by (rule) (trainermon_alerts_total{{{q.RUN}}}) > 0))",
                    legend="{{rule}}",
                ),
            ),
            decimals=0,
            thresholds=((0, q.WARN),),
            height=9,
            empty="No alert in this run",
        ),
    ),
)

_TIME = PanelRow(
    title="Over time",
    panels=(
        Panel(
            title="Alerts firing, by rule",
            text="From when to when a rule was on, and on how many ranks.",
            view=PanelView.HEAT,
            prometheus=(
                PanelQuery(text=f"sum by (rule) (trainermon_alerts_firing{{{q.RUN}}}) > 0", legend="{{rule}}"),
            ),
            decimals=0,
            scale=ColourScale(scheme="YlOrRd", low=0),
            width=24,
            height=9,
            empty="No alert was on",
        ),
        Panel(
            title="Alerts begun, by severity",
            text="Alerts that began to fire.",
            view=PanelView.BARS,
            prometheus=tuple(
                PanelQuery(
                    text=f'sum(increase(trainermon_alerts_total{{{q.RUN},severity="{severity}"}}{q.RATE})) > 0',
                    legend=severity,
                    colour=colour,
                )
                for severity, colour in q.SEVERITIES.items()
            ),
            decimals=0,
            empty="No alert began",
        ),
        Panel(
            title="Escalations and dumps",
            text="Alerts that were followed by an order to dump, or were not for the sake of quota or rate limit; and "
            "dumps and replays that ranks finished, in all and without success.",
            view=PanelView.BARS,
            prometheus=tuple(
                PanelQuery(text=f"sum(increase({metric}{{{q.RUN}}}{q.RATE})) > 0", legend=legend, colour=colour)
                for metric, legend, colour in (
                    ("trainermon_escalations_total", "escalations", q.NEUTRAL),
                    ("trainermon_suppressed_escalations_total", "suppressed", q.WARN),
                    ("trainermon_dumps_total", "dumps", "green"),
                    ("trainermon_dump_failures_total", "failed dumps", q.BAD),
                )
            ),
            decimals=0,
            empty="Nothing was escalated",
        ),
    ),
)

BOARD = Board(
    name="alerts",
    title="Alerts and escalations",
    text="What fires, since when, and what was done about it.",
    rows=(_NOW, _TIME),
)
