"""What a post-mortem says, and what is kept of a rank's last steps."""

import array
import json
import math
from typing import Any

from trainermon.agent.hang.evidence import (
    ChildProcess,
    GroupState,
    PendingCall,
    ProcessExit,
    RankAnswer,
    RankEvidence,
    StackFrame,
    ThreadStack,
    spans,
)
from trainermon.agent.hang.records import KEPT_STEPS, LastRecords, StepRecord
from trainermon.agent.hang.report import PostMortem, read_tail, render_report, write_report
from trainermon.agent.hang.verdict import verdict
from trainermon.core.events import FailedEvent, WarningEvent
from trainermon.core.journal import Header
from trainermon.core.values import Coordinates, Kind, SeriesKey, StatBlock

FRAMES = (StackFrame(function="train", file="/job/train.py", line=31),)
RANKS = (
    RankEvidence(
        rank=0,
        step=7,
        silent_s=61.4,
        process_state="S",
        groups=(GroupState(name="dp", ranks=(0, 1), entered=5, in_flight=(PendingCall(op="all_reduce", sequence=5),)),),
        rungs=(RankAnswer(name="py-spy", said="not installed"),),
        children=(ChildProcess(pid=99, name="pt_data_worker", state="D"),),
    ),
    RankEvidence(
        rank=1,
        step=7,
        life="dead",
        exit=ProcessExit(signal=9),
        error="Traceback\nValueError: a|b",
        stacks=(ThreadStack(thread="MainThread", is_main=True, frames=FRAMES),),
    ),
)


def post_mortem(**changes):
    known: dict[str, Any] = {
        "rule": "hang",
        "run_id": "run",
        "host": "node",
        "attempt": 2,
        "step": 7,
        "time_s": 0.0,
        "verdict": verdict(RANKS),
        "ranks": RANKS,
        "records": {0: [StepRecord(6, 1.0, {"loss": 0.5, "skipped": math.nan})]},
        "hints": ("the kernel has killed 1 processes",),
        "log": ("line one",),
    }
    return PostMortem(**(known | changes))


def test_report_has_verdict_ranks_stacks_and_log():
    text = render_report(post_mortem())

    assert text.startswith("# Hang of run run at step 7\n\n**rank 1 was killed by SIGKILL; rank 0 waits in")
    assert "| 0 | waits | step | 7 | 61 s | S | all_reduce #5 of dp |" in text
    assert "| 1 | was killed by SIGKILL | step | 7 | 0 s | – | – |" in text
    for part in (
        "* the kernel has killed 1 processes",
        "* step 6: loss 0.5",
        "* group dp (ranks 0–1): entered #5",
        "* py-spy: not installed",
        "* child 99 (pt_data_worker): state D",
        "ValueError: a|b",
        "train (/job/train.py:31)",
        "```\nline one\n```",
    ):
        assert part in text


def test_cells_cannot_break_the_table():
    one = RankEvidence(rank=0, phase="a|b\nc")

    assert "| a\\|b c |" in render_report(post_mortem(ranks=(one,), verdict=verdict([one])))


def test_files_are_private_and_json_has_no_nan(tmp_path):
    write_report(tmp_path / "reports", "name", post_mortem())

    plain = json.loads((tmp_path / "reports" / "name.json").read_text(), parse_constant=lambda text: 1 / 0)
    assert plain["records"] == {"0": [{"step": 6, "time_s": 1.0, "values": {"loss": 0.5, "skipped": None}}]}
    assert plain["verdict"]["culprits"][0]["rank"] == 1
    for path in (tmp_path / "reports").iterdir():
        assert path.stat().st_mode & 0o777 == 0o600


def test_tail_of_a_long_log_and_of_none(tmp_path):
    path = tmp_path / "agent.log"
    assert read_tail(path) == ()
    path.write_text("".join(f"{'x' * 200} {number}\n" for number in range(1000)))

    tail = read_tail(path)

    assert tail[-1].endswith(" 999")
    assert len(tail) <= 40


KEYS = (SeriesKey(Kind.LOSS, "loss"), SeriesKey(Kind.GRAD_REDUCED, "w"), SeriesKey(Kind.STEP, "loss_scale"))


def header(attempt=1):
    return Header(
        run_id="run",
        attempt=attempt,
        coordinates=Coordinates(rank=3),
        host="node",
        pid=1,
        started_s=0.0,
        series=KEYS,
        placements=(None,) * len(KEYS),
    )


def block(step, *, loss, scale):
    """Moments of two elements, `loss` and 2, of a gradient, and of one scale."""
    rows = [(2, 0, 0, loss + 2, 0, 0, 0, 0), (9, 0, 0, 1, 0, 0, 0, 0), (1, 0, 0, scale, 0, 0, math.isnan(scale), 0)]
    values = array.array("d", [value for column in zip(*rows, strict=True) for value in column])
    return StatBlock(step=step, time_s=float(step), series=array.array("I", range(3)), values=values)


def test_last_steps_are_kept_with_the_mean_of_their_numbers():
    records = LastRecords()
    for step in range(KEPT_STEPS + 5):
        records.on_block(header(), KEYS, block(step, loss=4.0, scale=1024.0))

    kept = records.steps(3)

    assert [record.step for record in kept] == list(range(5, KEPT_STEPS + 5))
    assert kept[-1].values == {"loss": 3.0, "loss_scale": 1024.0}
    assert records.steps(0) == []


def test_number_that_is_none_is_nan():
    records = LastRecords()
    records.on_block(header(), KEYS, block(0, loss=4.0, scale=math.nan))

    assert math.isnan(records.steps(3)[0].values["loss_scale"])


def test_error_belongs_to_its_attempt():
    records = LastRecords()
    records.on_event(header(attempt=1), FailedEvent(step=3, message="boom"))
    records.on_event(header(attempt=1), WarningEvent(message="other"))

    assert records.failure(3, attempt=1) == FailedEvent(step=3, message="boom")
    assert records.failure(3, attempt=2) is None
    assert records.failure(0, attempt=1) is None


def test_ranks_in_words():
    assert (spans([4]), spans([2, 0, 1, 7])) == ("rank 4", "ranks 0–2, 7")
