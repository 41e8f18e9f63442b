"""A real Alertmanager with the example configuration: what it holds back, and where it would send the rest."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.alerts.servers import Server, alertmanager
from tests.server_programs import wait_until

pytestmark = pytest.mark.server

EXAMPLE = Path(__file__).parents[3] / "trainermon" / "alerts" / "generated" / "alertmanager.yaml"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    configuration = yaml.safe_load(EXAMPLE.read_text())
    for receiver in configuration["receivers"]:
        receiver.pop("webhook_configs", None)  # the routes stay, nothing is sent
    with alertmanager(tmp_path_factory.mktemp("alertmanager"), yaml.safe_dump(configuration)) as started:
        yield started


def states(server: Server, run: str, *names: str, **labels: str) -> dict[str, str]:
    """Return what becomes of alerts that fire together in a run: `active` or `suppressed`, by name."""
    server.post(
        "/api/v2/alerts",
        [{"labels": {"alertname": name, "severity": "warning", "run": run, **labels}} for name in names],
    )

    def found() -> list[dict]:
        return server.get("/api/v2/alerts", filter=f'run="{run}"')

    wait_until(lambda: len(found()) == len(names) and "unprocessed" not in str(found()), what="alerts processed")
    return {alert["labels"]["alertname"]: alert["status"]["state"] for alert in found()}


def test_a_hang_holds_back_stragglers_and_stragglers_slow_steps(server: Server) -> None:
    slow = ("TrainermonThroughputDrop", "TrainermonStepTimeSlow")

    hang = states(server, "hangs", "TrainermonHang", "TrainermonStraggler", *slow)
    straggler = states(server, "straggles", "TrainermonStraggler", *slow)
    alone = states(server, "slow", "TrainermonStepTimeSlow")

    assert hang.pop("TrainermonHang") == straggler.pop("TrainermonStraggler") == "active"
    assert set(hang.values()) == set(straggler.values()) == {"suppressed"}
    assert alone == {"TrainermonStepTimeSlow": "active"}


def test_lost_gradients_hold_back_what_follows_from_them_on_every_rank_of_the_run_only(server: Server) -> None:
    first = states(server, "nan", "TrainermonGradientNonfinite", rank="3")
    consequence = states(server, "nan", "TrainermonGradientNonfinite", "TrainermonLossNonfinite", rank="3")
    other_run = states(server, "healthy", "TrainermonLossSpike")

    assert first["TrainermonGradientNonfinite"] == "active"
    assert consequence["TrainermonLossNonfinite"] == "suppressed"
    assert other_run == {"TrainermonLossSpike": "active"}


def test_an_alert_goes_to_the_receivers_that_it_is_for(server: Server) -> None:
    expected = {
        "TrainermonWatchdog": ({"severity": "none"}, ["dead-man"]),
        "TrainermonRunStalled": ({"severity": "critical"}, ["on-call"]),
        "TrainermonSeriesLeftOut": ({"severity": "info"}, ["quiet"]),
        "TrainermonLossSpike": ({"severity": "warning"}, ["team"]),
        "TrainermonRankLossApart": ({"severity": "warning", "escalate": "statistics"}, ["controller", "team"]),
        "OwnRule": ({"severity": "critical", "escalate": "tensor"}, ["controller", "on-call"]),
    }
    for number, (name, (labels, receivers)) in enumerate(expected.items()):
        states(server, f"routed {number}", name, **labels)
        (alert,) = server.get("/api/v2/alerts", filter=f'run="routed {number}"')
        assert sorted(receiver["name"] for receiver in alert["receivers"]) == receivers, name
