"""Ranks: who is slow, who is stuck, who trains apart from the others."""

from __future__ import annotations

from typing import Any

from trainermon.dashboards.grafana import queries as q
from trainermon.dashboards.grafana.panels import Board, ColourScale, Panel, PanelQuery, PanelRow, PanelView, TableColumn

_VERDICT = (("0", "no", "transparent"), ("1", "yes", q.BAD))
_NOT_WATCHED = "The agent has no verdict yet"


def _by_rank(metric: str) -> str:
    return f"max by (rank) ({metric}{{{q.RANK}}})"


def _influx_by_rank(field: str) -> PanelQuery:
    return PanelQuery(text=q.influx(f'mean("{field}")', "trainermon_step", by="rank"), legend="rank $tag_rank")


def _spread(metric: str) -> str:
    chosen = f"{metric}{{{q.RUN}}}"
    return f"max({chosen}) - min({chosen})"


def _influx_spread(field: str) -> str:
    of_ranks = q.influx(f'max("{field}") AS "x"', "trainermon_step", by="rank", of_rank=False)
    return f'SELECT spread("x") FROM ({of_ranks}) WHERE $timeFilter GROUP BY time($__interval) fill(none)'


_TABLE = PanelRow(
    title="Now",
    panels=(
        Panel(
            title="Ranks",
            text="One row per rank; click a rank for its layers. Slowness is the time that a rank works per step, "
            "waiting for others left out, over the median of its peers.",
            view=PanelView.TABLE,
            prometheus=(
                PanelQuery(text=f"max by (rank, pp, tp, dp) (trainermon_rank_info{{{q.RANK}}})", column="info"),
                PanelQuery(text=_by_rank("trainermon_step"), column="step"),
                PanelQuery(
                    text=f"round({q.age(_by_rank('trainermon_last_step_timestamp_seconds'))})", column="since last step"
                ),
                PanelQuery(
                    text=f"round({q.age(_by_rank('trainermon_last_heartbeat_timestamp_seconds'))})",
                    column="since heartbeat",
                ),
                PanelQuery(text=_by_rank("trainermon_rank_slowness_ratio"), column="slowness"),
                PanelQuery(text=_by_rank("trainermon_rank_straggling"), column="straggling"),
                PanelQuery(text=_by_rank("trainermon_rank_hung"), column="hung"),
                PanelQuery(text=_by_rank("trainermon_loss"), column="loss"),
                PanelQuery(text=_by_rank("trainermon_gradient_norm"), column="gradient norm"),
                PanelQuery(
                    text=f"round(sum by (rank) (increase(trainermon_nonfinite_elements_total{{{q.RANK}}}[$__range])))",
                    column="non-finite",
                ),
            ),
            influxdb=(
                PanelQuery(
                    text='SELECT last("step") AS "step", last("loss") AS "loss", last("gradient_norm") AS '
                    '"gradient norm", last("duration_seconds") AS "step time", last("tokens_per_second") AS "tokens/s" '
                    'FROM "trainermon_step" WHERE "run" =~ /^$run$/ AND "rank" =~ /^$rank$/ AND $timeFilter '
                    'GROUP BY "rank"',
                ),
            ),
            columns=(
                TableColumn(name="rank", unit="none", link="layers", width=80),
                TableColumn(name="pp", width=60),
                TableColumn(name="tp", width=60),
                TableColumn(name="dp", width=60),
                TableColumn(name="info", hidden=True),
                TableColumn(name="step", unit="locale"),
                TableColumn(
                    name="since last step", unit="s", thresholds=((0, "transparent"), (120, q.WARN), (600, q.BAD))
                ),
                TableColumn(
                    name="since heartbeat", unit="s", thresholds=((0, "transparent"), (120, q.WARN), (600, q.BAD))
                ),
                TableColumn(name="step time", unit="s"),
                TableColumn(name="tokens/s", unit="short"),
                TableColumn(
                    name="slowness", unit="none", thresholds=((0, "transparent"), (1.15, q.WARN), (1.3, q.BAD))
                ),
                TableColumn(name="straggling", texts=_VERDICT),
                TableColumn(name="hung", texts=_VERDICT),
                TableColumn(name="loss", unit="short"),
                TableColumn(name="gradient norm", unit="short"),
                TableColumn(name="non-finite", unit="locale", thresholds=((0, "transparent"), (1, q.BAD))),
            ),
            width=24,
            height=10,
            empty="No rank yet",
        ),
    ),
)

