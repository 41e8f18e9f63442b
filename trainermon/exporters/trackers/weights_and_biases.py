"""`format: wandb`: one rank's numbers, the run's settings and alerts, in a run of Weights & Biases.

The package wandb keeps what it is told in a file of its own and sends that when it can. `mode: offline` leaves it
there, for `wandb sync`. The API key is the one that wandb finds: WANDB_API_KEY, or `wandb login`.
"""

from __future__ import annotations

import logging
import os
import time
from typing import Any

from trainermon.core.errors import ConfigError
from trainermon.core.journal import Header
from trainermon.core.values import StatBlock
from trainermon.exporters.export import Exporter, ExportSettings
from trainermon.exporters.trackers.numbers_of_step import StepNumbers
from trainermon.exporters.trackers.run_notes import ToldSteps, alerts_of, settings_of

try:
    import wandb
except ImportError as error:
    raise ConfigError(
        "Weights & Biases needs the package wandb, which is not installed here: pip install wandb"
    ) from error

logging.getLogger("wandb").setLevel(logging.WARNING)

FOLDER = "wandb"
STEP = "step"
PROJECT = "trainermon"


class WandbExporter(Exporter):
    """Tells Weights & Biases the steps of the rank that the configuration names; a restart goes on with the run.

    Only the node with that rank has a run there. A later attempt adds its steps: no service forgets those before.
    """

    def __init__(self, settings: ExportSettings) -> None:
        self._settings = settings
        self._config = settings.wandb
        self._numbers = StepNumbers(self._config.series, settings.ops)
        self._told = ToldSteps(settings.node_dir / "wandb.told.json")
        self._run: Any = None
        self._num_alerts = 0

    def write(self, header: Header, block: StatBlock) -> None:
        """Tell one step, if it is of the rank.

        Raises:
            OSError: The service cannot be reached to begin a run.
        """
        if header.coordinates.rank != self._config.rank or not self._told.is_new(header.attempt, block.step):
            return
        numbers = self._numbers.of(header, block)
        histograms = {
            name: wandb.Histogram(np_histogram=(bars.counts.tolist(), bars.edges.tolist()))
            for name, bars in self._numbers.histograms_of(header, block).items()
        }
        self._opened().log({STEP: block.step, "attempt": header.attempt, **numbers, **histograms})
        self._told.add(header.attempt, block.step)

    def flush(self) -> None:
        """Tell new alerts, and note how far it has come."""
        if self._run is None:
            return
        alerts = alerts_of(self._settings.node_dir)
        if len(alerts) > self._num_alerts:
            self._num_alerts = len(alerts)
            self._run.tags = tuple(sorted({*(self._run.tags or ()), *(f"alert:{alert.rule}" for alert in alerts)}))
            self._run.notes = "\n".join(alert.line for alert in alerts)
        self._told.keep()

    def close(self) -> None:
        """Tell the last alerts, and end the run there; what is not sent stays in its file."""
        self.flush()
        if self._run is not None:
            self._run.finish()

    def _opened(self) -> Any:
        if self._run is None:
            # The folders that wandb makes have names by the second, and it overwrites one that is there.
            folder = self._settings.run_dir / FOLDER / f"{time.time_ns() // 1_000_000}"
            folder.mkdir(mode=0o700, parents=True)
            quiet = wandb.Settings(
                console="off",
                silent=True,
                x_disable_stats=True,
                x_disable_meta=True,
                x_save_requirements=False,
                disable_git=True,
                disable_code=True,
            )
            try:
                self._run = wandb.init(
                    project=self._config.project or os.environ.get("WANDB_PROJECT") or PROJECT,
                    entity=self._config.entity or None,
                    id=self._settings.run_id,
                    name=self._settings.run_id,
                    resume="allow",
                    mode=self._config.mode or None,  # type: ignore[arg-type]  # None: WANDB_MODE, else online
                    dir=str(folder),
                    settings=quiet,
                )
            except wandb.Error as error:
                raise OSError(f"Weights & Biases: {error}") from error
            self._run.define_metric(STEP)
            self._run.define_metric("*", step_metric=STEP)
            self._run.config.update(settings_of(self._settings.run_dir), allow_val_change=True)
        return self._run
