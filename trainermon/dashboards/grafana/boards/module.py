"""Module: everything that is known of one module's parameters, on each rank."""

from __future__ import annotations

from trainermon.dashboards.grafana import queries as q
from trainermon.dashboards.grafana.panels import Board, ColourScale, Panel, PanelQuery, PanelRow, PanelView


def _lines(title: str, metric: str, kind: str, *, text: str, empty: str) -> Panel:
    """Return a panel with one line per rank."""
    return Panel(
        title=title,
        text=text,
        view=PanelView.LINES,
        prometheus=(PanelQuery(text=f"{metric}{{{q.MODULE}}}", legend=q.OF_MODULE),),
        influxdb=(
            PanelQuery(
                text=q.influx('mean("rms")', f"trainermon_{kind}", by="rank,module", where=q.INFLUX_MODULE),
                legend=q.INFLUX_OF_MODULE,
            ),
        ),
        unit="sci",
        scale=ColourScale(log=10),
        width=8,
        link="ranks",
        empty=empty,
    )


_GRADIENTS = PanelRow(
    title="Gradients of $module",
    panels=(
        _lines(
            "Gradient",
            "trainermon_gradient_rms",
            "grad_reduced",
            text="RMS of reduced gradients before clipping. Replicas lie on each other.",
            empty="No gradient of this module: it has no parameters, or wg_distribution is off",
        ),
        _lines(
            "Gradient before the reduction",
            "trainermon_unreduced_gradient_rms",
            "grad_unreduced",
            text="RMS of this rank's own gradients, before they are reduced over ranks. One line far from the others "
            "is a rank with other data, or with a fault.",
            empty="No gradient of this module before the reduction",
        ),
        Panel(
            title="Non-finite elements of the gradient",
            text="NaN and infinite elements of reduced gradients.",
            view=PanelView.BARS,
            influxdb=(
                PanelQuery(
                    text=q.influx(
                        'sum("nonfinite")', "trainermon_grad_reduced", by="rank,module", where=q.INFLUX_MODULE
                    ),
                    legend=q.INFLUX_OF_MODULE,
                ),
            ),
            decimals=0,
            width=8,
            empty="No gradient of this module",
        ),
        Panel(
            title="Agreement of gradient and first moment",
            text="Share of elements whose gradient has the sign of Adam's first moment: near 50 % gradients are noise.",
            view=PanelView.LINES,
            prometheus=(PanelQuery(text=f"trainermon_gradient_direction{{{q.MODULE}}}", legend=q.OF_MODULE),),
            influxdb=(
                PanelQuery(
                    text=q.influx('mean("mean")', "trainermon_mg_direction", by="rank,module", where=q.INFLUX_MODULE),
                    legend=q.INFLUX_OF_MODULE,
                ),
            ),
            unit="percentunit",
            scale=ColourScale(low=0, high=1),
            width=8,
            empty="Not collected: turn on mg_direction",
        ),
    ),
)

_PARAMETERS = PanelRow(
    title="Parameters and optimizer state of $module",
    panels=(
        _lines(
            "Parameters",
            "trainermon_parameter_rms",
            "param_origin",
            text="RMS of parameters before the step. Replicas that part here train apart.",
            empty="Not collected: turn on param_distribution",
        ),
        _lines(
            "Update",
            "trainermon_update_rms",
            "update",
            text="RMS of Adam's update before it is multiplied by the learning rate.",
            empty="Not collected: turn on ur_distribution",
        ),
        _lines(
            "First moment over root of second",
            "trainermon_update_ratio_rms",
            "ratio",
            text="RMS of Adam's m/√v, both bias-corrected.",
            empty="Not collected: turn on ur_distribution",
        ),
        _lines(
            "First moment",
            "trainermon_first_moment_rms",
            "exp_avg",
            text="RMS of Adam's first moment.",
            empty="Not collected: turn on mv_distribution",
        ),
        _lines(
            "Second moment",
            "trainermon_second_moment_rms",
            "exp_avg_sq",
            text="RMS of Adam's second moment.",
            empty="Not collected: turn on mv_distribution",
        ),
    ),
)

_ACTIVATIONS = PanelRow(
    title="Activations of $module",
    panels=(
        _lines(
            "Activations",
            "trainermon_activation_rms",
            "actv",
            text="RMS of the module's outputs in the training forward.",
            empty="Not collected: turn on xy_distribution",
        ),
        _lines(
            "Gradients of activations",
            "trainermon_activation_gradient_rms",
            "actv_grad",
            text="RMS of the gradients of the module's outputs.",
            empty="Not collected: turn on xy_distribution",
        ),
        Panel(
            title="Features",
            text="Model-specific features of the module: mean, or largest element where that is what counts.",
            view=PanelView.LINES,
            prometheus=(
                PanelQuery(
                    text=f"avg by (feature) (trainermon_feature_mean{{{q.MODULE}}}) or "
                    f"max by (feature) (trainermon_feature_max{{{q.MODULE}}})",
                    legend="{{feature}}",
                ),
            ),
            influxdb=(
                PanelQuery(
                    text=q.influx('mean("mean")', "trainermon_feature", by="feature", where=q.INFLUX_MODULE),
                    legend="$tag_feature",
                ),
            ),
            width=8,
            empty="No features of this module: see l2_targets",
        ),
    ),
)

BOARD = Board(
    name="module",
    title="Module",
    text="Everything that is known of one module's parameters and activations, on each rank.",
    rows=(_GRADIENTS, _PARAMETERS, _ACTIVATIONS),
    picks=("stage", "rank", "module"),
)
