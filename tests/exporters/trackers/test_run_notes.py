"""What goes to a tracking service holds no secret of a run's settings and alerts, and all else as it is."""

import json

import pytest

from trainermon.exporters.trackers.run_notes import alerts_of, settings_of

TOKEN = "hf_QZ7XK2MPV4LRT6NWB3YCD5GHJ2SAEFU3"


@pytest.mark.parametrize("place", ["name", "look", "list", "url", "key"])
def test_settings_have_no_secret(tmp_path, place):
    config: dict[str, object] = {"flush_s": 5, "tags": ["small", "first try"], "project": "gpt"}
    secrets: dict[str, dict[str, object]] = {
        "name": {"hub": {"password": "quietriverbend7"}},
        "look": {"note": TOKEN},
        "list": {"words": ["a", TOKEN]},
        "url": {"tracking_uri": f"https://anne:quietriverbend7@example.org/?token={TOKEN}"},
        "key": {TOKEN: 1},
    }
    (tmp_path / "run.json").write_text(json.dumps({"config": {**config, **secrets[place]}, "run_id": "run"}))

    found = settings_of(tmp_path)

    said = json.dumps(found)
    assert TOKEN not in said
    assert "quietriverbend7" not in said
    assert "<redacted>" in said
    assert found["config.flush_s"] == 5
    assert (found["config.tags"], found["config.project"], found["run_id"]) == ("small, first try", "gpt", "run")


def test_alerts_have_no_secret(tmp_path):
    alert = {"id": "1", "rule": "rank-failed", "first_step": 3, "severity": "critical", "state": "firing"}
    message = f"the script failed: password=quietriverbend7, {TOKEN} is refused"
    (tmp_path / "alerts.jsonl").write_text(json.dumps({**alert, "message": message}) + "\n")

    (note,) = alerts_of(tmp_path)

    assert note.rule == "rank-failed"
    assert note.line.startswith("step 3: critical: the script failed: password=<redacted>")
    assert "quietriverbend7" not in note.line
    assert TOKEN not in note.line
