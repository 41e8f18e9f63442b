"""The examples in docstrings give what they say."""

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MODULES = sorted(path for path in (ROOT / "trainermon").rglob("*.py") if ">>> " in path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_examples_give_what_they_say(path):
    module = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))

    result = doctest.testmod(module)

    assert result.attempted > 0
    assert result.failed == 0
