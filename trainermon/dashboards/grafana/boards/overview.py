"""Job overview: is this training healthy, and if not, where to look."""

from __future__ import annotations

import dataclasses

from trainermon.dashboards.grafana import queries as q
from trainermon.dashboards.grafana.boards.optimizer import LEARNING_RATE
from trainermon.dashboards.grafana.panels import Board, ColourScale, Panel, PanelQuery, PanelRow, PanelView

_OF_RANKS = q.mean_duration(q.RUN, "rank")


def _influx(how: str, field: str, legend: str, colour: str, *, band_to: str = "") -> PanelQuery:
    text = q.influx(f'{how}("{field}")', "trainermon_step", of_rank=False)
    return PanelQuery(text=text, legend=legend, colour=colour, band_to=band_to)


def _rollouts(title: str, text: str, *, names: str, scale: ColourScale) -> Panel:
    """Return a panel of the numbers on rollouts whose names match the regular expression `names`."""
    return Panel(
        title=title,
        text=text,
        view=PanelView.LINES,
        prometheus=(
            PanelQuery(
                text=f'avg by (name) (trainermon_rollout_value{{{q.RUN},name=~"{names}"}})',
                legend="{{name}}",
            ),
        ),
        influxdb=(
            PanelQuery(
                text=q.influx(
                    'mean("value")',
                    "trainermon_rollout_value",
                    by="name",
                    where=f'"name" =~ /^{names}$/',
                    of_rank=False,
                ),
                legend="$tag_name",
            ),
        ),
        scale=scale,
        width=12,
        height=7,
        empty="No rollouts recorded: trainermon.rl records them in reinforcement learning",
    )


_NOW = PanelRow(
    title="Now",
    panels=(
        Panel(
            title="Alerts firing",
            text="Alerts that the agents' rules hold to be on, over all ranks. Click for the list.",
            view=PanelView.STAT,
            prometheus=(PanelQuery(text=f"sum(trainermon_alerts_firing{{{q.RUN}}})"),),
            decimals=0,
            thresholds=((0, q.GOOD), (1, q.BAD)),
            width=3,
            height=4,
            link="alerts",
            empty="No agent answers",
        ),
        Panel(
            title="Ranks missing",
            text="Ranks that the job has, less those that report. Above 0 at the start of a job, until every rank has "
            "made its first step; later a rank, an agent or a node is gone.",
            view=PanelView.STAT,
            prometheus=(PanelQuery(text=f"max(trainermon_world_size{{{q.RUN}}}) - sum(trainermon_ranks{{{q.RUN}}})"),),
            decimals=0,
            thresholds=((0, q.GOOD), (1, q.BAD)),
            width=3,
            height=4,
            link="ranks",
            empty="No rank yet",
        ),
        Panel(
            title="Ranks hung",
            text="Ranks that the agents hold to make no progress.",
            view=PanelView.STAT,
            prometheus=(PanelQuery(text=f"sum(trainermon_rank_hung{{{q.RUN}}})"),),
            decimals=0,
            thresholds=((0, q.GOOD), (1, q.BAD)),
            width=3,
            height=4,
            link="ranks",
            empty="Not watched",
        ),
        Panel(
            title="Since last step",
            text="Time since the newest step that any rank has reported.",
            view=PanelView.STAT,
            prometheus=(PanelQuery(text=q.age(f"max(trainermon_last_step_timestamp_seconds{{{q.RUN}}})")),),
            unit="s",
            decimals=0,
            thresholds=((0, q.GOOD), (120, q.WARN), (600, q.BAD)),
            width=3,
            height=4,
            empty="No step yet",
        ),
        Panel(
            title="Step",
            text="Newest step of any rank.",
            view=PanelView.STAT,
            prometheus=(PanelQuery(text=f"max(trainermon_step{{{q.RUN}}})"),),
            influxdb=(PanelQuery(text=q.influx('max("step")', "trainermon_step", of_rank=False)),),
            unit="locale",
            decimals=0,
            colour="text",
            width=3,
            height=4,
            empty="No step yet",
        ),
        Panel(
            title="Loss",
            text="Training loss of the newest step, mean over the ranks that report one.",
            view=PanelView.STAT,
            prometheus=(PanelQuery(text=f"avg(trainermon_loss{{{q.RUN}}})"),),
            influxdb=(PanelQuery(text=q.influx('mean("loss")', "trainermon_step", of_rank=False)),),
            decimals=3,
            colour=q.LOSS_COLOUR,
            width=3,
            height=4,
            empty="Not recorded",
        ),
        Panel(
            title="Step time",
            text="Mean duration of a step over all ranks.",
            view=PanelView.STAT,
            prometheus=(PanelQuery(text=q.mean_duration(q.RUN)),),
            influxdb=(PanelQuery(text=q.influx('mean("duration_seconds")', "trainermon_step", of_rank=False)),),
            unit="s",
            decimals=3,
            colour="light-blue",
            width=3,
            height=4,
            empty="No step yet",
        ),
        Panel(
            title="Tokens per second",
            text="Tokens per second over the whole job, as the script records them.",
            view=PanelView.STAT,
            prometheus=(PanelQuery(text=f"sum(trainermon_tokens_per_second{{{q.RUN}}})"),),
            influxdb=(PanelQuery(text=q.influx_total("tokens_per_second", "trainermon_step")),),
            decimals=1,
            colour="green",
            width=3,
            height=4,
            empty="No tokens recorded",
        ),
    ),
)