_TIME = PanelRow(
    title="Time",
    panels=(
        Panel(
            title="Step time, by rank",
            text="Mean duration of a step. Ranks that wait for one another take equally long: who is slow is shown by "
            "slowness. Jobs of more than 64 ranks have one line per node.",
            view=PanelView.LINES,
            prometheus=(PanelQuery(text=q.mean_duration(q.RUN, "rank, instance"), legend="rank {{rank}}"),),
            influxdb=(_influx_by_rank("duration_seconds"),),
            unit="s",
            link="layers",
            empty="No step yet",
        ),
        Panel(
            title="Slowness, by rank",
            text="Time that a rank works per step, waiting for others left out, over the median of its peers. 1 is "
            "usual, from 1.3 on a rank is a straggler.",
            view=PanelView.HEAT,
            prometheus=(PanelQuery(text=_by_rank("trainermon_rank_slowness_ratio"), legend="rank {{rank}}"),),
            decimals=2,
            scale=ColourScale(scheme="RdBu", low=0.5, high=1.5),
            link="layers",
            empty=_NOT_WATCHED,
        ),
        Panel(
            title="Steps between the first and the last rank",
            text="How far ranks are apart. Some steps are usual with pipelines and because ranks report on their "
            "own; if it grows, a rank is stuck.",
            view=PanelView.LINES,
            prometheus=(PanelQuery(text=_spread("trainermon_step"), legend="steps", colour=q.NEUTRAL),),
            influxdb=(PanelQuery(text=_influx_spread("step"), legend="steps", colour=q.NEUTRAL),),
            decimals=0,
            scale=ColourScale(low=0, high=1),
            width=8,
            empty="No step yet",
        ),
        Panel(
            title="Since heartbeat, by rank",
            text="Time since the agent last saw a rank move, by the agent's clock.",
            view=PanelView.LINES,
            prometheus=(
                PanelQuery(text=q.age(_by_rank("trainermon_last_heartbeat_timestamp_seconds")), legend="rank {{rank}}"),
            ),
            unit="s",
            scale=ColourScale(low=0),
            width=8,
            empty=_NOT_WATCHED,
        ),
        Panel(
            title="Lost and detached ranks",
            text="Lost: the process ended without closing its journal, so it crashed or was killed. Detached: the "
            "monitor met a fault of its own and took itself out; training goes on.",
            view=PanelView.LINES,
            prometheus=(
                PanelQuery(text=f"sum(trainermon_lost_ranks_total{{{q.RUN}}})", legend="lost", colour=q.BAD),
                PanelQuery(text=f"sum(trainermon_detached_ranks_total{{{q.RUN}}})", legend="detached", colour=q.WARN),
            ),
            decimals=0,
            scale=ColourScale(low=0, high=1),
            width=8,
            empty="No agent answers",
        ),
    ),
)

_APART = PanelRow(
    title="Divergence",
    panels=(
        Panel(
            title="Loss, by rank",
            text="Ranks have different data, so lines differ; one that leaves the others is worth a look.",
            view=PanelView.LINES,
            prometheus=(PanelQuery(text=_by_rank("trainermon_loss"), legend="rank {{rank}}"),),
            influxdb=(_influx_by_rank("loss"),),
            link="layers",
            empty="No loss recorded",
        ),
        Panel(
            title="Gradient norm, by rank",
            text="L2 norm of the reduced gradients that a rank holds, before clipping. Of replicas they are the same.",
            view=PanelView.LINES,
            prometheus=(PanelQuery(text=_by_rank("trainermon_gradient_norm"), legend="rank {{rank}}"),),
            influxdb=(_influx_by_rank("gradient_norm"),),
            scale=ColourScale(log=10),
            link="layers",
            empty="No gradients collected: wg_distribution is off",
        ),
        Panel(
            title="Disagreement on what must be equal",
            text="Largest less smallest over ranks, relative to the largest: the norm of all gradients and the loss "
            "scale must be the same everywhere. Anything but 0 means that ranks train apart.",
            view=PanelView.LINES,
            prometheus=tuple(
                PanelQuery(
                    text=f"({_spread(metric)}) / max({metric}{{{q.RUN}}})",
                    legend=legend,
                    colour=colour,
                )
                for metric, legend, colour in (
                    ("trainermon_global_gradient_norm", "norm of all gradients", q.GRADIENT_COLOUR),
                    ("trainermon_loss_scale", "loss scale", "purple"),
                )
            ),
            unit="percentunit",
            scale=ColourScale(low=0, high=0.01),
            width=8,
            empty="The framework tells neither",
        ),
        Panel(
            title="Replicas that differ, by rank",
            text="Parameters of a rank whose checksum was not that of its replicas. Must be 0.",
            view=PanelView.BARS,
            prometheus=(
                PanelQuery(
                    text=f"sum by (rank) (increase(trainermon_checksum_mismatches_total{{{q.RANK}}}{q.RATE}))",
                    legend="rank {{rank}}",
                ),
            ),
            decimals=0,
            scale=ColourScale(low=0, high=1),
            width=8,
            empty="No replicas compared",
        ),
        Panel(
            title="Non-finite elements, by rank",
            text="NaN and infinite elements in tensors of any kind. A reduction carries them to every rank: the "
            "first one counts.",
            view=PanelView.HEAT,
            prometheus=(
                PanelQuery(
                    text=f"sum by (rank) (increase(trainermon_nonfinite_elements_total{{{q.RANK}}}{q.RATE}))",
                    legend="rank {{rank}}",
                ),
            ),
            influxdb=(
                PanelQuery(
                    text=q.influx('sum("value")', "trainermon_nonfinite_elements", by="rank"), legend="rank $tag_rank"
                ),
            ),
            decimals=0,
            scale=ColourScale(scheme="Reds", low=0),
            width=8,
            link="layers",
            empty="Nothing collected yet",
        ),
    ),
)


