"""Collectives: who waits for whom, for how long, and who has not come."""

from __future__ import annotations

from trainermon.dashboards.grafana import queries as q
from trainermon.dashboards.grafana.panels import Board, ColourScale, Panel, PanelQuery, PanelRow, PanelView

_MEASUREMENT = "trainermon_collective"
_BACKEND = "The backend numbers no collectives"
_WATCHED = "Not watched: turn on cc_distribution"
_WAIT = "trainermon_collective_wait_duration_seconds"


def _rate(metric: str, by: str) -> str:
    return f"sum by ({by}) (rate({metric}{{{q.RANK}}}{q.RATE}))"


_PROGRESS = PanelRow(
    title="Progress",
    panels=(
        Panel(
            title="Collectives begun per second",
            text="Of each kind of process group, on its fastest rank.",
            view=PanelView.LINES,
            prometheus=(
                PanelQuery(
                    text=f"max by (purpose) (rate(trainermon_collectives_total{{{q.RANK}}}{q.RATE}))",
                    legend="{{purpose}}",
                ),
            ),
            influxdb=(
                PanelQuery(
                    text='SELECT non_negative_derivative(max("x"), 1s) FROM ('
                    + q.influx('max("collectives") AS "x"', _MEASUREMENT, by="purpose")
                    + ') WHERE $timeFilter GROUP BY time($__interval), "purpose" fill(none)',
                    legend="$tag_purpose",
                ),
            ),
            unit="ops",
            width=8,
            empty=_BACKEND,
        ),
        Panel(
            title="Collectives behind the leader, by rank",
            text="How many collectives a rank has begun less than the one of its process groups that has begun most. "
            "In a hang the rank with the largest number has not entered the collective that the others wait in.",
            view=PanelView.LINES,
            prometheus=(
                PanelQuery(
                    text="max by (rank) (max by (run, purpose) (trainermon_collectives_total"
                    f"{{{q.RUN}}}) - on (run, purpose) group_right () trainermon_collectives_total{{{q.RANK}}})",
                    legend="rank {{rank}}",
                ),
            ),
            decimals=0,
            scale=ColourScale(low=0, high=1),
            width=8,
            link="ranks",
            empty=_BACKEND,
        ),
        Panel(
            title="In flight at the end of a step",
            text="Collectives that are not known complete at the end of the last collected step, largest over ranks.",
            view=PanelView.LINES,
            prometheus=(
                PanelQuery(
                    text=f"max by (purpose) (trainermon_collectives_in_flight{{{q.RANK}}})", legend="{{purpose}}"
                ),
            ),
            influxdb=(
                PanelQuery(text=q.influx('max("in_flight")', _MEASUREMENT, by="purpose"), legend="$tag_purpose"),
            ),
            decimals=0,
            scale=ColourScale(low=0),
            width=8,
            empty=_BACKEND,
        ),
    ),
)

