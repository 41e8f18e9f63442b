"""What is shown of the run: the page's history and events, and the metrics of each rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from trainermon.agent.feed import EventFeed
from trainermon.exporters.prometheus.exposition import Exposition
from trainermon.exporters.views import RunHistory


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunViews:
    """What the agent shows of a run: the page's history and events, and `/metrics`.

    Attributes:
        feed: Events for open pages.
        history: Curves and heat maps.
        metrics: The content of `/metrics`.
    """

    feed: EventFeed
    history: RunHistory
    metrics: Exposition

    def publish_steps(self) -> None:
        """Send open pages the steps that have become complete."""
        for summary in self.history.take_summaries():
            self.feed.publish("step", summary.as_plain())

    def end_ranks(self, ranks: Collection[int]) -> None:
        """Expect no more steps of ranks that have gone, and remove their metrics."""
        for rank in ranks:
            self.history.end(rank)
            self.metrics.remove_rank(rank)

    def end_run(self) -> None:
        """Remove all ranks' metrics, after the last rank has gone."""
        self.metrics.end_run()

    def close(self) -> None:
        """Close the event streams of open pages."""
        self.feed.close()