_TRAINING = PanelRow(
    title="Training",
    panels=(
        Panel(
            title="Loss",
            text="Training loss: mean, smallest and largest over ranks. Where the loss is not finite there is no line; "
            "the panel on non-finite elements shows that instead.",
            view=PanelView.LINES,
            prometheus=(
                PanelQuery(
                    text=f"max(trainermon_loss{{{q.RUN}}})",
                    legend="largest rank",
                    colour="light-blue",
                    band_to="smallest rank",
                ),
                PanelQuery(text=f"min(trainermon_loss{{{q.RUN}}})", legend="smallest rank", colour="super-light-blue"),
                PanelQuery(text=f"avg(trainermon_loss{{{q.RUN}}})", legend="mean", colour=q.LOSS_COLOUR),
            ),
            influxdb=(
                _influx("max", "loss", "largest rank", "light-blue", band_to="smallest rank"),
                _influx("min", "loss", "smallest rank", "super-light-blue"),
                _influx("mean", "loss", "mean", q.LOSS_COLOUR),
            ),
            height=9,
            empty="No loss recorded: the training script has to hand it to the monitor",
        ),
        Panel(
            title="Gradient norm",
            text="L2 norm of all gradients before clipping: as the framework returned it, and as the gradients that "
            "were collected add up to. They agree if all gradients are collected and the loss is not scaled.",
            view=PanelView.LINES,
            prometheus=(
                PanelQuery(
                    text=f"max(trainermon_global_gradient_norm{{{q.RUN}}})",
                    legend="of the framework",
                    colour=q.GRADIENT_COLOUR,
                ),
                PanelQuery(
                    text=f"sqrt(sum(trainermon_gradient_norm_part{{{q.RUN}}} ^ 2))",
                    legend="of collected gradients",
                    colour="light-yellow",
                ),
            ),
            influxdb=(
                PanelQuery(
                    text=q.influx('max("global_gradient_norm")', "trainermon_step", of_rank=False),
                    legend="of the framework",
                    colour=q.GRADIENT_COLOUR,
                ),
                PanelQuery(
                    text=q.influx('max("gradient_norm")', "trainermon_step", of_rank=False),
                    legend="largest of a rank",
                    colour="light-yellow",
                ),
            ),
            scale=ColourScale(log=10),
            height=9,
            link="layers",
            empty="No gradients collected: wg_distribution is off",
        ),
        Panel(
            title="Step time",
            text="Duration of a step: mean over all ranks, and of the fastest and the slowest one.",
            view=PanelView.LINES,
            prometheus=(
                PanelQuery(text=f"max({_OF_RANKS})", legend="slowest", colour="light-blue", band_to="fastest"),
                PanelQuery(text=f"min({_OF_RANKS})", legend="fastest", colour="super-light-blue"),
                PanelQuery(text=q.mean_duration(q.RUN), legend="mean", colour="blue"),
            ),
            influxdb=(
                _influx("max", "duration_seconds", "slowest", "light-blue", band_to="fastest"),
                _influx("min", "duration_seconds", "fastest", "super-light-blue"),
                _influx("mean", "duration_seconds", "mean", "blue"),
            ),
            unit="s",
            width=8,
            link="ranks",
            empty="No step yet",
        ),
        Panel(
            title="Tokens per second",
            text="Tokens per second over the whole job.",
            view=PanelView.LINES,
            prometheus=(
                PanelQuery(
                    text=f"sum(rate(trainermon_tokens_total{{{q.RUN}}}{q.RATE}))", legend="tokens/s", colour="green"
                ),
            ),
            influxdb=(
                PanelQuery(
                    text=q.influx_total("tokens_per_second", "trainermon_step"), legend="tokens/s", colour="green"
                ),
            ),
            scale=ColourScale(low=0),
            width=8,
            empty="No tokens recorded: the script has to record `tokens`",
        ),
        dataclasses.replace(LEARNING_RATE, link="optimizer"),
    ),
)

