"""How panels look: the one place that knows Grafana's panel options, so that all dashboards look alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from grafana_foundation_sdk.builders import bargauge, common, heatmap, stat, table, timeseries
from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.models import common as kinds
from grafana_foundation_sdk.models.dashboard import (
    DashboardSpecialValueMapOptions,
    DataTransformerConfig,
    DynamicConfigValue,
    FieldColorModeId,
    SpecialValueMap,
    SpecialValueMatch,
    Threshold,
    ThresholdsMode,
    ValueMappingResult,
)
from grafana_foundation_sdk.models.heatmap import HeatmapColorMode, HeatmapColorScale

from trainermon.dashboards.grafana.links import data_link
from trainermon.dashboards.grafana.panels import Board, Panel, PanelQuery, PanelView, Source, TableColumn
from trainermon.dashboards.grafana.queries import OF_RANK, RANK_COLOURS
from trainermon.dashboards.grafana.sources import NOW, data_source, target

_MOST_POINTS = 150
"""Columns of a heat map: more are finer than the eye, and cost the server."""

_NOT_FINITE = SpecialValueMap(
    DashboardSpecialValueMapOptions(SpecialValueMatch.NA_N, ValueMappingResult(text="not finite", color="red"))
)
"""What stands for NaN, as which `/metrics` tells a loss that is not finite; nothing recorded is `Panel.empty`."""
_STACKED = frozenset({PanelView.BARS, PanelView.AREA})


def draw(panel: Panel, board: Board, source: Source) -> Any:
    """Return a builder of Grafana's JSON for a panel (queries, colours, units), all but its place on the board."""
    made: Any = _VIEWS[panel.view](panel)
    made.title(panel.title).description(panel.text).datasource(data_source(source)).unit(panel.unit)
    if panel.decimals is not None:
        made.decimals(panel.decimals)
    made.no_value(panel.empty).mappings([_NOT_FINITE])
    if panel.view is not PanelView.TABLE and panel.link:
        made.data_links([data_link(panel, board, source)])
    for number, query in enumerate(panel.queries(source)):
        ref_id = chr(ord("A") + number)
        made.with_target(target(panel, query, source, ref_id))
        if query.colour:
            made.override_by_query(ref_id, _look(query))
    if panel.queries(source)[0].legend.startswith(OF_RANK):
        for digit, colour in enumerate(RANK_COLOURS):
            made.override_by_regexp(rf"/^rank \d*{digit}( |$)/", [_property("color", _fixed_colour(colour))])
    if panel.view is PanelView.TABLE:
        _arrange(made, panel, source)
        made.override_by_field_type("number", [_property("noValue", "–")])
        for column in panel.columns:
            _style(made, column, panel, board, source)
    elif panel.view not in NOW | {PanelView.STAT}:
        made.interval("15s")
    return made


def _stat(panel: Panel) -> stat.Panel:
    made = stat.Panel().reduce_options(_last()).text_mode(kinds.BigValueTextMode.VALUE)
    made.justify_mode(kinds.BigValueJustifyMode.CENTER).orientation(kinds.VizOrientation.AUTO)
    if panel.thresholds:
        made.color_mode(kinds.BigValueColorMode.BACKGROUND).graph_mode(kinds.BigValueGraphMode.NONE)
        return made.thresholds(_thresholds(panel.thresholds))
    made.color_mode(kinds.BigValueColorMode.VALUE).graph_mode(kinds.BigValueGraphMode.AREA)
    return made.color_scheme(_fixed(panel.colour))


