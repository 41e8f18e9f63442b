"""The order of single anomalies: that of msprobe, except where it sorts parameters before the forward."""

import argparse
import json
import logging

import pytest

from trainermon.core.errors import StoreError
from trainermon.msprobe.anomaly_order import add_arguments, first_anomalies, main

# What msprobe's own processor makes of ANOMALIES, in order; tests/msprobe/test_oracle.py asks it again.
ORDER_OF_MSPROBE = [
    "0:a.input:0/rank0/actv_step_1_call_1",
    "0:a.input:0/rank1/actv_step_1_call_0",
    "1:b.input:0/rank0/actv_step_1_call_3",
    "1:b.weight/rank1/pre_grad_step_1_call_9",
    "0:b.output:0/rank1/actv_grad_step_1_call_7",
    "0:a.output:0/rank0/actv_grad_step_1_call_4",
    "0:a.weight/rank0/post_grad_step_1_call_6",
    "0:a.weight/rank0/exp_avg_sq_step_1_call_-1",
    "0:a.input:1/rank0/actv_step_1_call_2",
    "0:a.input:0/rank0/actv_step_2_call_1",
]


def record(key, *, pp=0, micro=0):
    tag, _, rest = key.partition("_step_")
    step, _, call = rest.partition("_call_")
    return key, {
        "rank": int(tag.split("/rank")[1].split("/")[0]),
        "step": int(step),
        "micro_step": micro,
        "pp_stage": pp,
        "vpp_stage": int(tag.split(":")[0]),
        "call_id": int(call),
        "tag_name": tag,
        "message": f"about {tag}",
        "group_mates": [0, 1],
    }


ANOMALIES = {
    rank: dict(
        record(key, pp=rank, micro=1 if ":1/" in key else 0)
        for key in sorted(ORDER_OF_MSPROBE, reverse=True)
        if f"/rank{rank}/" in key
    )
    for rank in (0, 1)
}


@pytest.fixture
def folder(tmp_path):
    for rank, records in ANOMALIES.items():
        (tmp_path / f"rank{rank}").mkdir()
        (tmp_path / f"rank{rank}" / "anomaly.json").write_text(json.dumps(records))
    return tmp_path


def test_the_order_is_that_of_msprobe(folder):
    assert list(first_anomalies(folder, limit=100)) == ORDER_OF_MSPROBE


def test_parameters_come_about_in_the_optimizer(folder):
    path = folder / "rank0" / "anomaly.json"
    extra = dict(record(f"0:a.weight/rank0/{metric}_step_1_call_-1") for metric in ("param_origin", "param_updated"))
    path.write_text(json.dumps({**extra, **ANOMALIES[0]}))

    found = list(first_anomalies(folder, limit=100))

    places = [found.index(key) for key in extra]
    assert min(places) > found.index("0:a.weight/rank0/post_grad_step_1_call_6")
    assert max(places) < found.index("0:a.input:1/rank0/actv_step_1_call_2")


def run(*words):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return main(parser.parse_args([str(word) for word in words]))


def test_the_first_few_of_some_steps_are_written_and_listed(folder, capsys):
    assert run(folder, "-o", folder / "out", "-k", 1, "-s", "[2, 5]") == 0

    written = json.loads((folder / "out" / "anomaly_analyse.json").read_text())
    assert list(written) == [ORDER_OF_MSPROBE[-1]]
    assert written[ORDER_OF_MSPROBE[-1]] == ANOMALIES[0][ORDER_OF_MSPROBE[-1]]
    assert "0: about 0:a.input:0/rank0/actv\n" in capsys.readouterr().out


def test_they_are_given_to_programs_too(folder, capsys):
    assert run(folder, "--json") == 0

    assert json.loads(capsys.readouterr().out) == json.loads((folder / "anomaly_analyse.json").read_text())


def test_what_is_no_record_is_left_out_and_said(folder, caplog):
    (folder / "rank1" / "anomaly.json").write_text('{"x": {"step": 1}, "y": 3}')

    with caplog.at_level(logging.WARNING):
        found = first_anomalies(folder, limit=100)

    assert list(found) == [key for key in ORDER_OF_MSPROBE if "/rank0/" in key]
    assert [record.getMessage().split(": ")[1].split()[0] for record in caplog.records] == ["x", "y"]


@pytest.mark.parametrize("words", [["-k", "0"], ["-s", "3"], ["-s", "['a']"], ["-s", "[True]"], ["-k", "x"]])
def test_wrong_arguments_are_refused(folder, words):
    with pytest.raises(SystemExit):
        run(folder, *words)


def test_files_that_cannot_be_read_are_named(folder):
    (folder / "rank0" / "anomaly.json").write_text("[")

    with pytest.raises(StoreError, match=r"rank0.anomaly\.json cannot be read"):
        first_anomalies(folder)
    with pytest.raises(StoreError, match="is not a folder"):
        first_anomalies(folder / "none")


def test_a_folder_without_records_is_refused_and_nothing_is_written(tmp_path):
    (tmp_path / "rank0").mkdir()
    parser = argparse.ArgumentParser()
    add_arguments(parser)

    with pytest.raises(StoreError, match=r"holds no rank\*/anomaly.json; give the folder that does"):
        main(parser.parse_args([str(tmp_path)]))

    assert not list(tmp_path.glob("*.json"))
