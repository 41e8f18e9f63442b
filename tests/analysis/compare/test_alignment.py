"""Alignments against the longest common subsequence by dynamic programming."""

import itertools
import random

import pytest

from trainermon.analysis.compare import alignment
from trainermon.analysis.compare.alignment import align


def longest(one, other):
    row = [0] * (len(other) + 1)
    for element in one:
        above, row = row, [0]
        for index, each in enumerate(other):
            row.append(above[index] + 1 if element == each else max(above[index + 1], row[index]))
    return row[-1]


@pytest.mark.parametrize("seed", range(60))
def test_as_many_as_possible_are_paired_in_order(seed):
    draw = random.Random(seed)
    one, other = (draw.choices("abcd"[: draw.randint(1, 4)], k=draw.randint(0, 30)) for _ in range(2))

    pairs = align(one, other)

    assert all(one[a] == other[b] for a, b in pairs)
    assert all(a < c and b < d for (a, b), (c, d) in itertools.pairwise(pairs))
    assert len(pairs) == longest(one, other)


def test_with_too_many_edits_the_nth_of_a_kind_is_the_nth(monkeypatch):
    monkeypatch.setattr(alignment, "MAX_EDITS", 2)

    assert align("abab", "bbbxxxa") == [(0, 6), (1, 0), (3, 1)]