def _lines(panel: Panel) -> timeseries.Panel:
    made = timeseries.Panel().line_width(1.5).show_points(kinds.VisibilityMode.NEVER)
    made.color_scheme(builders.FieldColor().mode(FieldColorModeId.PALETTE_CLASSIC))
    made.tooltip(common.VizTooltipOptions().mode(kinds.TooltipDisplayMode.MULTI).sort(kinds.SortOrder.DESCENDING))
    legend = common.VizLegendOptions().show_legend(True).display_mode(kinds.LegendDisplayMode.LIST)
    made.legend(legend.placement(kinds.LegendPlacement.BOTTOM).calcs([]))
    if panel.view in _STACKED:
        is_area = panel.view is PanelView.AREA
        made.draw_style(kinds.GraphDrawStyle.LINE if is_area else kinds.GraphDrawStyle.BARS)
        made.line_width(1 if is_area else 0).fill_opacity(40 if is_area else 85)
        made.stacking(common.StackingConfig().mode(kinds.StackingMode.NORMAL).group("A"))
    if panel.scale.log:
        logarithmic = common.ScaleDistributionConfig().type(kinds.ScaleDistribution.LOG)
        made.scale_distribution(logarithmic.log(panel.scale.log))
    if panel.scale.low is not None or panel.view in _STACKED:
        made.axis_soft_min(panel.scale.low or 0)
    if panel.scale.high is not None:
        made.axis_soft_max(panel.scale.high)
    return made


def _ranking(panel: Panel) -> bargauge.Panel:
    made = bargauge.Panel().orientation(kinds.VizOrientation.HORIZONTAL).reduce_options(_last())
    made.display_mode(kinds.BarGaugeDisplayMode.BASIC).value_mode(kinds.BarGaugeValueMode.COLOR)
    made.name_placement(kinds.BarGaugeNamePlacement.LEFT).sizing(kinds.BarGaugeSizing.AUTO).show_unfilled(False)
    made.text(common.VizTextDisplayOptions().title_size(13).value_size(15))
    return made.thresholds(_thresholds(panel.thresholds)).min(0)


def _heat(panel: Panel) -> heatmap.Panel:
    scale = panel.scale
    colours = heatmap.HeatmapColorOptions().mode(HeatmapColorMode.SCHEME).scheme(scale.scheme).steps(64)
    colours.reverse(False).scale(HeatmapColorScale.LINEAR)
    if scale.low is not None:
        colours.min(scale.low)
    if scale.high is not None:
        colours.max(scale.high)
    # Cells at or below the limit are not drawn. Powers of ten are negative as a rule; counts are nothing at 0.
    hidden = 1e-9 if scale.low == 0 or panel.view is PanelView.BUCKETS else -1e9
    made = heatmap.Panel().calculate(False).color(colours).filter_values(heatmap.FilterValueRange().le(hidden))
    made.cell_gap(0).show_legend().max_data_points(_MOST_POINTS)
    made.cell_values(_cells(panel)).rows_frame(heatmap.RowsHeatmapOptions().layout(kinds.HeatmapCellLayout.AUTO))
    made.mode(kinds.TooltipDisplayMode.SINGLE).hide_y_histogram().show_color_scale(True)
    is_buckets = panel.view is PanelView.BUCKETS
    axis = heatmap.YAxisConfig().axis_placement(kinds.AxisPlacement.LEFT).reverse(not is_buckets)
    return made.y_axis(axis.unit(panel.unit if is_buckets else "short"))


def _cells(panel: Panel) -> heatmap.CellValues:
    made = heatmap.CellValues().unit("short" if panel.view is PanelView.BUCKETS else panel.unit)
    return made if panel.decimals is None else made.decimals(panel.decimals)


def _table(panel: Panel) -> table.Panel:
    del panel
    made = table.Panel().show_header(True).cell_height(kinds.TableCellHeight.SM)
    return made.align(kinds.FieldTextAlignment.LEFT).filterable(False).cell_options(kinds.TableAutoCellOptions())


