"""Notes at nodes, and modules that were matched by hand: what is kept, and what the next comparison makes of it."""

from __future__ import annotations

import json
import os
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tests.analysis.compare.dumps import forward, tensor, write_dump
from trainermon.analysis.compare.calls import compare
from trainermon.cli import main
from trainermon.core.errors import DumpError
from trainermon.dashboards.graph_notes import (
    MAX_BYTES,
    NO_NOTES,
    GraphNotes,
    HandMatch,
    NotesChange,
    keep_change,
    notes_file,
    parse_notes,
    read_notes,
    write_notes,
)

names = st.text(min_size=1, max_size=12)
sides = st.lists(names, min_size=1, max_size=3).map(tuple)
all_notes = st.builds(
    GraphNotes, st.dictionaries(names, names), st.lists(st.builds(HandMatch, sides, sides)).map(tuple)
)


def write_renamed(folder: Path) -> tuple[Path, Path]:
    """Write two dumps of which one calls a layer otherwise."""
    for side, name in (("target", "fc1"), ("golden", "dense")):
        data = {
            f"Module.{name}.Linear.forward.0": forward(tensor(value=1.0), output=tensor(value=2.0)),
            "Module.head.Linear.forward.0": forward(tensor(value=2.0), output=tensor(value=3.0)),
        }
        write_dump(folder / side / "step0" / "rank0", data)
    return folder / "target", folder / "golden"


def write_renamed_around(folder: Path) -> tuple[Path, Path]:
    """Write two dumps of which one calls a module otherwise, and what is within it alike."""
    for side, name in (("target", "mlp"), ("golden", "ffn")):
        data = {
            f"Module.{name}.up.Linear.forward.0": forward(tensor(value=1.0), output=tensor(value=1.5)),
            f"Module.{name}.{name.title()}.forward.0": forward(tensor(value=1.0), output=tensor(value=2.0)),
            "Module.head.Linear.forward.0": forward(tensor(value=2.0), output=tensor(value=3.0)),
        }
        write_dump(folder / side / "step0" / "rank0", data)
    return folder / "target", folder / "golden"


RENAMED = HandMatch(("mlp.Mlp",), ("ffn.Ffn",))


def partners(target: Path, golden: Path) -> set[tuple[str, str]]:
    """Return the keys of calls that `trainermon compare` holds against each other."""
    (found,) = compare(target, golden)
    return {(one.target.key, one.golden.key) for one in found.calls if one.target and one.golden}


@given(all_notes)
def test_what_was_written_is_read_again(notes: GraphNotes) -> None:
    assert parse_notes(json.dumps(notes.as_json()).encode()) == notes


few = st.sampled_from(["", "a", "b", "a b", "c"])


def at_one(text: str) -> GraphNotes:
    return GraphNotes({"place": text} if text else {}, ())


@given(few, few, few)
def test_what_two_people_write_at_one_node_is_kept_of_both(seen: str, theirs: str, own: str) -> None:
    change = NotesChange(at_one(seen), at_one(own))

    kept = change.applied_to(at_one(theirs)).notes.get("place", "")

    assert theirs in kept or theirs == seen
    assert own in kept or own == seen
    if theirs == seen:
        assert kept == own
    if own == seen:
        assert kept == theirs


@given(all_notes, all_notes, all_notes)
def test_a_change_leaves_alone_what_it_does_not_name(before: GraphNotes, after: GraphNotes, others: GraphNotes) -> None:
    kept = NotesChange(before, after).applied_to(others)

    for place in others.notes.keys() - before.notes.keys() - after.notes.keys():
        assert kept.notes[place] == others.notes[place]
    assert set(kept.matches) == (set(others.matches) - (set(before.matches) - set(after.matches))) | (
        set(after.matches) - set(before.matches)
    )
    assert NotesChange(before, before).applied_to(others) == others


def test_notes_that_are_written_at_once_are_all_kept(tmp_path: Path) -> None:
    together = threading.Barrier(8)

    def write(number: int) -> None:
        together.wait()
        after = GraphNotes({"place": f"<{number}>"}, (HandMatch((f"a{number}",), ("b",)),))
        keep_change(tmp_path, NotesChange(NO_NOTES, after))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(8)))

    kept = read_notes(tmp_path)
    assert sorted(kept.notes["place"].split()) == [f"<{number}>" for number in range(8)]
    assert {one.target for one in kept.matches} == {(f"a{number}",) for number in range(8)}


