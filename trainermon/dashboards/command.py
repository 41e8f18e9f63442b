"""`trainermon dashboards`: bring the dashboards into a Grafana, or write the files that one sets itself up from."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from trainermon.core.errors import ConfigError
from trainermon.core.terminal.progress import ProgressBar
from trainermon.core.terminal.results import write_text
from trainermon.dashboards.grafana.files import dashboards
from trainermon.dashboards.grafana.provisioning import DataSource, files
from trainermon.dashboards.grafana.push import TOKEN_VARIABLE, Grafana

SOURCES = ("prometheus", "influxdb")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `trainermon dashboards`."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    push = actions.add_parser("push", help="bring folder, data source and dashboards into a running Grafana")
    push.add_argument("url", help="address of Grafana, such as https://grafana.example.com")
    push.add_argument(
        "--token-file",
        type=Path,
        metavar="FILE",
        help=f"file with the token of a service account (default: the environment variable {TOKEN_VARIABLE})",
    )
    push.add_argument("--ca-file", type=Path, metavar="FILE", help="certificates to check the server's one against")
    write = actions.add_parser("write", help="write dashboards and provisioning files into a folder")
    write.add_argument("folder", type=Path, help="where to write; it is made if need be")
    write.add_argument(
        "--path", help="the folder of the dashboards as Grafana will see it (default: FOLDER/dashboards)"
    )
    for action in (push, write):
        action.add_argument(
            "--source", choices=SOURCES, default=SOURCES[0], help="which set of dashboards (default: %(default)s)"
        )
        action.add_argument(
            "--datasource-url",
            metavar="URL",
            help="where Grafana reaches the Prometheus or InfluxDB (default: the data source is there already)",
        )
        action.add_argument("--database", default="trainermon", help="database of the InfluxDB (default: %(default)s)")


def main(arguments: argparse.Namespace) -> int:
    """Write the Grafana dashboards to files, or send them to a running Grafana (`trainermon dashboards`); return 0.

    Raises:
        ConfigError: An argument cannot be right.
        DashboardError: Grafana cannot be reached or refuses.
    """
    url = arguments.datasource_url
    data_source = DataSource(kind=arguments.source, url=url, database=arguments.database) if url else None
    if arguments.action == "write":
        _write(arguments, data_source)
        return 0
    grafana = Grafana(arguments.url, _token(arguments.token_file), ca_file=arguments.ca_file)
    with ProgressBar("asking Grafana") as bar:
        for number, (name, what) in enumerate(grafana.push(arguments.source, data_source), 1):
            bar.result(f"{what:9} {name}")
            bar.stage(f"{number} brought, asking Grafana")
    return 0


def _write(arguments: argparse.Namespace, data_source: DataSource | None) -> None:
    folder: Path = arguments.folder
    path = arguments.path or str((folder / "dashboards").absolute())
    made = files(arguments.source, data_source, path=path)
    try:
        for place, text in made.items():
            (folder / place).parent.mkdir(parents=True, exist_ok=True)
            write_text(folder / place, text)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error}") from error
    num = len(dashboards(arguments.source))
    sys.stdout.write(f"{num} dashboards in {folder / 'dashboards'}, YAML in {folder / 'provisioning'}\n")


def _token(file: Path | None) -> str:
    if file is None:
        return os.environ.get(TOKEN_VARIABLE, "").strip()
    try:
        return file.read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise ConfigError(f"the token cannot be read from {file}: {error}") from error
