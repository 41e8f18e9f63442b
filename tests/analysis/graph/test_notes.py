"""Notes at nodes, and modules that were matched by hand: what is kept, and what the next comparison makes of it."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.analysis.compare.dumps import forward, tensor, write_dump
from trainermon.analysis.compare.mappings import NameMappings
from trainermon.analysis.graph.notes import GraphNotes, HandMatch, notes_file, parse_notes, read_notes, write_notes
from trainermon.cli import main
from trainermon.core.errors import DumpError

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


@given(all_notes)
def test_what_was_written_is_read_again(notes: GraphNotes) -> None:
    assert parse_notes(json.dumps(notes.as_json()).encode()) == notes


def test_a_match_by_hand_counts_in_the_next_comparison(tmp_path: Path, capsys: Any) -> None:
    target, golden = write_renamed(tmp_path)
    words = ["graph", str(target), str(golden), "--json"]
    main(words)
    before = json.loads(capsys.readouterr().out)[0]["verdicts"]
    write_notes(target, GraphNotes({}, (HandMatch(("fc1.Linear",), ("dense.Linear",)),)))
    main(words)
    after = json.loads(capsys.readouterr().out)[0]["verdicts"]

    assert before["unmatched"] == 2
    assert "unmatched" not in after or after["unmatched"] == 0


def test_several_that_do_what_one_does_are_joined() -> None:
    notes = GraphNotes({}, (HandMatch(("a.q.Linear", "a.k.Linear"), ("a.qk.Linear",)),))
    (rule,) = notes.added_to(NameMappings()).joins

    assert (rule.target, rule.golden) == (("a.q", "a.k"), ("a.qk",))


def test_the_file_lies_beside_the_dump_for_its_owner_alone(tmp_path: Path) -> None:
    write_notes(tmp_path, GraphNotes({"Module.fc.Linear.forward.0": "look here"}, ()))

    assert notes_file(tmp_path) == tmp_path / "graph_notes.json"
    assert stat.S_IMODE(os.stat(tmp_path / "graph_notes.json").st_mode) & 0o077 == 0
    assert read_notes(tmp_path).notes == {"Module.fc.Linear.forward.0": "look here"}
    (tmp_path / "other").mkdir()
    assert read_notes(tmp_path / "other") == GraphNotes({}, ())


@pytest.mark.parametrize(
    "text", ["", "[]", '{"notes": []}', '{"notes": {"a": 1}}', '{"matches": [{"target": ["a"]}]}', '{"matches": [3]}']
)
def test_a_damaged_file_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "graph_notes.json").write_text(text)

    with pytest.raises(DumpError, match=r"graph_notes\.json"):
        read_notes(tmp_path)
