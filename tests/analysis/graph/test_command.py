"""`trainermon graph` on a terminal and as JSON."""

import json
import re
import shutil
from pathlib import Path

import pytest

from tests.analysis.compare.dumps import forward, tensor, write_dump
from trainermon.cli import main

RECORDED = Path(__file__).parents[1] / "compare" / "recorded"
FAULTY, SOUND, BAD = (str(RECORDED / name) for name in ("faulty", "sound", "nan"))


def _document(capsys, *words):
    main(["graph", *words, "--json"])
    (document,) = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    return document


def test_the_sentence_is_that_of_compare_and_what_it_names_is_unfolded(capsys):
    main(["compare", FAULTY, SOUND])
    headline = capsys.readouterr().out.splitlines()[0]

    assert main(["graph", FAULTY, SOUND]) == 0

    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == headline
    (blamed,) = [line for line in lines if line.strip().startswith("▲ layers.1 Block")]
    assert "what it gave to Module.layers.1.fc2.Linear.forward.0" in blamed
    after = lines[lines.index(blamed) + 1 :]
    assert any(line.strip().startswith("fc1 Linear") for line in after)
    assert not any("layer_norm" in line for line in after)


def test_the_first_value_that_is_not_finite_is_named_without_another_dump(capsys):
    # record_with_msprobe.py multiplies by NaN there
    document = _document(capsys, BAD)

    (finding,) = document["findings"]
    assert finding["key"] == "Tensor.mul_.0.forward"
    assert finding["path"] == "micro step 0 > forward > layers.1 > mul_"
    assert document["verdicts"]["blamed"] == 1


def test_counts_add_up(capsys):
    document = _document(capsys, FAULTY, SOUND)
    entries = json.loads(next(Path(FAULTY).rglob("dump.json")).read_bytes())["data"]

    nodes = document["nodes"]
    assert sum(nodes.values()) == sum(document["verdicts"].values())
    assert nodes["module"] + nodes["function"] + nodes["collective"] + nodes["gradients"] == len(entries)
    held = sum(len(entry.get("parameters") or {}) for key, entry in entries.items() if "forward" in key)
    assert nodes["parameter"] == held
    assert nodes["section"] == 2


def test_equal_models_have_equal_structures(capsys):
    sound, bad, faulty = (_document(capsys, path)["structure"] for path in (SOUND, BAD, FAULTY))

    assert faulty == bad
    assert sound != faulty


@pytest.mark.parametrize(("words", "status"), [((SOUND,), 0), ((BAD,), 3), ((SOUND, SOUND), 0), ((FAULTY, SOUND), 3)])
def test_the_exit_status_tells_if_it_is_asked_to(words, status, capsys):
    assert main(["graph", *words, "--exit-code"]) == status


@pytest.mark.parametrize(("words", "mark"), [((FAULTY, SOUND), "+"), ((SOUND, FAULTY), "-")])
def test_a_call_that_one_side_alone_has_stands_where_it_ran(words, mark, capsys):
    main(["graph", *words])

    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    at = lines.index(f"{mark} mul_")
    assert [lines[at - 1].strip(), lines[at + 1].strip()] == ["gelu", "! fc2 Linear"]


def test_what_an_earlier_step_did_to_the_parameters_is_one_finding(tmp_path, capsys):
    for side, weights in (("target", (1.01, 1.25, 1.02)), ("golden", (1.0, 1.0, 1.0))):
        data = {
            f"Module.fc{at}.Linear.forward.0": forward(
                tensor(value=float(at)), output=tensor(value=at * weight), parameters={"weight": tensor(value=weight)}
            )
            for at, weight in enumerate(weights)
        }
        write_dump(tmp_path / side, data)

    document = _document(capsys, str(tmp_path / "target"), str(tmp_path / "golden"))

    (finding,) = document["findings"]
    assert finding["path"] == "micro step 0 > forward > fc1 > weight"
    assert finding["message"].startswith("3 of 3 parameters differ before the step")
    assert finding["message"] in document["sentence"]
    assert document["verdicts"]["error"] == 0
    assert document["verdicts"]["blamed"] == 1


def test_of_ranks_that_share_a_model_the_whole_is_shown_and_how_it_came_about(tmp_path, capsys):
    for rank in range(2):
        data = {"Module.fc.Linear.forward.0": forward(tensor(), output=tensor(shape=(2, 3), value=1.0 + rank))}
        layout = {"axes": {"tp": [rank, 2]}}
        write_dump(tmp_path / "split" / "step0" / f"rank{rank}", data, info={"rank": rank, "layout": layout})
    whole = {"Module.fc.Linear.forward.0": forward(tensor(), output=tensor(shape=(2, 6), value=5.0))}
    write_dump(tmp_path / "whole" / "step0" / "rank0", whole)

    page = tmp_path / "page.html"
    assert main(["graph", str(tmp_path / "split"), str(tmp_path / "whole"), "-o", str(page)]) == 0

    shown = capsys.readouterr().out
    assert "▲ fc Linear  its results differ" in shown
    assert "is merged from 2 ranks (tp 2): 1 rows are parts, 1 copies, 0 sums" in shown
    assert page.exists()


