"""`format: mlflow`: one rank's numbers, the run's settings and alerts, in a run of MLflow.

Credentials are those that MLflow finds itself: MLFLOW_TRACKING_TOKEN, or MLFLOW_TRACKING_USERNAME and _PASSWORD.
"""

from __future__ import annotations

import importlib.util
import os

from trainermon.core.errors import ConfigError
from trainermon.core.journal import Header
from trainermon.core.values import StatBlock
from trainermon.exporters.export import Exporter, ExportSettings
from trainermon.exporters.trackers.numbers_of_step import StepNumbers
from trainermon.exporters.trackers.run_notes import ToldSteps, alerts_of, settings_of

os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # a folder is the only place that needs no server

try:
    from mlflow.entities import Metric, Param
    from mlflow.exceptions import MlflowException
    from mlflow.tracking import MlflowClient
except ImportError as error:
    raise ConfigError(
        "MLflow needs the package mlflow-skinny, which is not installed here: pip install mlflow-skinny"
    ) from error

FOLDER = "mlflow"
EXPERIMENT = "trainermon"
DATABASES = frozenset({"sqlite", "postgresql", "mysql", "mssql"})
RUN_TAG = "trainermon.run"
_BATCH = 1000  # MLflow takes no more metrics in one request
_PARAMS = 100
_PARAM_LENGTH = 500


class MlflowExporter(Exporter):
    """Tells MLflow the steps of the rank that the configuration names; one that restarts goes on with the run.

    Only the node with that rank has a run there. A later attempt adds its steps: no service forgets those before.

    Raises:
        ConfigError: The address is a database, which the installed package cannot write to.
    """

    def __init__(self, settings: ExportSettings) -> None:
        self._settings = settings
        self._config = settings.mlflow
        self._numbers = StepNumbers(self._config.series, settings.ops)
        self._told = ToldSteps(settings.node_dir / "mlflow.told.json")
        self._uri = self._config.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or ""
        _refuse_database(self._uri)
        self._made: MlflowClient | None = None
        self._run = ""
        self._num_alerts = 0

    def write(self, header: Header, block: StatBlock) -> None:
        """Tell one step, if it is of the rank.

        Raises:
            OSError: The service does not take it.
        """
        if header.coordinates.rank != self._config.rank or not self._told.is_new(header.attempt, block.step):
            return
        time_ms = round(block.time_s * 1000)
        metrics = [Metric(name, value, time_ms, block.step) for name, value in self._numbers.of(header, block).items()]
        try:
            run = self._opened()
            for first in range(0, len(metrics), _BATCH):
                self._client.log_batch(run, metrics=metrics[first : first + _BATCH])
        except MlflowException as error:
            raise OSError(f"MLflow: {error}") from error
        self._told.add(header.attempt, block.step)

    def flush(self) -> None:
        """Tell new alerts, and note how far it has come."""
        if not self._run:
            return
        alerts = alerts_of(self._settings.node_dir)
        try:
            for alert in alerts[self._num_alerts :]:
                self._client.set_tag(self._run, f"alert.{alert.rule}", alert.line)
            if len(alerts) > self._num_alerts:
                self._client.set_tag(self._run, "mlflow.note.content", "\n\n".join(alert.line for alert in alerts))
        except MlflowException as error:
            raise OSError(f"MLflow: {error}") from error
        self._num_alerts = len(alerts)
        self._told.keep()

    def close(self) -> None:
        """Tell the last alerts, and mark the run as finished."""
        self.flush()
        if self._run:
            self._client.set_terminated(self._run)

    @property
    def _client(self) -> MlflowClient:
        """The client; made when it is needed, because it makes its folder."""
        if self._made is None:
            self._made = MlflowClient(tracking_uri=self._uri or (self._settings.run_dir / FOLDER).absolute().as_uri())
        return self._made

    def _opened(self) -> str:
        """Return the id of the run there: the one that an earlier process has made, or a new one."""
        if not self._run:
            name = self._config.experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or EXPERIMENT
            experiment = self._client.get_experiment_by_name(name)
            place = experiment.experiment_id if experiment else self._client.create_experiment(name)
            known = self._client.search_runs([place], f"tags.`{RUN_TAG}` = '{self._settings.run_id}'", max_results=1)
            if known:
                self._client.update_run(known[0].info.run_id, status="RUNNING")
                self._run = known[0].info.run_id
            else:
                tags = {RUN_TAG: self._settings.run_id}
                run = self._client.create_run(place, run_name=self._settings.run_id, tags=tags).info.run_id
                settings = settings_of(self._settings.run_dir)
                params = [Param(key, str(value)[:_PARAM_LENGTH]) for key, value in settings.items()]
                for first in range(0, len(params), _PARAMS):
                    self._client.log_batch(run, params=params[first : first + _PARAMS])
                self._run = run
        return self._run


def _refuse_database(uri: str) -> None:
    scheme = uri.partition(":")[0].partition("+")[0]
    if scheme in DATABASES and importlib.util.find_spec("sqlalchemy") is None:
        raise ConfigError(
            f"mlflow: {scheme} is a database, to which mlflow-skinny cannot write: pip install mlflow, or let "
            "tracking_uri (or MLFLOW_TRACKING_URI) name a server (http://…) or a folder (file:///…)"
        )
