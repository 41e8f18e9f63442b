"""Every decision has its number, its date and its line in the index."""

import re
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "docs" / "decisions"
PAGES = sorted(FOLDER.glob("[0-9]*.md"))
HEAD = re.compile(r"# (?P<number>\d{4}) (?P<title>.+)\n\n(?P<date>\d{4}-\d\d-\d\d)\n\n\S")


def heads():
    found = {path: HEAD.match(path.read_text(encoding="utf-8")) for path in PAGES}
    assert [path.name for path, head in found.items() if head is None] == []
    return {path: head for path, head in found.items() if head}


def test_every_page_begins_with_number_title_and_date():
    assert all(path.name.startswith(f"{head['number']}-") for path, head in heads().items())


def test_no_number_is_given_twice():
    numbers = [path.name[:4] for path in PAGES]

    assert len(numbers) == len(set(numbers))


def test_the_index_lists_every_page():
    index = (FOLDER / "README.md").read_text(encoding="utf-8")
    lines = [line for line in index.splitlines() if line.startswith("| [")]

    assert lines == [
        f"| [{head['number']}]({path.name}) | {head['title']} | {head['date']} |" for path, head in heads().items()
    ]