def test_of_several_dumps_the_first_with_a_finding_is_shown(tmp_path, capsys):
    for rank, source in enumerate((SOUND, BAD)):
        shutil.copytree(next(Path(source).rglob("rank0")), tmp_path / "step0" / f"rank{rank}")

    main(["graph", str(tmp_path)])

    sentence, table, tree = capsys.readouterr().out.split("\n\n", 2)
    assert sentence == (
        "Step 0, rank 1: the first value that is not finite arose in mul_ (forward) in layers.1 (Block), "
        "record_with_msprobe.py:27."
    )
    assert "step0 rank1  107    The first value that is not finite arose in mul_" in table.splitlines()[1]
    assert "step0 rank0  105    Everything is finite." in table.splitlines()[2]
    assert "▲ mul_" in tree


def test_ranks_that_say_the_same_share_a_row_below_the_one_that_does_not(tmp_path, capsys):
    for rank in range(20):
        source = BAD if rank == 17 else SOUND
        shutil.copytree(next(Path(source).rglob("rank0")), tmp_path / "step0" / f"rank{rank}")

    main(["graph", str(tmp_path), "--json"])
    documents = json.loads(capsys.readouterr().out)
    main(["graph", str(tmp_path)])

    _, table, _ = capsys.readouterr().out.split("\n\n", 2)
    assert [line.strip().split("  ")[0] for line in table.splitlines()[1:]] == [
        "step0 rank17",
        "step0 rank0 and 18 more",
    ]
    assert [one["label"] for one in documents if one["first"]] == ["step0 rank17"] == [documents[0]["label"]]
    (answer,) = {one["answer"] for one in documents}
    assert answer.startswith("Step 0, rank 17: the first value that is not finite arose in mul_ (forward) in layers.1")


def test_a_step_that_is_not_there_is_refused_with_those_that_are(capsys):
    assert main(["graph", SOUND, "--step", "7"]) == 1

    assert "expected one of step0 rank0" in capsys.readouterr().err


def test_names_cannot_drive_a_terminal(tmp_path, capsys):
    key = "Module.a\x1b[2Jb.Box.forward.0"
    write_dump(tmp_path / "dump", {key: forward(output=tensor(value=float("nan")))}, construct={key: None})

    main(["graph", str(tmp_path / "dump")])

    assert "\x1b" not in capsys.readouterr().out


@pytest.mark.parametrize("stacks", ["[1]", '{"Torch.relu.0.forward": ["a line"]}'])
def test_a_page_of_a_dump_with_damaged_stacks_is_refused_in_words(stacks, tmp_path, capsys):
    data = {"Torch.relu.0.forward": forward(output=tensor())}
    write_dump(tmp_path / "dump", data)
    (tmp_path / "dump" / "stack.json").write_text(stacks)

    assert main(["graph", str(tmp_path / "dump"), "-o", str(tmp_path / "page.html")]) == 1
    assert "not laid out as a dump" in capsys.readouterr().err


def test_a_dump_without_calls_says_so(tmp_path, capsys):
    write_dump(tmp_path / "dump", {})

    assert main(["graph", str(tmp_path / "dump")]) == 0
    assert "no call" in capsys.readouterr().out.lower()


def test_words_of_msprobe_are_understood(capsys, tmp_path):
    main(["graph", FAULTY, SOUND])
    ours = capsys.readouterr().out
    words = ["-tp", FAULTY, "-gp", SOUND, "-o", str(tmp_path / "out"), "-fm", "-tensor_log"]

    assert main(["graph", *words]) == 0

    assert capsys.readouterr().out == ours
    (written,) = (tmp_path / "out").iterdir()
    assert re.fullmatch(r"compare_\d{14}\.vis\.db", written.name)


def test_a_graph_of_nothing_is_refused(capsys):
    assert main(["graph"]) == 1
    assert "expected a dump, or a folder of dumps" in capsys.readouterr().err


@pytest.mark.parametrize("ending", [".pdf", ".png", ".svg", ".json", ".txt", ".csv", ".htm", ".xlsx", ".db"])
def test_a_file_of_another_kind_is_refused_and_no_folder_is_made(ending, tmp_path, capsys):
    output = tmp_path / f"graph{ending}"

    assert main(["graph", str(SOUND), "-o", str(output)]) == 1

    assert "expected a name that ends in .html, .md, .yaml, .vis.db, or a folder" in capsys.readouterr().err
    assert not output.exists()


def test_dumps_that_differ_without_a_call_to_blame_are_no_equal_ones(tmp_path, capsys):
    for side, grown in (("target", True), ("golden", False)):
        given = tensor(requires_grad=grown)
        write_dump(tmp_path / side, {"Functional.gelu.0.forward": forward(given, output=tensor())})

    words = [str(tmp_path / "target"), str(tmp_path / "golden"), "--exit-code"]
    assert main(["compare", *words]) == 3
    capsys.readouterr()

    assert main(["graph", *words]) == 3
    assert "No call is to blame: the dumps differ" in capsys.readouterr().out