def _of_accelerator(title: str, text: str, metric: str, field: str, **shown: Any) -> Panel:
    """Return a panel of what the driver says of each rank's accelerator; `field` is its name in InfluxDB."""
    return Panel(
        title=title,
        text=text,
        view=PanelView.LINES,
        prometheus=(PanelQuery(text=_by_rank(f"trainermon_accelerator_{metric}"), legend="rank {{rank}}"),),
        influxdb=(
            PanelQuery(text=q.influx(f'mean("{field}")', "trainermon_accelerator", by="rank"), legend="rank $tag_rank"),
        ),
        width=8,
        empty="The agent cannot read the accelerators",
        **shown,
    )


_ACCELERATORS = PanelRow(
    title="Accelerators",
    panels=(
        _of_accelerator(
            "Utilisation, by rank",
            "Share of time in which the accelerator computed at all. One that waits in a collective counts as busy: "
            "power tells more.",
            "utilization_ratio",
            "utilization",
            unit="percentunit",
            scale=ColourScale(low=0, high=1),
        ),
        _of_accelerator(
            "Power, by rank",
            "What the accelerator draws. A rank that waits for others draws less than they do.",
            "power_watts",
            "power_watts",
            unit="watt",
            scale=ColourScale(low=0),
        ),
        _of_accelerator(
            "Memory in use, by rank",
            "By all processes, with what torch's allocator keeps for later.",
            "memory_used_bytes",
            "memory_bytes",
            unit="bytes",
            scale=ColourScale(low=0),
        ),
        _of_accelerator(
            "Temperature, by rank", "Of the chip.", "temperature_celsius", "temperature_celsius", unit="celsius"
        ),
        _of_accelerator("Clock, by rank", "Of the cores.", "clock_hertz", "clock_hertz", unit="hertz"),
        Panel(
            title="Faults, by rank",
            text="Slowed down: 1 while heat or the power supply lowers the clock; its own power limit does not count. "
            "Xid: number of the newest error that NVIDIA's driver reported. Memory errors: those that could "
            "not be corrected.",
            view=PanelView.LINES,
            prometheus=tuple(
                PanelQuery(text=_by_rank(f"trainermon_accelerator_{metric}"), legend=f"rank {{{{rank}}}} {legend}")
                for metric, legend in (
                    ("throttled", "slowed down"),
                    ("xid", "Xid"),
                    ("uncorrected_errors", "memory errors"),
                )
            ),
            influxdb=(
                PanelQuery(
                    text=q.influx('max("throttled")', "trainermon_accelerator", by="rank"),
                    legend="rank $tag_rank slowed down",
                ),
            ),
            decimals=0,
            scale=ColourScale(low=0, high=1),
            width=8,
            empty="The agent cannot read the accelerators",
        ),
    ),
)

BOARD = Board(
    name="ranks",
    title="Ranks",
    text="Who is slow, who is stuck, who trains apart from the others.",
    rows=(_TABLE, _TIME, _ACCELERATORS, _APART),
    picks=("stage", "rank"),
)
