"""Layers: how large gradients, updates and activations are over the depth of the model, and since when."""

from __future__ import annotations

from trainermon.dashboards.grafana import queries as q
from trainermon.dashboards.grafana.panels import Board, ColourScale, Panel, PanelQuery, PanelRow, PanelView

_DEPTH = "From top to bottom in the order of the model; click a cell for the module."


def size_map(title: str, metric: str, kind: str, *, text: str, empty: str) -> Panel:
    """Return a heat map panel of the root mean square of `metric`: modules in model order, over time.

    `text` explains it, `empty` is shown without data.
    """
    return Panel(
        title=title,
        text=f"{text} Root mean square over the module's elements and the ranks that hold them, as a power of ten. "
        f"{_DEPTH}",
        view=PanelView.HEAT,
        prometheus=(PanelQuery(text=q.size_by_depth(metric), legend="{{module}}"),),
        influxdb=(
            PanelQuery(
                text=f'SELECT log10("x") FROM ({q.influx("mean(rms) AS x", f"trainermon_{kind}", by="module")}) '
                'WHERE "x" > 0 GROUP BY "module"',
                legend="$tag_module",
            ),
        ),
        unit="prefix:10^",
        decimals=1,
        height=12,
        link="module",
        empty=empty,
    )


def _change(title: str, metric: str, *, text: str, empty: str, doublings: float = 4) -> Panel:
    return Panel(
        title=title,
        text=f"{text} Each row against its own mean over the time shown: +1 is twice as large, -1 half. What differs "
        f"between modules anyway is gone, what changed stands out. {_DEPTH}",
        view=PanelView.HEAT,
        prometheus=(PanelQuery(text=q.change_by_depth(metric), legend="{{module}}"),),
        unit="prefix:2^",
        decimals=1,
        height=12,
        scale=ColourScale(scheme="RdBu", low=-doublings, high=doublings),
        link="module",
        empty=empty,
    )


_WEIGHT_GRADIENTS = "No gradients collected: wg_distribution is off"
_PARAMETERS = "Not collected: turn on ur_distribution and param_distribution"
_MODULES = "Not collected: turn on xy_distribution"
_LEARNING_RATE = f"on () group_left () max(trainermon_learning_rate{{{q.RUN}}})"

_NOW_OVER_MEAN = (
    f"{q.over_ranks('trainermon_gradient_rms')} / "
    f"avg by (module) (avg_over_time(trainermon_gradient_rms{{{q.RANK}}}[$__range]))"
)

UPDATE_OVER_SIZE = (
    f"({q.over_ranks('trainermon_update_rms')} * {_LEARNING_RATE} / {q.over_ranks('trainermon_parameter_rms')})"
)
"""What a step changes a module by, relative to its size."""

_GRADIENTS = PanelRow(
    title="Gradients",
    panels=(
        size_map(
            "Gradients",
            "trainermon_gradient_rms",
            "grad_reduced",
            text="Reduced gradients before clipping.",
            empty=_WEIGHT_GRADIENTS,
        ),
        _change(
            "Gradients against their own mean",
            "trainermon_gradient_rms",
            text="Reduced gradients before clipping.",
            empty=_WEIGHT_GRADIENTS,
        ),
        Panel(
            title="Gradients that have grown most",
            text="Gradients now over their own mean over the time shown, the ten modules for which this is largest.",
            view=PanelView.RANKING,
            prometheus=(
                PanelQuery(
                    text=f"sort_desc(topk(10, {q.placed(_NOW_OVER_MEAN)}))",
                    legend="{{module}}",
                ),
            ),
            unit="suffix:×",
            decimals=1,
            thresholds=((0, "blue"), (4, q.WARN), (16, q.BAD)),
            link="module",
            empty=_WEIGHT_GRADIENTS,
        ),
        Panel(
            title="Non-finite elements, by kind",
            text="NaN and infinite elements over time: which kind of tensor had them first. Modules are named by the "
            "diagnosis of the replay, and by `trainermon query`.",
            view=PanelView.HEAT,
            prometheus=(
                PanelQuery(
                    text=f"sum by (kind) (increase(trainermon_nonfinite_elements_total{{{q.RANK}}}{q.RATE}))",
                    legend="{{kind}}",
                ),
            ),
            scale=ColourScale(scheme="Reds", low=0),
            decimals=0,
            empty="Nothing collected yet",
        ),
        Panel(
            title="Non-finite gradients, by module",
            text=f"NaN and infinite elements of reduced gradients. {_DEPTH}",
            view=PanelView.HEAT,
            influxdb=(
                PanelQuery(
                    text=q.influx('sum("nonfinite")', "trainermon_grad_reduced", by="module"), legend="$tag_module"
                ),
            ),
            scale=ColourScale(scheme="Reds", low=0),
            decimals=0,
            height=12,
            link="module",
            empty=_WEIGHT_GRADIENTS,
        ),
    ),
)

_UPDATES = PanelRow(
    title="Updates",
    panels=(
        Panel(
            title="Update over parameter",
            text="What a step changes a module by, relative to its size: learning rate × RMS of Adam's update over RMS "
            "of the parameters, with the largest learning rate of all groups, without weight decay. Around 10^-3 is "
            f"usual; above 10^-1.5 weights are overwritten, below 10^-5 they stand still. {_DEPTH}",
            view=PanelView.HEAT,
            prometheus=(PanelQuery(text=f"log10({q.depth(UPDATE_OVER_SIZE)} > 0)", legend="{{module}}"),),
            unit="prefix:10^",
            decimals=1,
            height=12,
            scale=ColourScale(scheme="Turbo", low=-6, high=-1),
            link="module",
            empty=_PARAMETERS,
        ),
        size_map(
            "First moment over root of second",
            "trainermon_update_ratio_rms",
            "ratio",
            text="Adam's m/√v, both bias-corrected. Near 10^0 all steps point the same way, far below they cancel.",
            empty="Not collected: turn on ur_distribution",
        ),
        size_map(
            "Parameters",
            "trainermon_parameter_rms",
            "param_origin",
            text="Parameters before the step.",
            empty="Not collected: turn on param_distribution",
        ),
        _change(
            "Parameters against their own mean",
            "trainermon_parameter_rms",
            text="Parameters before the step.",
            empty="Not collected: turn on param_distribution",
            doublings=1,
        ),
    ),
)

_ACTIVATIONS = PanelRow(
    title="Activations",
    panels=(
        size_map(
            "Activations",
            "trainermon_activation_rms",
            "actv",
            text="Outputs of modules in the training forward.",
            empty=_MODULES,
        ),
        size_map(
            "Gradients of activations",
            "trainermon_activation_gradient_rms",
            "actv_grad",
            text="Gradients of the outputs of modules.",
            empty=_MODULES,
        ),
    ),
)

BOARD = Board(
    name="layers",
    title="Layers",
    text="How large gradients, updates and activations are over the depth of the model, and since when.",
    rows=(_GRADIENTS, _UPDATES, _ACTIVATIONS),
    picks=("stage", "rank"),
)