def test_notes_that_could_not_be_read_again_are_refused(tmp_path: Path) -> None:
    write_notes(tmp_path, at_one("before"))
    many = {f"{number:0100}": "x" * 9_000 for number in range(MAX_BYTES // 9_000)}

    for change in (at_one("x" * 9_999), GraphNotes(many, ())):
        with pytest.raises(ValueError, match="expected"):
            keep_change(tmp_path, NotesChange(NO_NOTES, change))

    assert read_notes(tmp_path) == at_one("before")


def test_a_match_by_hand_counts_in_the_next_comparison_and_graph(tmp_path: Path, capsys: Any) -> None:
    target, golden = write_renamed_around(tmp_path)
    head = "Module.head.Linear.forward.0"
    assert partners(target, golden) == {(head, head)}

    write_notes(target, GraphNotes({}, (RENAMED,)))

    assert partners(target, golden) == {
        (head, head),
        ("Module.mlp.Mlp.forward.0", "Module.ffn.Ffn.forward.0"),
        ("Module.mlp.up.Linear.forward.0", "Module.ffn.up.Linear.forward.0"),  # what is within goes with it
    }
    main(["compare", str(target), str(golden)])
    assert "mlp = ffn (by hand): 1 calls were matched" in capsys.readouterr().out
    main(["graph", str(target), str(golden), "--json"])
    assert json.loads(capsys.readouterr().out)[0]["verdicts"]["unmatched"] == 0


def test_matches_become_a_mapping_file_that_says_the_same_elsewhere(tmp_path: Path, capsys: Any) -> None:
    target, golden = write_renamed_around(tmp_path)
    write_notes(target, GraphNotes({}, (RENAMED,)))
    notes, rules = tmp_path / "saved.json", tmp_path / "match.yaml"
    assert main(["graph", str(target), str(golden), "-o", str(rules)]) == 0
    notes_file(target).rename(notes)

    assert yaml.safe_load(rules.read_text()) == [{"target": "mlp", "golden": "ffn"}]
    for file in (rules, notes):  # also what the page saves
        for command in ("compare", "graph"):
            capsys.readouterr()
            assert main([command, str(target), str(golden), "--match", str(file)]) == 0
            assert "mlp = ffn" in capsys.readouterr().out
        main(["graph", str(target), str(golden), "--match", str(file), "--json"])
        assert json.loads(capsys.readouterr().out)[0]["verdicts"]["unmatched"] == 0


def test_a_mapping_file_of_nothing_is_refused(tmp_path: Path, capsys: Any) -> None:
    target, golden = write_renamed_around(tmp_path)

    assert main(["graph", str(target), str(golden), "-o", str(tmp_path / "match.yaml")]) == 1
    assert "matched by hand" in capsys.readouterr().err


def test_names_that_were_exchanged_are_matched_crosswise(tmp_path: Path) -> None:
    for side, (one, other) in (("target", (1.0, 2.0)), ("golden", (2.0, 1.0))):
        data = {
            "Module.a.Linear.forward.0": forward(tensor(value=7.0), output=tensor(value=one)),
            "Module.b.Linear.forward.0": forward(tensor(value=7.0), output=tensor(value=other)),
        }
        write_dump(tmp_path / side, data)
    crossed = [(f"Module.{one}.Linear.forward.0", f"Module.{two}.Linear.forward.0") for one, two in ("ab", "ba")]
    by_hand = (HandMatch(("a.Linear",), ("b.Linear",)), HandMatch(("b.Linear",), ("a.Linear",)))
    write_notes(tmp_path / "target", GraphNotes({}, by_hand))

    assert partners(tmp_path / "target", tmp_path / "golden") == set(crossed)


def test_who_has_the_name_of_a_matched_module_stands_alone(tmp_path: Path) -> None:
    write_dump(tmp_path / "golden", {"Module.b.Linear.forward.0": forward(output=tensor())})
    data = {f"Module.{name}.Linear.forward.0": forward(output=tensor()) for name in "ab"}
    write_dump(tmp_path / "target", data)
    write_notes(tmp_path / "target", GraphNotes({}, (HandMatch(("a.Linear",), ("b.Linear",)),)))

    found = partners(tmp_path / "target", tmp_path / "golden")

    assert found == {("Module.a.Linear.forward.0", "Module.b.Linear.forward.0")}


def test_several_that_do_what_one_does_are_joined(tmp_path: Path) -> None:
    wide = tensor(shape=(2, 6), value=1.0)
    data = {f"Module.a.{name}.Linear.forward.0": forward(tensor(), output=tensor(value=1.0)) for name in "qk"}
    write_dump(tmp_path / "target", data)
    write_dump(tmp_path / "golden", {"Module.a.qk.Linear.forward.0": forward(tensor(), output=wide)})
    by_hand = HandMatch(("a.q.Linear", "a.k.Linear"), ("a.qk.Linear",))
    write_notes(tmp_path / "target", GraphNotes({}, (by_hand,)))

    (found,) = compare(tmp_path / "target", tmp_path / "golden")

    assert [one.golden.key for one in found.calls if one.golden] == ["Module.a.qk.Linear.forward.0"]
    assert found.members == {"Module.a.{q,k}.Linear.forward.0": tuple(data)}


def test_the_file_lies_beside_the_dump_for_its_owner_alone(tmp_path: Path) -> None:
    write_notes(tmp_path, GraphNotes({"Module.fc.Linear.forward.0": "look here"}, ()))

    assert notes_file(tmp_path) == tmp_path / "graph_notes.json"
    assert stat.S_IMODE(os.stat(tmp_path / "graph_notes.json").st_mode) & 0o077 == 0
    assert read_notes(tmp_path).notes == {"Module.fc.Linear.forward.0": "look here"}
    (tmp_path / "other").mkdir()
    assert read_notes(tmp_path / "other") == GraphNotes({}, ())


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"notes": []}',
        '{"notes": {"a": 1}}',
        '{"matches": [{"target": ["a"]}]}',
        '{"matches": [3]}',
        pytest.param("[" * 100_000, id="nested"),
    ],
)
def test_a_damaged_file_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "graph_notes.json").write_text(text)

    with pytest.raises(DumpError, match=r"graph_notes\.json"):
        read_notes(tmp_path)


def test_a_pipe_of_that_name_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "graph_notes.json")

    with pytest.raises(DumpError, match="no regular file"):
        read_notes(tmp_path)
