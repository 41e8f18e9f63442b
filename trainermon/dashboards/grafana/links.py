"""Where a click leads: run → rank → module, always with the same data source, run and time."""

from __future__ import annotations

from typing import Any

from grafana_foundation_sdk.builders.dashboard import DashboardLink
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.models.dashboard import DashboardLinkType

from trainermon.dashboards.grafana.panels import Board, Panel, Source, TableColumn
from trainermon.dashboards.grafana.queries import OF_RANK

_TITLES = {
    "alerts": "Alerts",
    "layers": "Layers",
    "module": "This module",
    "optimizer": "Optimizer",
    "ranks": "Ranks",
}


_PLACE = {Source.PROMETHEUS: "place", Source.INFLUXDB: "module"}


def uid_of(name: str, source: Source) -> str:
    """Return the uid of a dashboard in Grafana; it never changes, so that links from outside stay right."""
    return f"trainermon-{name}" if source is Source.PROMETHEUS else f"trainermon-{source.value}-{name}"


class DataLink(Builder[Any]):
    """Builder of a link from a panel's field to another page; the library only builds links of dashboards.

    Attributes:
        body: The link as Grafana stores it.
    """

    def __init__(self, title: str, url: str) -> None:
        self.body = {"title": title, "url": url}

    def build(self) -> dict[str, str]:
        """Return the link as Grafana stores it: title and url."""
        return self.body


def data_link(panel: Panel, board: Board, source: Source, *, column: TableColumn | None = None) -> DataLink:
    """Return the link from a panel's series, or from a table's column of ranks, to the dashboard that shows more."""
    name = column.link if column else panel.link
    parts = ["${datasource:queryparam}", "${run:queryparam}"]
    title = _TITLES[name]
    legend = panel.queries(source)[0].legend
    if column:
        parts.append("var-rank=${__value.raw}")
        title = f"{title} of this rank"
    elif name == "module":
        parts += [
            f"var-module=${{__field.labels.{_PLACE[source]}}}",
            *(f"${{{pick}:queryparam}}" for pick in board.picks_in(source)),
        ]
    elif legend.startswith(OF_RANK):
        parts.append("var-rank=${__field.labels.rank}")
        title = f"{title} of this rank" if name == "layers" else "This rank"
    parts.append("${__url_time_range}")
    return DataLink(title, f"/d/{uid_of(name, source)}?{'&'.join(parts)}")


def navigation(source: Source) -> DashboardLink:
    """Return the row of links to all dashboards of the same data source."""
    made = DashboardLink("trainermon").type(DashboardLinkType.DASHBOARDS).tags(["trainermon", source.value])
    return made.as_dropdown(False).include_vars(True).keep_time(True).icon("external link")
