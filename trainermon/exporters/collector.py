"""A run's metrics in the registry of a program of yours, for `prometheus_client`.

    from prometheus_client import REGISTRY, start_http_server
    from trainermon.exporters.collector import TrainermonCollector

    REGISTRY.register(TrainermonCollector(monitor.run_directory))
    start_http_server(8000)

Names, labels and values are those of the agent's `/metrics`. It works in the training process and in any other of the
same user on the node. Nothing happens before a scrape, and then everything in the thread that answers it: the agent is
asked over loopback, for `timeout_s` at the most, and what goes wrong is told as `trainermon_collector_up 0`.

Needs the package prometheus_client.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from trainermon.core.errors import ConfigError
from trainermon.exporters.node_agent import AGENT_FAULTS, find_agent

try:
    from prometheus_client import Metric
    from prometheus_client.core import GaugeMetricFamily
    from prometheus_client.openmetrics.parser import text_string_to_metric_families
    from prometheus_client.registry import Collector
except ImportError as error:
    raise ConfigError(
        "a collector needs the package prometheus_client, which is not installed here: pip install prometheus_client"
    ) from error

TIMEOUT_S = 2.0
OF_THE_PROCESS = ("process_", "trainermon_build")
"""Families that the agent tells of its own process; in a registry of another one they would be taken for its own."""

_ACCEPT = {"Accept": "application/openmetrics-text; version=1.0.0"}
_log = logging.getLogger(__name__)


class TrainermonCollector(Collector):
    """Collects what the agent of a run on this node shows under `/metrics`, each time that it is scraped.

    It never raises, keeps nothing between two scrapes, and may be registered before the run begins.

    Args:
        run: Run directory (`monitor.run_directory`) or run id.
        timeout_s: Longest time in seconds to wait for the agent.
        spool_dir: The folder of spools, where the run's configuration or TRAINERMON_SPOOL names one for it alone.
        own_process: Also show what the agent tells of its own process (`process_…`). Only for a registry without
            metrics of the process, unlike `prometheus_client.REGISTRY`.
    """

    def __init__(
        self,
        run: str | os.PathLike[str],
        *,
        timeout_s: float = TIMEOUT_S,
        spool_dir: Path | None = None,
        own_process: bool = False,
    ) -> None:
        self._spool_dir = spool_dir
        self._run = os.path.abspath(run)
        self._timeout_s = timeout_s
        self._left_out = () if own_process else OF_THE_PROCESS

    def describe(self) -> Iterable[Metric]:
        """Return nothing: names are known at a scrape, and registering asks nobody."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield the run's metrics, then `trainermon_collector_up`: 1, or 0 where there is no agent that answers.

        Cost: about 25 µs of CPU a series in the thread of the scrape, which shares the interpreter with the others.
        """
        families = self._families()
        yield from families
        up = GaugeMetricFamily("trainermon_collector_up", "Whether the agent of the run has answered this scrape.")
        up.add_metric((), float(bool(families)))
        yield up

    def _families(self) -> list[Metric]:
        agent = find_agent(self._run, self._spool_dir)
        if agent is None:
            return []
        try:
            text = agent.ask("/metrics", timeout_s=self._timeout_s, headers=_ACCEPT).decode()
            families = list(text_string_to_metric_families(text))  # type: ignore[no-untyped-call]
        except AGENT_FAULTS as error:
            _log.debug("the agent of %s does not tell its metrics: %s", self._run, error)
            return []
        return [family for family in families if not family.name.startswith(self._left_out or ("\0",))]
