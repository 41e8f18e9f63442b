"""The page about compare: its example is what the command prints, and it explains every option and column."""

import argparse
import re
from pathlib import Path

import pytest

from trainermon.analysis.compare import Mode
from trainermon.analysis.compare.command import add_arguments
from trainermon.analysis.compare.output.tables import header
from trainermon.cli import main

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "compare.md").read_text(encoding="utf-8")


def test_the_example_prints_what_the_page_says(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    (command, output) = re.search(r"```console\n\$ trainermon (.+)\n((?:.*\n)+?)```", PAGE).groups()

    assert main(command.split()) == 0
    assert capsys.readouterr().out == output


def test_every_option_is_explained():
    parser = argparse.ArgumentParser(add_help=False)
    add_arguments(parser)
    missing = [
        action.option_strings
        for action in parser._actions
        if action.option_strings
        and not any(f"`{name}" in PAGE or f" `{name}`" in PAGE for name in action.option_strings)
    ]

    assert missing == []


@pytest.mark.parametrize("mode", Mode)
def test_every_column_of_ours_is_explained(mode):
    own = [
        name
        for name in header(mode)[header(mode).index("Err_message") + 1 :]
        if name not in ("NPU_Stack_Info", "Data_name")
    ]

    assert [name for name in own if f"`{name}`" not in PAGE] == []
