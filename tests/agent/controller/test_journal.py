"""What was accepted is on disk, however the file ends; and the file does not grow for ever."""

from __future__ import annotations

import json
import os

import pytest

from tests.agent.controller.test_planning import request
from trainermon.agent.controller.journal import MIN_KEPT_S, EscalationJournal, EscalationPlan
from trainermon.core.errors import ConfigError

PLAN = EscalationPlan(id="Spike-1", issue=1, attempt=2, first_step=40, ranks=(0, 3))


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "state"


def reopened(folder, now_s=0.0):
    journal = EscalationJournal(folder, now_s=now_s)
    journal.close()
    return journal


def test_everything_comes_back_after_a_restart(folder):
    journal = EscalationJournal(folder, now_s=0.0)
    first = journal.accept(request((0, 3)), now_s=1.0)
    journal.plan(first, PLAN)
    first.coverage = {0: "written", 3: "late"}
    journal.record_end(first, "partial", "why")
    second = journal.accept(request(id="Spike-2", alerts=("b/1/dump",)), now_s=2.0)
    journal.suppress(["c/1/dump"], "too many", now_s=3.0)
    journal.close()

    again = reopened(folder)

    assert again.escalations == {"Spike-1": first, "Spike-2": second}
    assert again.escalations["Spike-1"].plan == PLAN
    assert again.open == [second]
    assert [again.knows(key) for key in ("a/1/dump", "b/1/dump", "c/1/dump", "d/1/dump")] == [True, True, True, False]
    assert again.num_recent("run", since_s=1.5) == 1


@pytest.mark.parametrize("kept", range(0, 120, 20))
def test_a_torn_last_line_costs_only_itself(folder, kept):
    journal = EscalationJournal(folder, now_s=0.0)
    journal.accept(request(), now_s=1.0)
    size = (folder / "escalations.jsonl").stat().st_size
    journal.accept(request(id="Spike-2"), now_s=2.0)
    journal.close()
    os.truncate(folder / "escalations.jsonl", size + kept)

    again = EscalationJournal(folder, now_s=0.0)
    again.accept(request(id="Spike-3"), now_s=3.0)
    again.close()

    assert list(reopened(folder).escalations) == ["Spike-1", "Spike-3"]


def test_what_could_not_be_written_was_never_accepted(folder, monkeypatch):
    journal = EscalationJournal(folder, now_s=0.0)
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, line: write(file, line[:10]))
    with pytest.raises(OSError, match="only 10 of"):
        journal.accept(request(), now_s=1.0)
    monkeypatch.undo()

    assert not journal.escalations
    journal.accept(request(), now_s=1.0)  # the torn line stays behind on its own
    journal.close()
    assert list(reopened(folder).escalations) == ["Spike-1"]


def test_a_failed_fsync_is_not_called_accepted(folder, monkeypatch):
    journal = EscalationJournal(folder, now_s=0.0)

    def fail(file):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space"):
        journal.accept(request(), now_s=1.0)

    assert not journal.escalations
    monkeypatch.undo()
    journal.close()


def test_what_is_over_for_long_is_forgotten_but_never_what_is_open(folder):
    journal = EscalationJournal(folder, now_s=0.0)
    closed = journal.accept(request(), now_s=1.0)
    journal.record_end(closed, "done", "")
    journal.accept(request(id="Spike-2"), now_s=1.0)
    journal.suppress(["c/1/dump"], "too many", now_s=1.0)
    journal.close()

    assert list(reopened(folder, now_s=MIN_KEPT_S).escalations) == ["Spike-1", "Spike-2"]
    late = reopened(folder, now_s=2 * MIN_KEPT_S)

    assert list(late.escalations) == ["Spike-2"]
    kept = [json.loads(line) for line in (folder / "escalations.jsonl").read_text().splitlines()]
    assert [list(entry) for entry in kept] == [["accepted"]]


def test_two_controllers_never_share_a_folder(folder):
    first = EscalationJournal(folder, now_s=0.0)
    with pytest.raises(ConfigError, match="another controller uses it"):
        EscalationJournal(folder, now_s=0.0)
    first.close()
    reopened(folder)


def test_a_line_of_another_version_is_named_and_nothing_is_lost(folder):
    folder.mkdir()
    (folder / "escalations.jsonl").write_text('{"transmogrified": {"id": "x"}}\n')
    with pytest.raises(ConfigError, match="transmogrified"):
        EscalationJournal(folder, now_s=0.0)
    assert "transmogrified" in (folder / "escalations.jsonl").read_text()


def test_a_folder_that_cannot_be_used_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="state_dir"):
        EscalationJournal(tmp_path / "file" / "state", now_s=0.0)


def test_what_one_body_asks_for_is_one_write(folder, monkeypatch):
    journal = EscalationJournal(folder, now_s=0.0)
    syncs = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: syncs.append(fsync(file)))

    taken = journal.record(
        [request(id=f"Spike-{n}", alerts=(f"{n}/1/dump",)) for n in range(50)], {("x/1/dump",): "too many"}, now_s=1.0
    )
    journal.close()

    assert len(syncs) == 1
    assert [one.request.id for one in taken] == [f"Spike-{n}" for n in range(50)]
    again = reopened(folder)
    assert again.open == taken
    assert again.knows("x/1/dump")