def _arrange(made: Any, panel: Panel, source: Source) -> None:
    """Make one table of all queries, with their columns in order."""
    queries = panel.queries(source)
    values = {f"Value #{chr(ord('A') + number)}": query.column for number, query in enumerate(queries)}
    if len(queries) == 1:
        values = {"Value": queries[0].column}
    renamed = values if source is Source.PROMETHEUS else {}
    original = {new: old for old, new in renamed.items()}
    order = {original.get(column.name, column.name): number for number, column in enumerate(panel.columns)}
    hidden = {"Time": True, **{original[c.name]: True for c in panel.columns if c.hidden and c.name in original}}
    if len(queries) > 1:
        made.with_transformation(DataTransformerConfig(id_val="merge", options={}))
    if any(column.name == "rank" for column in panel.columns):
        numbers = {"conversions": [{"targetField": "rank", "destinationType": "number"}], "fields": {}}
        made.with_transformation(DataTransformerConfig(id_val="convertFieldType", options=numbers))
        order_by = {"fields": {}, "sort": [{"field": "rank"}]}
        made.with_transformation(DataTransformerConfig(id_val="sortBy", options=order_by))
    options = {"excludeByName": hidden, "indexByName": order, "renameByName": renamed}
    made.with_transformation(DataTransformerConfig(id_val="organize", options=options))


def _style(made: Any, column: TableColumn, panel: Panel, board: Board, source: Source) -> None:
    """Give a column its unit, width, colours and link."""
    properties = []
    if column.unit:
        properties.append(_property("unit", column.unit))
    if column.width:
        properties.append(_property("custom.width", column.width))
    if column.thresholds or column.texts:
        properties.append(_property("custom.cellOptions", {"type": "color-background", "mode": "basic"}))
    if column.thresholds:
        properties.append(_property("thresholds", {"mode": "absolute", "steps": _steps(column.thresholds)}))
    if column.texts:
        texts = {
            value: {"text": text, "color": colour, "index": i} for i, (value, text, colour) in enumerate(column.texts)
        }
        properties.append(_property("mappings", [{"type": "value", "options": texts}]))
    if column.link:
        properties.append(_property("links", [data_link(panel, board, source, column=column).body]))
    if properties:
        made.override_by_name(column.name, properties)


def _last() -> common.ReduceDataOptions:
    # "lastNotNull" takes NaN for null: it would show the last loss that was finite. Neither source fills in nulls.
    return common.ReduceDataOptions().calcs(["last"]).values(False).fields("")


def _look(query: PanelQuery) -> list[DynamicConfigValue]:
    """Return how the series of a query differ from the others of the panel."""
    found = [_property("color", _fixed_colour(query.colour))]
    if query.band_to:
        found += [_property("custom.fillBelowTo", query.band_to), _property("custom.fillOpacity", 25)]
        found.append(_property("custom.lineWidth", 0.5))
    return found


def _fixed_colour(colour: str) -> dict[str, str]:
    return {"mode": "fixed", "fixedColor": colour}


def _fixed(colour: str) -> builders.FieldColor:
    return builders.FieldColor().mode(FieldColorModeId.FIXED).fixed_color(colour)


def _steps(thresholds: tuple[tuple[float, str], ...]) -> list[dict[str, object]]:
    return [{"value": bound if number else None, "color": colour} for number, (bound, colour) in enumerate(thresholds)]


def _thresholds(thresholds: tuple[tuple[float, str], ...]) -> builders.ThresholdsConfig:
    steps = [
        Threshold(value=bound if number else None, color=colour) for number, (bound, colour) in enumerate(thresholds)
    ]
    return builders.ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps(steps)


def _property(name: str, value: object) -> DynamicConfigValue:
    return DynamicConfigValue(id_val=name, value=value)


_VIEWS: Mapping[PanelView, Callable[[Panel], Any]] = MappingProxyType(
    {
        PanelView.STAT: _stat,
        PanelView.LINES: _lines,
        PanelView.BARS: _lines,
        PanelView.AREA: _lines,
        PanelView.RANKING: _ranking,
        PanelView.HEAT: _heat,
        PanelView.BUCKETS: _heat,
        PanelView.TABLE: _table,
    }
)
