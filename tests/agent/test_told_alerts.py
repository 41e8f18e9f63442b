"""Which alerts the status in the spool has for the rank that logs them."""

from types import SimpleNamespace
from typing import Any

import pytest

from tests.dashboards.stored_runs import alert_of
from trainermon.agent.lifecycle.lock import read_status
from trainermon.agent.place import AgentPlace
from trainermon.agent.turn.status import MAX_TOLD, StatusReporter
from trainermon.core.values import Alert


@pytest.fixture
def told(tmp_path):
    """Return what reports a book's alerts, and returns the messages that the status has then."""
    latest: dict[str, Alert] = {}
    book: Any = SimpleNamespace(latest=latest)
    metrics: Any = None
    pipeline: Any = SimpleNamespace(status=SimpleNamespace(num_commits=0, store_error=""), flushed={})
    place = AgentPlace(run_id="r", spool=tmp_path, run_dir=tmp_path, node_dir=tmp_path)
    reporter = StatusReporter(place, "/o", pipeline=pipeline, metrics=metrics, alerts=book)

    def report(*alerts):
        latest.update({alert.id: alert for alert in alerts})
        reporter.report("running", url=None, problem="")
        return [message for *_, message in read_status(tmp_path)["alerts"]]

    return report


def test_what_a_rule_finds_on_all_ranks_in_a_step_is_told_once(told):
    assert told(*(alert_of(id=f"a{rank}", rank=rank, message=f"rank {rank}") for rank in range(8))) == ["rank 0"]
    assert told(alert_of(id="b", first_step=4, message="later")) == ["rank 0", "later"]
    assert told(alert_of(id="b", first_step=4, message="worse")) == ["rank 0", "later"]


def test_of_many_the_first_are_told(told):
    number = 3 * MAX_TOLD

    found = told(*(alert_of(id=f"a{step}", first_step=step, message=str(step)) for step in range(number)))

    assert found == [str(step) for step in range(MAX_TOLD)]
