"""Optimizer: learning rate, clipping, loss scale, skipped steps, moments."""

from __future__ import annotations

from trainermon.dashboards.grafana import queries as q
from trainermon.dashboards.grafana.boards.layers import UPDATE_OVER_SIZE, size_map
from trainermon.dashboards.grafana.panels import Board, ColourScale, Panel, PanelQuery, PanelRow, PanelView

_SCALE = "The loss is not scaled"
_MOMENTS = "Not collected: turn on mv_distribution"


def _one(how: str, field: str, legend: str, colour: str) -> PanelQuery:
    return PanelQuery(
        text=q.influx(f'{how}("{field}")', "trainermon_step", of_rank=False), legend=legend, colour=colour
    )


LEARNING_RATE = Panel(
    title="Learning rate",
    text="Of each parameter group of the optimizer.",
    view=PanelView.LINES,
    prometheus=(PanelQuery(text=f"max by (group) (trainermon_learning_rate{{{q.RUN}}})", legend="group {{group}}"),),
    influxdb=(
        PanelQuery(
            text=q.influx('max("value")', "trainermon_learning_rate", by="group", of_rank=False),
            legend="group $tag_group",
        ),
    ),
    unit="sci",
    width=8,
    empty="No learning rate known",
)


_STEP = PanelRow(
    title="The step",
    panels=(
        LEARNING_RATE,
        Panel(
            title="Norm of all gradients",
            text="L2 norm of all gradients over the job before clipping, unscaled, as the framework returned it.",
            view=PanelView.LINES,
            prometheus=(
                PanelQuery(
                    text=f"max(trainermon_global_gradient_norm{{{q.RUN}}})", legend="norm", colour=q.GRADIENT_COLOUR
                ),
            ),
            influxdb=(_one("max", "global_gradient_norm", "norm", q.GRADIENT_COLOUR),),
            scale=ColourScale(log=10),
            width=8,
            link="layers",
            empty="The framework tells no norm",
        ),
        Panel(
            title="Clipping",
            text="What clipping multiplied the gradients by: 100 % is no clipping. Always far below: the limit, not "
            "the learning rate, decides how large steps are.",
            view=PanelView.LINES,
            prometheus=(
                PanelQuery(text=f"min(trainermon_clip_ratio{{{q.RUN}}})", legend="factor", colour=q.GRADIENT_COLOUR),
            ),
            influxdb=(_one("min", "clip_ratio", "factor", q.GRADIENT_COLOUR),),
            unit="percentunit",
            scale=ColourScale(low=0, high=1),
            width=8,
            empty="Gradients are not clipped",
        ),
        Panel(
            title="Loss scale",
            text="What the loss is multiplied by in mixed precision. It halves at every overflow and grows slowly; a "
            "scale that only falls means that gradients are not finite whatever the scale.",
            view=PanelView.LINES,
            prometheus=(
                PanelQuery(text=f"min(trainermon_loss_scale{{{q.RUN}}})", legend="loss scale", colour="purple"),
            ),
            influxdb=(_one("min", "loss_scale", "loss scale", "purple"),),
            scale=ColourScale(log=2),
            empty=_SCALE,
        ),
        Panel(
            title="Skipped steps",
            text="Collected steps that the framework skipped, so that they changed nothing. One now and then is usual "
            "with a dynamic loss scale.",
            view=PanelView.BARS,
            prometheus=(
                PanelQuery(
                    text=f"max(increase(trainermon_skipped_steps_total{{{q.RUN}}}{q.RATE}))",
                    legend="skipped",
                    colour=q.BAD,
                ),
            ),
            influxdb=(_one("max", "skipped_steps", "skipped", q.BAD),),
            decimals=0,
            scale=ColourScale(low=0),
            empty="The framework skips no steps",
        ),
    ),
)

_SIZE = PanelRow(
    title="Size of updates",
    panels=(
        Panel(
            title="Update over parameter, largest modules",
            text="Learning rate × RMS of Adam's update over RMS of the parameters, the ten modules for which it is "
            "largest. Around 1e-3 is usual.",
            view=PanelView.LINES,
            prometheus=(PanelQuery(text=f"topk(10, {q.placed(UPDATE_OVER_SIZE)})", legend="{{module}}"),),
            unit="sci",
            scale=ColourScale(log=10),
            link="module",
            empty="Not collected: turn on ur_distribution and param_distribution",
        ),
        Panel(
            title="Agreement of gradient and first moment",
            text="Share of elements whose gradient has the sign of Adam's first moment, over all modules: smallest, "
            "mean and largest. Near 50 % gradients are noise.",
            view=PanelView.LINES,
            prometheus=tuple(
                PanelQuery(text=f"{how}(trainermon_gradient_direction{{{q.RANK}}})", legend=legend, colour=colour)
                for how, legend, colour in (
                    ("min", "smallest", "super-light-green"),
                    ("avg", "mean", "green"),
                    ("max", "largest", "light-green"),
                )
            ),
            influxdb=tuple(
                PanelQuery(text=q.influx(f'{how}("mean")', "trainermon_mg_direction"), legend=legend, colour=colour)
                for how, legend, colour in (
                    ("min", "smallest", "super-light-green"),
                    ("mean", "mean", "green"),
                    ("max", "largest", "light-green"),
                )
            ),
            unit="percentunit",
            empty="Not collected: turn on mg_direction",
        ),
        size_map("First moment", "trainermon_first_moment_rms", "exp_avg", text="Of Adam.", empty=_MOMENTS),
        size_map("Second moment", "trainermon_second_moment_rms", "exp_avg_sq", text="Of Adam.", empty=_MOMENTS),
    ),
)

BOARD = Board(
    name="optimizer",
    title="Optimizer and loss scale",
    text="Learning rate, clipping, loss scale, skipped steps, moments.",
    rows=(_STEP, _SIZE),
    picks=("stage", "rank"),
)
