"""Of dumps in two runs, settings that differ are said before any tensor, as `diagnose --against` says them."""

import json

import pytest

from tests.analysis.compare.dumps import forward, tensor, write_dump
from trainermon.analysis.compare.run_settings import setting_differences
from trainermon.analysis.diagnosis.against import settings as against
from trainermon.cli import main

ADAMW: dict[str, object] = {
    "optimizer.class": "AdamW",
    "optimizer.lr": 0.01,
    "optimizer.betas": [0.9, 0.999],
    "clip_grad": 1.0,
}


def run_with(folder, hyperparameters, *, dump="dumps/step3/rank0", value=1.0):
    (folder / "ranks").mkdir(parents=True)
    about = {"rank": 0, "coordinates": {"world_size": 1}, "framework": "ddp"}
    if hyperparameters is not None:
        about["environment"] = {"torch": {"version": "2.6"}, "hyperparameters": hyperparameters}
    (folder / "ranks/rank00000.json").write_text(json.dumps(about))
    call = forward(tensor(value=value), output=tensor(value=2 * value))
    write_dump(folder / dump, {"Module.fc.Custom.forward.0": call})
    return folder


CHANGES: list[dict[str, object]] = [
    {"optimizer.lr": 0.02},
    {"optimizer.betas": [0.8, 0.999]},
    {"clip_grad": 0.5},
    {"optimizer.class": "SGD", "optimizer.lr": 0.02},
]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("inside", ["", "dumps", "dumps/step3/rank0", "dumps/step3/rank0/dump.json"])
def test_settings_of_the_runs_around_two_dumps_are_those_of_diagnose(tmp_path, change, inside):
    ours, theirs = run_with(tmp_path / "a", ADAMW | change), run_with(tmp_path / "b", ADAMW)

    found = setting_differences(ours / inside, theirs / inside)

    assert len(found) == len(change)
    assert found == against.setting_differences(ours, theirs)


@pytest.mark.parametrize("value", [1.0, 2.0])
def test_settings_are_said_before_the_sentence(tmp_path, capsys, value):
    ours, theirs = run_with(tmp_path / "a", ADAMW | CHANGES[0], value=value), run_with(tmp_path / "b", ADAMW)

    main(["compare", str(ours), str(theirs)])

    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == [
        "1 setting differs, look there first, what follows may come of it:",
        "  hyperparameters: optimizer.lr is 0.02, in the reference 0.01",
        "",
    ]
    assert lines[3].startswith("The dumps agree" if value == 1.0 else "No call is to blame")

    main(["compare", str(ours), str(theirs), "--json"])

    (document,) = json.loads(capsys.readouterr().out)
    assert document["settings"] == [lines[1].strip()]


@pytest.mark.parametrize("other", [ADAMW, None])
def test_nothing_is_said_of_equal_settings_or_where_a_run_kept_none(tmp_path, capsys, other):
    ours, theirs = run_with(tmp_path / "a", ADAMW), run_with(tmp_path / "b", other)

    main(["compare", str(ours), str(theirs)])

    assert capsys.readouterr().out.startswith("The dumps agree")


def test_two_dumps_of_one_run_have_one_set_of_settings(tmp_path):
    run = run_with(tmp_path / "a", ADAMW)

    assert setting_differences(run / "dumps", run / "dumps/step3") == ()
