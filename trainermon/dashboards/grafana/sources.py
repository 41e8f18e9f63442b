"""What differs between the data sources: variables, the form of a query, annotations."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.builders import prometheus
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.cog.variants import Dataquery
from grafana_foundation_sdk.models.dashboard import DataSourceRef, VariableRefresh, VariableSort
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from trainermon.dashboards.grafana.panels import Board, Panel, PanelQuery, PanelView, Source
from trainermon.dashboards.grafana.queries import RUN

NOW = frozenset({PanelView.TABLE, PanelView.RANKING})
"""Views that show one moment, not a time."""

_EVERY_MODULE = "trainermon_(gradient|parameter|activation|update)_rms"
_PROMETHEUS = {
    "run": "label_values(trainermon_run_info, run)",
    "stage": f"label_values(trainermon_rank_info{{{RUN}}}, pp)",
    "rank": f'label_values(trainermon_rank_info{{{RUN},pp=~"$stage"}}, rank)',
    "module": f'label_values({{__name__=~"{_EVERY_MODULE}",{RUN}}}, module)',
}
_OF_RUN = 'WHERE "run" =~ /^$run$/'
_INFLUXDB = {
    "run": 'SHOW TAG VALUES FROM "trainermon_step" WITH KEY = "run"',
    "rank": f'SHOW TAG VALUES FROM "trainermon_step" WITH KEY = "rank" {_OF_RUN}',
    "module": f'SHOW TAG VALUES WITH KEY = "module" {_OF_RUN}',
}
_LABELS = {"run": "Run", "stage": "Pipeline stage", "rank": "Rank", "module": "Module"}
_TEXTS = {
    "run": "The training job.",
    "stage": "Stage of the pipeline that ranks belong to.",
    "rank": "Global ranks.",
    "module": "A module, or a range of layers that is shown as one.",
}
_SORT = {
    "run": VariableSort.NATURAL_DESC,
    "stage": VariableSort.NUMERICAL_ASC,
    "rank": VariableSort.NUMERICAL_ASC,
    "module": VariableSort.NATURAL_ASC,
}
_WITHOUT_PARAMETER = r"/^(.*?)(?:\.(?:weight|bias))?$/"
_SINGLE = frozenset({"run", "module"})


def data_source(source: Source) -> DataSourceRef:
    """Return the reference through which every panel uses the data source that the reader picked."""
    return DataSourceRef(type_val=source.value, uid="${datasource}")


def variables(board: Board, source: Source) -> Iterator[Builder[Any]]:
    """Yield the variables at the top of a dashboard: the data source, the run, and what narrows the board down."""
    yield builders.DatasourceVariable("datasource").label("Data source").type(source.value)
    texts = _PROMETHEUS if source is Source.PROMETHEUS else _INFLUXDB
    for name in ("run", *board.picks_in(source)):
        variable = builders.QueryVariable(name).label(_LABELS[name]).description(_TEXTS[name])
        variable.datasource(data_source(source)).query(_variable_query(texts[name], source))
        variable.refresh(VariableRefresh.ON_TIME_RANGE_CHANGED).sort(_SORT[name])
        if name == "module":
            variable.regex(_WITHOUT_PARAMETER)
        yield variable if name in _SINGLE else variable.multi(True).include_all(True)


def target(panel: Panel, query: PanelQuery, source: Source, ref_id: str) -> Builder[Dataquery]:
    """Return the builder of one query of a panel, in Grafana's JSON; `ref_id` is its letter there."""
    if source is Source.INFLUXDB:
        return _InfluxQL(query, ref_id=ref_id, is_table=panel.view is PanelView.TABLE)
    made = prometheus.Dataquery().expr(query.text).ref_id(ref_id).datasource(data_source(source))
    made.legend_format(query.legend or "__auto")
    if panel.view is PanelView.TABLE:
        made.format(PromQueryFormat.TABLE)
    elif panel.view is PanelView.BUCKETS:
        made.format(PromQueryFormat.HEATMAP)
    return made.instant() if panel.view in NOW else made.range()


def marks(source: Source) -> list[dict[str, Any]]:
    """Return the annotations of a dashboard: alerts and escalations over time.

    [] for InfluxDB, which does not have them.
    """
    if source is Source.INFLUXDB:
        return []
    fired = f"sum by (rule, severity) (trainermon_alerts_firing{{{RUN}}}) > 0"
    escalated = f"sum by (run) (increase(trainermon_escalations_total{{{RUN}}}[1m])) > 0"
    return [
        _annotation("Alerts", fired, colour="red", title="{{rule}}", tags="severity"),
        _annotation("Escalations", escalated, colour="purple", title="dump ordered", tags=""),
    ]


def _variable_query(text: str, source: Source) -> str | dict[str, object]:
    return {"query": text, "refId": "variable"} if source is Source.PROMETHEUS else text


def _annotation(name: str, expression: str, *, colour: str, title: str, tags: str) -> dict[str, Any]:
    reference = data_source(Source.PROMETHEUS)
    made = builders.AnnotationQuery().name(name).datasource(reference).enable(True).icon_color(colour)
    made.expr(expression)
    of_data_source = {"step": "60s", "titleFormat": title, "tagKeys": tags, "textFormat": "", "useValueForTime": False}
    return {**made.build().to_json(), **of_data_source}


@dataclasses.dataclass(frozen=True)
class _FluxTarget(Dataquery):
    """A query as Grafana's InfluxDB data source stores it; the library has none for it."""

    body: dict[str, object]

    def to_json(self) -> dict[str, object]:
        """Return it."""
        return self.body


class _InfluxQL(Builder[Dataquery]):
    def __init__(self, query: PanelQuery, *, ref_id: str, is_table: bool) -> None:
        self._body: dict[str, object] = {
            "refId": ref_id,
            "datasource": data_source(Source.INFLUXDB),
            "query": query.text,
            "rawQuery": True,
            "resultFormat": "table" if is_table else "time_series",
        }
        if query.legend:
            self._body["alias"] = query.legend

    def build(self) -> Dataquery:
        """Return the query."""
        return _FluxTarget(self._body)
