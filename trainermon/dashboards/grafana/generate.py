"""Makes the JSON of all dashboards from the code: `make sync` calls it, and a test compares.

It needs grafana-foundation-sdk (Python 3.11 or newer); whoever only brings dashboards into a Grafana does not.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import DashboardCursorSync, GridPos

from trainermon.dashboards.grafana.boards import (
    alerts,
    collectives,
    layers,
    module,
    monitor,
    optimizer,
    overview,
    ranks,
)
from trainermon.dashboards.grafana.drawing import draw
from trainermon.dashboards.grafana.files import FOLDER
from trainermon.dashboards.grafana.links import navigation, uid_of
from trainermon.dashboards.grafana.panels import Board, Panel, PanelRow, Source
from trainermon.dashboards.grafana.sources import marks, variables

BOARDS = tuple(part.BOARD for part in (overview, layers, module, ranks, collectives, optimizer, alerts, monitor))
_TITLE = {Source.PROMETHEUS: "trainermon / {}", Source.INFLUXDB: "trainermon / {} (InfluxDB)"}
_COLUMNS = 24


def render_all() -> dict[Path, str]:
    """Return the JSON text of every dashboard, by its path below the folder of generated files."""
    return {
        Path(source.value, f"{board.name}.json"): render(board, source)
        for source in Source
        for board in BOARDS
        if any(panel.queries(source) for row in board.rows for panel in row.panels)
    }


def render(board: Board, source: Source) -> str:
    """Return the JSON of one Grafana dashboard for one data source."""
    made = builders.Dashboard(_TITLE[source].format(board.title)).uid(uid_of(board.name, source))
    made.description(board.text).tags(["trainermon", source.value]).readonly().timezone("browser")
    made.time("now-1h", "now").refresh("30s").tooltip(DashboardCursorSync.CROSSHAIR)
    made.link(navigation(source))
    for variable in variables(board, source):
        made.with_variable(variable)
    for number, (part, place) in enumerate(_places(board, source), start=1):
        if isinstance(part, PanelRow):
            made.with_row(builders.Row(part.title).grid_pos(place).id(number))
        else:
            made.with_panel(draw(part, board, source).grid_pos(place).id(number))
    body = json.loads(JSONEncoder(sort_keys=True).encode(made.build()))
    body["annotations"] = {"list": json.loads(JSONEncoder().encode(marks(source)))}
    for variable in body["templating"]["list"]:  # what is of intervals only; the library gives it to all of them
        for key in [key for key in variable if key.startswith("auto")]:
            del variable[key]
    return json.dumps(body, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def write_all() -> None:
    """Write the JSON file of every dashboard into the package, and remove files of dashboards that no longer exist."""
    wanted = render_all()
    for path in FOLDER.rglob("*.json"):
        if path.relative_to(FOLDER) not in wanted:
            path.unlink()
    for path, text in wanted.items():
        (FOLDER / path).parent.mkdir(parents=True, exist_ok=True)
        (FOLDER / path).write_text(text, encoding="utf-8")


def _places(board: Board, source: Source) -> Iterator[tuple[PanelRow | Panel, GridPos]]:
    """Return rows and panels with their places; rows without a panel for this data source are left out."""
    y = 0
    for row in board.rows:
        lines = list(_lines([panel for panel in row.panels if panel.queries(source)]))
        if not lines:
            continue
        yield row, GridPos(x=0, y=y, w=_COLUMNS, h=1)
        y += 1
        for line in lines:
            height = max(panel.height for panel in line)
            begun = [_COLUMNS * sum(p.width for p in line[:i]) // sum(p.width for p in line) for i in range(len(line))]
            for panel, x, end in zip(line, begun, [*begun[1:], _COLUMNS], strict=True):
                yield panel, GridPos(x=x, y=y, w=end - x, h=height)
            y += height


def _lines(panels: list[Panel]) -> Iterator[list[Panel]]:
    """Return the panels that stand beside one another; those of a line that is not full become wider."""
    line: list[Panel] = []
    for panel in panels:
        if line and sum(other.width for other in line) + panel.width > _COLUMNS:
            yield line
            line = []
        line.append(panel)
    if line:
        yield line
