"""The journal of a controller of the version before is still read."""

import shutil
from pathlib import Path

from trainermon.agent.controller.journal import JOURNAL_FILE, EscalationJournal, EscalationPlan

JOURNAL = Path(__file__).parents[2] / "recorded" / "ledgers" / JOURNAL_FILE


def test_the_escalations_of_the_version_before_are_known(tmp_path):
    shutil.copy(JOURNAL, tmp_path)

    journal = EscalationJournal(tmp_path, now_s=5.0)
    journal.close()

    first, second = journal.escalations.values()
    assert (first.request.id, first.request.run, first.request.ranks, first.request.task) == (
        "S-1",
        "run",
        (0, 3),
        "tensor",
    )
    assert (first.request.num_steps, first.request.reason, first.accepted_s) == (2, "Größe", 1.0)
    assert first.plan == EscalationPlan(id="S-1", issue=1, attempt=2, first_step=40, ranks=(0, 3))
    assert (first.outcome, first.detail, first.coverage) == ("partial", "why", {0: "written", 3: "late"})
    assert (second.request.ranks, second.request.task, second.outcome) == (None, "statistics", None)
    assert second.plan == EscalationPlan(id="S-2-2", issue=2, attempt=2, first_step=50, ranks=(0, 1, 2, 3))
    assert journal.open == [second]
    assert [journal.knows(f"{key}/1/dump") for key in ("S-1", "S-2", "c", "d")] == [True, True, True, False]
