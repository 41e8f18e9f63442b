"""`format: pushgateway`: what the agent shows under `/metrics`, pushed to a Pushgateway while the run is on.

For nodes that Prometheus cannot reach. The newest state is pushed, and the Pushgateway keeps nothing older: where it
was away, there is a gap, as with a scrape that failed.
"""

from __future__ import annotations

import functools
import socket
import threading
import time
import urllib.error
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trainermon.core.config import PushgatewayConfig
from trainermon.core.errors import ConfigError
from trainermon.exporters.collector import TrainermonCollector
from trainermon.exporters.export import ExportSettings, StoreExporter

try:
    from prometheus_client import CollectorRegistry, Metric, delete_from_gateway, push_to_gateway
    from prometheus_client.exposition import basic_auth_handler, default_handler
except ImportError as error:
    raise ConfigError(
        "a Pushgateway needs the package prometheus_client, which is not installed here: pip install prometheus_client"
    ) from error

UP = "trainermon_collector_up"
RANKS = "trainermon_ranks"


class PushgatewayExporter(StoreExporter):
    """Pushes the agent's metrics every `interval_s` as the group (job, run, node), replacing what was there.

    What was pushed before the last rank has gone stays in the gateway, unless `delete_at_end` is set.

    Raises:
        ConfigError: No address is configured.
    """

    def __init__(self, settings: ExportSettings) -> None:
        self._config = config = settings.pushgateway
        if not config.url:
            raise ConfigError("format names pushgateway, but pushgateway.url is not set: expected http://host:9091")
        self._agent = TrainermonCollector(settings.run_dir, spool_dir=settings.spool_dir, own_process=True)
        self._registry = CollectorRegistry()
        self._registry.register(_OfRanks(self._agent))
        self._group = {"run": settings.run_id, "node": socket.gethostname()}
        self._handler = _handler(config)
        self._next_s = 0.0
        self._why = ""
        self._counts = {"trainermon_exported_points_total": 0.0, "trainermon_export_waiting_bytes": 0.0}

    def metrics(self) -> Mapping[str, float]:
        """Return the number of pushes that the gateway has taken; nothing ever waits."""
        return dict(self._counts)

    def why_nothing(self) -> str:
        """Return why the last push was left out; "": it was not."""
        return self._why

    def send(self, stop: threading.Event) -> None:
        """Push the newest state if it is time.

        Raises:
            OSError: There is no answer, or a refusal; the next push is due after the usual interval.
        """
        if stop.is_set() or time.monotonic() < self._next_s:
            return
        self._next_s = time.monotonic() + self._config.interval_s
        try:
            self._ask(push_to_gateway, registry=self._registry)
        except _NothingToTellError:  # the agent is about to begin or to end
            self._why = "no agent of the run answers on this node, and only what an agent shows now can be pushed"
            return
        self._why = ""
        self._counts["trainermon_exported_points_total"] += 1

    def close(self) -> None:
        """Delete the group from the gateway, if that is configured.

        Raises:
            OSError: There is no answer, or a refusal.
        """
        if self._config.delete_at_end:
            self._ask(delete_from_gateway)

    def _ask(self, call: Callable[..., None], **more: Any) -> None:
        try:
            call(
                self._config.url,
                job=self._config.job,
                grouping_key=self._group,
                timeout=self._config.timeout_s,
                handler=self._handler,
                **more,
            )
        except urllib.error.HTTPError as error:
            with error:
                said = error.read(500).decode(errors="replace").strip()
            raise OSError(f"the Pushgateway refuses ({error.code} {error.reason}): {said}") from None


class _NothingToTellError(Exception):
    """Raised when the agent does not answer, or has no ranks any more: a push would wipe out what they have told."""


class _OfRanks:
    """The collector's metrics; raises `_NothingToTellError` where there are none of ranks after there were some."""

    def __init__(self, collector: TrainermonCollector) -> None:
        self._collector = collector
        self._had_ranks = False
        self.describe = collector.describe

    def collect(self) -> list[Metric]:
        families = [family for family in self._collector.collect() if family.name != UP]
        has_ranks = any(family.name == RANKS and family.samples[0].value > 0 for family in families)
        if not families or (self._had_ranks and not has_ranks):
            raise _NothingToTellError
        self._had_ranks = has_ranks
        return families


def _handler(config: PushgatewayConfig) -> Callable[..., Callable[[], None]]:
    if not config.username:
        return default_handler
    return functools.partial(_with_password, config)


def _with_password(config: PushgatewayConfig, **request: Any) -> Callable[[], None]:
    """Return a request with user and password; the file is read anew, so that a password may be replaced."""
    assert config.password_file is not None
    password = Path(config.password_file).read_text(encoding="utf-8").strip()
    return basic_auth_handler(username=config.username, password=password, **request)