_HEALTH = PanelRow(
    title="Health",
    panels=(
        Panel(
            title="Alerts firing, by rule",
            text="How many alerts of each rule are on, over all ranks.",
            view=PanelView.BARS,
            prometheus=(
                PanelQuery(text=f"sum by (rule) (trainermon_alerts_firing{{{q.RUN}}}) > 0", legend="{{rule}}"),
            ),
            decimals=0,
            link="alerts",
            empty="No alert was on",
        ),
        Panel(
            title="Non-finite elements",
            text="NaN and infinite elements seen in tensors of each kind. Anything but 0 is worth a look, and the kind "
            "in which they come first says where they come from.",
            view=PanelView.BARS,
            prometheus=(
                PanelQuery(
                    text=f"sum by (kind) (increase(trainermon_nonfinite_elements_total{{{q.RUN}}}{q.RATE})) > 0",
                    legend="{{kind}}",
                ),
            ),
            influxdb=(
                PanelQuery(
                    text=q.influx(
                        'sum("value")',
                        "trainermon_nonfinite_elements",
                        by="kind",
                        where='"value" > 0',
                        of_rank=False,
                    ),
                    legend="$tag_kind",
                ),
            ),
            decimals=0,
            width=6,
            link="layers",
            empty="All elements were finite",
        ),
        Panel(
            title="Ranks by phase",
            text="What the living ranks said that they are doing: setting up, training, evaluating, writing a "
            "checkpoint.",
            view=PanelView.AREA,
            prometheus=(PanelQuery(text=f"sum by (phase) (trainermon_ranks_in_phase{{{q.RUN}}})", legend="{{phase}}"),),
            decimals=0,
            width=6,
            link="ranks",
            empty="No agent answers",
        ),
        Panel(
            title="Recorded by the script",
            text="What the training script records beside the loss, mean over ranks.",
            view=PanelView.LINES,
            prometheus=(PanelQuery(text=f"avg by (name) (trainermon_recorded_value{{{q.RUN}}})", legend="{{name}}"),),
            influxdb=(
                PanelQuery(
                    text=q.influx('mean("value")', "trainermon_recorded_value", by="name", of_rank=False),
                    legend="$tag_name",
                ),
            ),
            width=24,
            height=7,
            empty="The script records nothing beside the loss",
        ),
        _rollouts(
            "Rollouts: difference from the policy",
            "How far the log-probabilities of rollout engine and trainer are apart, in nats: mean, 99th percentile and "
            "largest, mean over ranks. They should stay where rounding leaves them.",
            names="rl_(mean|p99|max)_abs",
            scale=ColourScale(log=10),
        ),
        _rollouts(
            "Rollouts: ratio and effective samples",
            "Mean ratio of trainer and rollout over sampled tokens, which is 1 if what was logged was sampled from, "
            "and the effective share of the samples under these ratios; mean over ranks.",
            names="rl_(ratio|ess)",
            scale=ColourScale(low=0),
        ),
    ),
)

BOARD = Board(
    name="overview",
    title="Job overview",
    text="Is this training healthy, and if not, where to look.",
    rows=(_NOW, _TRAINING, _HEALTH),
)
