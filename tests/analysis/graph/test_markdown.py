"""What `trainermon graph -o FILE.md` writes for an issue."""

import re
from pathlib import Path

from tests.analysis.compare.dumps import forward, tensor, write_dump
from trainermon.cli import main

RECORDED = Path(__file__).parents[1] / "compare" / "recorded"


def _written(tmp_path, *words):
    path = tmp_path / "graph.md"
    assert main(["graph", *map(str, words), "-o", str(path)]) == 0
    return path.read_text(encoding="utf-8")


def _chain(tmp_path, sizes, golden_sizes):
    """Return the page of functions in a row, each of which takes what the one before gave."""
    for side, values in (("a", sizes), ("b", golden_sizes)):
        data = {
            f"Torch.f{place}.0.forward": forward(tensor(value=before), output=tensor(value=after))
            for place, (before, after) in enumerate(zip((1.0, *values), values, strict=False))
        }
        write_dump(tmp_path / side, data)
    return _written(tmp_path, tmp_path / "a", tmp_path / "b")


def test_it_begins_with_the_sentence_and_tells_the_way_of_the_difference(tmp_path, capsys):
    page = _chain(tmp_path, [2.0, 6.0, 7.0, 16.0], [2.0, 3.0, 3.5, 8.0])

    main(["compare", str(tmp_path / "a"), str(tmp_path / "b")])
    assert page.startswith(f"**{capsys.readouterr().out.splitlines()[0]}**\n")
    began, went_on = page.split("### ")[1:3]
    assert re.findall(r"`micro step 0 > forward > (\w+)`", began) == ["f1"]
    assert re.findall(r"`micro step 0 > forward > (\w+)`", went_on) == ["f2", "f3"]


def test_the_tensors_are_those_of_the_first_finding_on_both_sides(tmp_path):
    page = _chain(tmp_path, [2.0, 6.0], [2.0, 3.0])

    (output,) = [line for line in page.splitlines() if line.startswith("| `output.0`")]
    assert output.split(" | ")[2:4] == ["6, -6, 0, 6", "3, -3, 0, 3"]


def test_a_dump_without_a_finding_has_the_model_only(tmp_path):
    page = _written(tmp_path, RECORDED / "sound")

    assert page.startswith("**Everything is finite.**")
    assert "###" not in page
    assert "layers.0–2 Block  ×3" in page


def test_names_of_a_dump_make_no_tags_cells_or_code(tmp_path):
    hostile = "<img src=x onerror=1>`|```\n# head"
    for side, value in (("a", 6.0), ("b", 3.0)):
        data = {f"Torch.{hostile}.0.forward": forward(tensor(), output=tensor(value=value), **{hostile: tensor()})}
        write_dump(tmp_path / side, data)

    page = _written(tmp_path, tmp_path / "a", tmp_path / "b")

    outside_code = re.sub(r"`[^`\n]*`", "", re.sub(r"```\n.*?\n```", "", page, flags=re.DOTALL))
    assert "&lt;img" in outside_code
    assert "<img" not in outside_code
    assert "# head" not in [line.strip() for line in page.splitlines()]
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} == {4, 6}
