"""What to record next: the advice is a configuration that both tools read without a complaint."""

import json

import pytest

from trainermon.analysis.diagnosis.next_collection import (
    dump_of_step,
    more_statistics,
    together,
    write_configurations,
)
from trainermon.core.config import load_config
from trainermon.core.errors import DumpError
from trainermon.core.values import Kind


def test_a_dump_is_asked_for_of_the_step_the_ranks_and_the_calls_in_question():
    order = dump_of_step(7, [1, 2], "no dump tells", calls=["Module.fc.Linear.forward.0"], task="tensor")

    assert order.reason == "no dump tells: dump step 7 on ranks 1, 2 with modules and functions"
    assert order.debugger == {
        "task": "tensor", "dump_path": "dumps", "level": "mix", "step": [7], "rank": [1, 2],
        "tensor": {"list": ["Module.fc.Linear.forward.0"]},
    }  # fmt: skip
    assert dump_of_step(7, [], "why").reason == "why: dump step 7 with modules and functions"


def test_only_kinds_that_are_not_stored_are_asked_for():
    assert more_statistics([Kind.GRAD_REDUCED, Kind.PARAM_UPDATED, Kind.EXP_AVG, Kind.ACTV], "why") is None
    order = more_statistics([Kind.GRAD_REDUCED, Kind.ACTV], "too little", start_step=9)

    assert order is not None
    assert order.reason == "too little: store param_distribution, mv_distribution"
    assert order.monitor is not None
    assert order.monitor["start_step"] == 7  # two steps before


def test_of_two_configurations_for_one_tool_the_first_counts():
    first, second = dump_of_step(3, [], "one"), dump_of_step(4, [], "two")
    statistics = more_statistics([], "three")

    order = together(None, first, second, statistics)

    assert order is not None
    assert order.reason.startswith("one: dump step 3 with modules and functions; two: dump step 4")
    assert (order.debugger, order.monitor) == (first.debugger, statistics.monitor if statistics else None)
    assert together(None, None) is None


def test_the_files_are_read_as_they_were_advised(tmp_path):
    order = together(dump_of_step(3, [0], "one"), more_statistics([], "two"))

    debugger, monitor = write_configurations(order, tmp_path / "next")

    config, notes = load_config(monitor)
    assert (config.wg_distribution, config.xy_distribution, config.start_step, notes) == (True, True, 0, ())
    assert json.loads(debugger.read_text())["step"] == [3]
    assert write_configurations(None, tmp_path / "none") == ()
    assert not (tmp_path / "none").exists()


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")

    with pytest.raises(DumpError, match=r"file/next cannot be written .*: name another folder"):
        write_configurations(dump_of_step(3, [], "why"), tmp_path / "file" / "next")