_WAITING = PanelRow(
    title="Waiting",
    panels=(
        Panel(
            title="Time to wait for a collective",
            text="How long the host waited for one watched collective, over all ranks. Darker: more of them.",
            view=PanelView.BUCKETS,
            prometheus=(
                PanelQuery(text=f"sum by (le) (increase({_WAIT}_bucket{{{q.RUN}}}{q.RATE}))", legend="{{le}}"),
            ),
            unit="s",
            scale=ColourScale(scheme="Blues"),
            height=9,
            empty=_WATCHED,
        ),
        Panel(
            title="Time to wait for a collective, p50 and p99",
            text="Quantiles of the time that the host waited for one watched collective, by kind of process group.",
            view=PanelView.LINES,
            prometheus=tuple(
                PanelQuery(text=q.quantile(share, _WAIT, by="purpose"), legend=f"{{{{purpose}}}} {name}")
                for share, name in ((0.5, "p50"), (0.99, "p99"))
            ),
            unit="s",
            scale=ColourScale(log=10),
            height=9,
            empty=_WATCHED,
        ),
        Panel(
            title="Share of time spent waiting, by rank",
            text="Seconds waited for watched collectives per second, on collected steps. The rank that waits least "
            "is the one that the others wait for.",
            view=PanelView.HEAT,
            prometheus=(
                PanelQuery(text=_rate("trainermon_collective_wait_seconds_total", "rank"), legend="rank {{rank}}"),
            ),
            unit="percentunit",
            decimals=0,
            scale=ColourScale(scheme="Oranges", low=0),
            link="ranks",
            empty=_WATCHED,
        ),
        Panel(
            title="Time waited per step, by rank",
            text="Seconds waited for watched collectives in a collected step.",
            view=PanelView.LINES,
            influxdb=(
                PanelQuery(
                    text='SELECT sum("x") FROM ('
                    + q.influx('mean("wait_seconds") AS "x"', _MEASUREMENT, by="rank,purpose")
                    + ') WHERE $timeFilter GROUP BY time($__interval), "rank" fill(none)',
                    legend="rank $tag_rank",
                ),
            ),
            unit="s",
            link="ranks",
            empty=_WATCHED,
        ),
        Panel(
            title="Bytes per second",
            text="Size of watched collectives on collected steps, over all ranks, by kind of process group.",
            view=PanelView.LINES,
            prometheus=(PanelQuery(text=_rate("trainermon_collective_bytes_total", "purpose"), legend="{{purpose}}"),),
            unit="Bps",
            empty=_WATCHED,
        ),
        Panel(
            title="Bytes per step",
            text="Size of watched collectives in a collected step of a rank, mean over ranks, by kind of process "
            "group.",
            view=PanelView.LINES,
            influxdb=(PanelQuery(text=q.influx('mean("bytes")', _MEASUREMENT, by="purpose"), legend="$tag_purpose"),),
            unit="bytes",
            empty=_WATCHED,
        ),
    ),
)

_OPERANDS = PanelRow(
    title="Operands",
    panels=(
        *(
            Panel(
                title=title,
                text="Root mean square of the operands, by purpose and operation, over ranks.",
                view=PanelView.LINES,
                prometheus=(
                    PanelQuery(
                        text=f'sqrt(avg by (module) (trainermon_collective_operand_rms{{{q.RANK},side="{side}"}} ^ 2))',
                        legend="{{module}}",
                    ),
                ),
                influxdb=(
                    PanelQuery(
                        text=q.influx('mean("rms")', "trainermon_comm", by="module", where=f"\"side\" = '{side}'"),
                        legend="$tag_module",
                    ),
                ),
                unit="sci",
                scale=ColourScale(log=10),
                width=8,
                empty=empty,
            )
            for title, side, empty in (
                ("Operands after the call", "post", _WATCHED),
                ("Operands before the call", "pre", "Not watched: turn on cc_distribution.cc_pre_hook"),
            )
        ),
        Panel(
            title="Collectives that escape",
            text="Begun, but not by calls that are watched; and watched, but not waited for by the end of the step. "
            "Per second over all ranks; with InfluxDB per step of a rank.",
            view=PanelView.LINES,
            prometheus=(
                PanelQuery(
                    text=f"sum(rate(trainermon_unseen_collectives_total{{{q.RANK}}}{q.RATE}))",
                    legend="not watched",
                    colour=q.WARN,
                ),
                PanelQuery(
                    text=f"sum(rate(trainermon_unfinished_collectives_total{{{q.RANK}}}{q.RATE}))",
                    legend="not waited for",
                    colour=q.NEUTRAL,
                ),
            ),
            influxdb=(
                PanelQuery(text=q.influx('mean("unseen")', _MEASUREMENT), legend="not watched", colour=q.WARN),
                PanelQuery(
                    text=q.influx('mean("unfinished")', _MEASUREMENT), legend="not waited for", colour=q.NEUTRAL
                ),
            ),
            unit="short",
            scale=ColourScale(low=0),
            width=8,
            empty=_WATCHED,
        ),
    ),
)

BOARD = Board(
    name="collectives",
    title="Collectives",
    text="Who waits for whom, for how long, and who has not come.",
    rows=(_PROGRESS, _WAITING, _OPERANDS),
    picks=("stage", "rank"),
)
