"""From a loss that is NaN to the line: the page's commands are run as they stand there, the slow test in a shell."""

import re

import pytest

from tests.docs.pages import ROOT, check_page, commands_of, run_forked

PAGE = "nan_to_line.md"


def test_the_commands_lead_to_the_line(tmp_path):
    assert len(commands_of(PAGE)) > 9
    check_page(PAGE, tmp_path, run_forked, LATE_NAN_FIRST="7990")

    named = re.search(r"Line (\d+) must say", (ROOT / "docs" / PAGE).read_text(encoding="utf-8"))
    assert "torch.softmax" in (ROOT / "examples" / "late_nan.py").read_text().splitlines()[int(named[1]) - 1]


@pytest.mark.slow
def test_the_same_from_the_first_step_on(tmp_path):
    check_page(PAGE, tmp_path)
