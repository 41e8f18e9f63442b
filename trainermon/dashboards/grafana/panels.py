"""What a panel shows, once for both data sources; how that becomes Grafana's JSON is decided in `drawing`.

A panel has queries for Prometheus, for InfluxDB, or for both. A set of dashboards has only those panels for which its
data source has the numbers, so that none is empty by design.
"""

from __future__ import annotations

import dataclasses
import enum


class PanelView(str, enum.Enum):
    """The kind of chart that a panel is; the value describes it."""

    STAT = "one large number"
    LINES = "lines over time"
    BARS = "stacked bars over time"
    AREA = "stacked areas over time"
    RANKING = "horizontal bars, now"
    HEAT = "one row per series over time"
    BUCKETS = "the buckets of a histogram over time"
    TABLE = "one row per rank or alert, now"


class Source(str, enum.Enum):
    """The data source that a dashboard queries; the value is Grafana's name for its type."""

    PROMETHEUS = "prometheus"
    INFLUXDB = "influxdb"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PanelQuery:
    """One query of a panel.

    Attributes:
        text: PromQL or InfluxQL, with Grafana's variables.
        legend: Name of its series, with Grafana's placeholders.
        colour: Of all its series; empty: by name.
        column: Heading of its value in a table.
        band_to: Name of the series that the area below this one is filled down to.
    """

    text: str
    legend: str = ""
    colour: str = ""
    column: str = ""
    band_to: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ColourScale:
    """What the colours of a heat map, or the axis of lines, mean.

    Attributes:
        scheme: Colour scheme of a heat map. Grafana turns two-sided ones, so that red is high, and in its dark theme
            those of one colour, so that bright is high.
        low: Smallest value; None: that of the data. An axis goes further where the data do.
        high: Largest value, likewise.
        log: Base of a logarithmic axis, 0: linear.
    """

    scheme: str = "Viridis"
    low: float | None = None
    high: float | None = None
    log: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TableColumn:
    """A column of a table.

    Attributes:
        name: Its heading.
        unit: Grafana's unit.
        thresholds: As for a panel; its cells are coloured by them.
        texts: What stands for a number, such as yes for 1.
        link: As for a panel.
        hidden: Left out.
        width: In pixels; 0: what is left.
    """

    name: str
    unit: str = ""
    thresholds: tuple[tuple[float, str], ...] = ()
    texts: tuple[tuple[str, str, str], ...] = ()
    link: str = ""
    hidden: bool = False
    width: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One panel.

    Attributes:
        title: What it shows; the unit stands on the axis.
        text: What a reader should know: what exactly, how to read it, what is bad.
        view: How it draws.
        prometheus: Its queries there; none: not in that set.
        influxdb: Its queries there; none: not in that set.
        unit: Grafana's unit.
        decimals: Digits after the point; None: as needed.
        width: Of 24.
        height: In rows of 30 pixels.
        thresholds: Lower bounds and colours, beginning with the colour of everything below.
        colour: Of a number without thresholds.
        scale: Of heat maps and axes.
        columns: Of a table, in order.
        link: Name of the dashboard that a click leads to, with the series' own rank or module.
        empty: What stands there without data: why, and what to turn on.
    """

    title: str
    text: str
    view: PanelView
    prometheus: tuple[PanelQuery, ...] = ()
    influxdb: tuple[PanelQuery, ...] = ()
    unit: str = "short"
    decimals: int | None = None
    width: int = 12
    height: int = 8
    thresholds: tuple[tuple[float, str], ...] = ()
    colour: str = ""
    scale: ColourScale = ColourScale()
    columns: tuple[TableColumn, ...] = ()
    link: str = ""
    empty: str = ""

    def queries(self, source: Source) -> tuple[PanelQuery, ...]:
        """Return the panel's queries for a data source; () if it is not in that set of dashboards."""
        return self.prometheus if source is Source.PROMETHEUS else self.influxdb


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PanelRow:
    """A row of a dashboard: panels under one heading, which flow from left to right and wrap."""

    title: str
    panels: tuple[Panel, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """One dashboard.

    Attributes:
        name: The last part of its uid and of its file.
        title: Its title.
        text: What question it answers.
        rows: What it shows.
        picks: Variables to pick by, beside the data source and the run: stage, rank, module.
    """

    name: str
    title: str
    text: str
    rows: tuple[PanelRow, ...]
    picks: tuple[str, ...] = ()

    def picks_in(self, source: Source) -> tuple[str, ...]:
        """Return the variables (stage, rank, module) that a reader can choose by with this data source.

        Points in InfluxDB do not say their rank's stage.
        """
        return tuple(pick for pick in self.picks if source is Source.PROMETHEUS or pick != "stage")
