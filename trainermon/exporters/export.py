"""Forms that a run is written in beside its store, by name; other packages may register more.

    [project.entry-points."trainermon.exporters"]
    mine = "package.module:MyExporter"

An entry point names a callable that takes `ExportSettings` and returns an `Exporter`, which is handed every step that
was committed, or a `StoreExporter`, which reads that itself. Both may lag behind for as long as they have to. Who calls
it, in which process, and what becomes of its failures is decided in `trainermon.agent.export_process`.
"""

from __future__ import annotations

import abc
import dataclasses
import importlib
import importlib.metadata
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeAlias

from trainermon.core.config import ENTRY_POINTS, OutputConfig
from trainermon.core.errors import ConfigError
from trainermon.core.journal import Header
from trainermon.core.strict import shown
from trainermon.core.values import StatBlock
from trainermon.exporters.prometheus.budget import SeriesBudget

SEGMENTS_FOLDER = "segments"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ExportSettings(OutputConfig):
    """The settings of an exporter: those of the run's configuration, and where the run is.

    Attributes:
        run_dir: The run directory; what an exporter writes there belongs below a folder of its own.
        run_id: Name of the run.
        node_dir: The agent's own folder in the run directory, with the segments of the store in `segments`.
        spool_dir: The folder of spools, for an exporter that asks the agent; None: the usual one.
        budget: How many series a form with a limited number of them may have.
    """

    run_dir: Path
    run_id: str = ""
    node_dir: Path = Path()
    spool_dir: Path | None = None
    budget: SeriesBudget = dataclasses.field(default_factory=SeriesBudget)

    @property
    def segments(self) -> Path:
        """Folder of the node's segments."""
        return self.node_dir / SEGMENTS_FOLDER


class Exporter(abc.ABC):
    """Base class of what writes the steps of all local ranks in one form (csv, TensorBoard …).

    All calls come from one thread; any may raise.
    """

    @abc.abstractmethod
    def write(self, header: Header, block: StatBlock) -> None:
        """Write one step of one rank, `header` with the rank's whole series table as the store has it.

        Of placements the store knows dtype, shape, scale, and whether the copy counts in a global norm. The steps of a
        rank and attempt come in order. A new exporter may be given steps that an earlier one has written: what was
        written of the first of them and of all that follow must then be replaced. A step is tried again after an
        `OSError`, and left out after any other exception.
        """

    def flush(self) -> None:  # noqa: B027  (an exporter without a buffer has nothing to do)
        """Make everything written so far readable; called when nothing is waiting."""

    def close(self) -> None:  # noqa: B027
        """Close the exporter's files and connections."""


class StoreExporter(abc.ABC):
    """Base class of what sends the committed segments of a node's store somewhere else, as to InfluxDB.

    All calls come from one thread except `metrics`, which any may call.
    """

    @abc.abstractmethod
    def send(self, stop: threading.Event) -> None:
        """Send every committed segment (Parquet file) that was not sent; called repeatedly, also after it has raised.

        It may take as long as the server is away, but must return soon once `stop` is set. How far it has come is its
        own business, across restarts too; so are retries.
        """

    def metrics(self) -> Mapping[str, float]:
        """Return the exporter's counters, by name of metric with the labels run and exporter."""
        return {}

    def why_nothing(self) -> str:
        """Return why nothing could be sent, where that is no error that was raised; "": there is no such reason."""
        return ""

    def close(self) -> None:  # noqa: B027
        """Close the exporter's files and connections."""


class NullExporter(Exporter):
    """An exporter for tests: writes nothing, and counts what it is given.

    Attributes:
        num_blocks: Blocks (steps of ranks) taken.
        num_flushes: Flushes asked for.
        is_closed: Whether `close` was called.
    """

    def __init__(self, settings: ExportSettings) -> None:
        self.settings = settings
        self.num_blocks = self.num_flushes = 0
        self.is_closed = False

    def write(self, header: Header, block: StatBlock) -> None:
        """Count the block."""
        del header, block
        self.num_blocks += 1

    def flush(self) -> None:
        """Count one more flush."""
        self.num_flushes += 1

    def close(self) -> None:
        """Record that it was closed."""
        self.is_closed = True


Factory: TypeAlias = Callable[[ExportSettings], Exporter | StoreExporter]

BUILT_IN: Mapping[str, str] = {
    "csv": "trainermon.msprobe.csv_files:CsvExporter",
    "influxdb": "trainermon.exporters.influxdb.exporter:InfluxDBExporter",
    "tensorboard": "trainermon.msprobe.tensorboard:TensorBoardExporter",
    "pushgateway": "trainermon.exporters.prometheus.pushgateway:PushgatewayExporter",
    "wandb": "trainermon.exporters.trackers.weights_and_biases:WandbExporter",
    "mlflow": "trainermon.exporters.trackers.mlflow_runs:MlflowExporter",
    "mindformers": "trainermon.mindformers.exporter:MindFormersExporter",
    "null": "trainermon.exporters.export:NullExporter",
}
IN_PROCESS = frozenset({"api"})
"""Forms that the training process itself serves."""


def make_exporter(name: str, settings: ExportSettings) -> Exporter | StoreExporter:
    """Return a new exporter of the format `name`: a built-in one, else that of an installed package.

    Raises:
        ConfigError: There is none of that name, or it cannot be made.
    """
    try:
        return _factory(name)(settings)
    except ImportError as error:
        raise ConfigError(f"format {name!r} cannot be written: {error}") from error


def _factory(name: str) -> Factory:
    if name in BUILT_IN:
        module, _, attribute = BUILT_IN[name].partition(":")
        built_in: Factory = getattr(importlib.import_module(module), attribute)
        return built_in
    points = importlib.metadata.entry_points(group=ENTRY_POINTS)
    for point in points:
        if point.name == name:
            registered: Factory = point.load()
            return registered
    known = sorted({*BUILT_IN, *IN_PROCESS, *(point.name for point in points)})
    raise ConfigError(f"format: found {shown(name)}, expected one of {', '.join(known)}")
