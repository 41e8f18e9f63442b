"""How two tensors differ, in words: the numbers are numpy's."""

import numpy as np
import pytest

from trainermon.cli import main


def save(path, values):
    np.save(path, values)
    return str(path)


def said(capsys, *words):
    assert main(["tensor", "diff", *words]) == 0
    return capsys.readouterr().out.splitlines()


def cell(lines, label):
    [found] = [text.partition(label)[2].strip() for text in lines if text.startswith(f"  {label} ")]
    return found


@pytest.fixture
def sides(tmp_path):
    theirs = np.random.default_rng(1).normal(size=(4, 50)).astype(np.float32)
    theirs[1, 7] = 0.5
    ours = theirs.copy()
    ours[1, 7] += 1e-3  # relative: 0.002
    ours[3, 2] *= 2
    return ours, theirs


def test_the_differing_elements_are_counted_measured_and_listed(tmp_path, sides, capsys):
    ours, theirs = sides

    lines = said(capsys, save(tmp_path / "a.npy", ours), save(tmp_path / "b.npy", theirs))

    gap = np.abs(ours.astype(np.float64) - theirs)
    wide = ours.astype(np.float64), theirs.astype(np.float64)
    norms = [np.linalg.norm(side) for side in wide]
    relative = gap / np.abs(wide[1])
    ulps = (gap / np.spacing(np.maximum(np.abs(ours), np.abs(theirs)))).max()  # of the larger of the two
    assert cell(lines, "ours").endswith("a.npy")
    assert "  " + " " * 11 + "float32[4, 50], 200 elements" in lines
    assert cell(lines, "differ") == "2 elements, 1.000%"
    distance = np.linalg.norm(gap)
    assert cell(lines, "distance") == f"{distance:.5g}, relative to the norm {distance / max(norms):.5g}"
    assert cell(lines, "largest") == (
        f"{gap.max():.5g}, relative {relative.max():.5g}, {ulps:.5g} units in the last place"
    )
    assert cell(lines, "relative") == f"mean {relative.mean():.5g}, below 1e-3 99.00%, below 5e-3 99.50%"
    cosine = (wide[0] * wide[1]).sum() / norms[0] / norms[1]
    assert cell(lines, "alike") == f"cosine {cosine:.5g}, ratio of norms {norms[0] / norms[1]:.5g}"
    positions = [text.split("]")[0].strip() + "]" for text in lines if text.startswith("    [")]
    assert positions == ["[1, 7]", "[3, 2]", "[3, 2]", "[1, 7]"]  # the first ones, then those furthest apart
    assert not any("not finite" in text for text in lines)


def test_only_as_many_positions_are_listed_as_asked_for(tmp_path, sides, capsys):
    paths = [save(tmp_path / f"{number}.npy", side) for number, side in enumerate(sides)]

    lines = said(capsys, *paths, "-n", "1")

    assert [text.split()[0:2] for text in lines if text.startswith("    [")] == [["[1,", "7]"], ["[3,", "2]"]]


def test_equal_tensors_of_two_types_are_said_to_be_equal(tmp_path, capsys):
    paths = save(tmp_path / "a.npy", np.ones(3, np.float16)), save(tmp_path / "b.npy", np.ones(3))

    lines = said(capsys, *paths)

    assert lines[2:] == [
        "  " + " " * 11 + "float16 and float64[3], 3 elements",
        "  differ     none: the elements are equal, or within the tolerance",
    ]


def test_values_that_are_not_finite_are_counted_and_leave_no_relative_distance(tmp_path, capsys):
    ours, theirs = np.array([1.0, np.nan, np.inf, 5.0]), np.array([1.0, np.nan, 2.0, 2.0])

    lines = said(capsys, save(tmp_path / "a.npy", ours), save(tmp_path / "b.npy", theirs))

    assert cell(lines, "differ") == "2 elements, 50.000%"
    assert cell(lines, "not finite") == "2 in ours, 1 in theirs"
    assert cell(lines, "distance") == "3"


def test_an_index_chooses_the_part_of_both_unless_the_second_has_its_own(tmp_path, capsys):
    whole = np.arange(12.0).reshape(3, 4)
    paths = save(tmp_path / "a.npy", whole), save(tmp_path / "b.npy", whole[::-1])

    assert cell(said(capsys, *paths, "-i", "1"), "differ").startswith("none")
    assert cell(said(capsys, *paths, "-i", "0"), "differ") == "4 elements, 100.000%"
    assert cell(said(capsys, *paths, "-i", "0", "--other-index", "2"), "differ").startswith("none")
