"""A diagnosis says nothing of what it could not read, and says so first."""

import json

import pytest

from tests.analysis.compare.dumps import forward, tensor, write_dump
from tests.analysis.damaged_dumps import SEEN, half_written, killed_before_a_call, run_of, whole, without_folder
from tests.analysis.stored_run import ALL_NAN, grad, store
from trainermon.analysis.diagnosis.diagnose import diagnose
from trainermon.cli import main
from trainermon.core.events import DumpStatus, ReplayEvent, outcome_line

LOSSES = (*SEEN, half_written)


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("lose", LOSSES)
def test_what_could_not_be_read_is_no_part_of_what_is_finite(lose, steps, tmp_path, capsys):
    run = run_of(tmp_path / "run", steps=steps)
    assert main(["diagnose", str(run), "--exit-code"]) == 0
    assert capsys.readouterr().out.startswith(f"Nothing was non-finite in step {steps - 1}\n")
    lose(run / "step0" / "rank1")

    assert main(["diagnose", str(run), "--exit-code"]) == 4

    out = capsys.readouterr().out
    assert out.startswith(
        f"Nothing was non-finite in what could be read of step {steps - 1}; step0/rank1 was not read as"
    )
    assert "All values that could be read are finite" in out
    assert main(["diagnose", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["unread"] == ["step0/rank1"]
    if steps > 1:  # another step, which could be read whole
        assert main(["diagnose", str(run), "--step", "1", "--exit-code"]) == 0


@pytest.mark.parametrize("lose", [half_written, killed_before_a_call])
def test_of_a_step_without_a_call_nothing_is_known(lose, tmp_path, capsys):
    run = run_of(tmp_path / "run", ranks=1)
    lose(run / "step0" / "rank0")

    assert main(["diagnose", str(run), "--exit-code"]) == 4

    assert capsys.readouterr().out.startswith("Nothing is known of step 0: step0/rank0 was not read as a whole\n")


def test_a_value_that_is_not_finite_counts_more_than_what_could_not_be_read(tmp_path):
    run = run_of(tmp_path / "run")
    half_written(run / "step0" / "rank1")
    weight = {"weight": tensor(value=float("nan"))}
    call = forward(tensor(), output=tensor(value=float("nan")), parameters=weight)
    write_dump(run / "step1" / "rank0", {"Module.fc.Linear.forward.0": call})

    assert main(["diagnose", str(run), "--exit-code"]) == 3


def test_of_many_dumps_that_could_not_be_read_three_are_named(tmp_path, capsys):
    run = run_of(tmp_path / "run", ranks=6)
    for rank in range(1, 6):
        half_written(run / "step0" / f"rank{rank}")

    main(["diagnose", str(run)])

    named = "step0/rank1, step0/rank2, step0/rank3 and 2 more were not read as a whole"
    assert " ".join(capsys.readouterr().out.split()).startswith(
        f"Nothing was non-finite in what could be read of step 0; {named}"
    )


def test_a_single_dump_that_is_whole_is_finite(tmp_path):
    assert main(["diagnose", str(whole(tmp_path / "dump")), "--exit-code"]) == 0


@pytest.mark.parametrize("sides", ["run", "reference", "both"])
@pytest.mark.parametrize("lose", [*SEEN, without_folder])
def test_what_was_not_compared_is_no_part_of_what_is_equal(lose, sides, tmp_path, capsys):
    run, reference = (run_of(tmp_path / name) for name in ("run", "reference"))
    words = ["diagnose", str(run), "--against", str(reference), "--exit-code"]
    assert main(words) == 0
    assert capsys.readouterr().out.startswith("No difference from the reference was found\n")
    for side in (run, reference) if sides == "both" else [tmp_path / sides]:
        lose(side / "step0" / "rank1")
    if lose is without_folder and sides == "both":
        return  # nothing tells that there was one

    assert main(words) == 4

    first = capsys.readouterr().out.splitlines()[0]
    one_sided = "No value differs from the reference, but step 0 has calls on one side only"
    assert first in ("No difference from the reference was found; step0 rank1 was not compared as a whole", one_sided)


def test_a_replay_that_was_refused_is_told_with_its_reason_and_not_advised(tmp_path):
    store(tmp_path, {5: {0: {grad("emb.weight"): ALL_NAN}}})
    event = ReplayEvent(
        step=5, status=DumpStatus.REFUSED, dump=None, reason="no (kept) forward", seconds=0.1, micro_steps=0, bytes=0
    )
    log = tmp_path / "nodes/node/agent.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text(f"2026-01-02 03:04:05,678 INFO {outcome_line(event, 0)}\n2026-01-02 INFO rank 0 is gone\n")

    diagnosis = diagnose(tmp_path)

    assert diagnosis.reason.startswith("The replay of rank 0 was refused: no (kept) forward. ")
    assert "replay" not in (diagnosis.collect.monitor or {})
