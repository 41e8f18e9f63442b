"""Every relative link of a page leads to a file, and to a heading where it names one."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
CODE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)


def pages():
    names = subprocess.run(
        ["git", "ls-files", "-z", "--", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    return [name for name in names.split("\0") if name and (ROOT / name).is_file()]


def anchors(text):
    headings = re.findall(r"^#+\s+(.+?)\s*$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page, text):
    for target in LINK.findall(CODE.sub("", text)):
        path, _, anchor = target.partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        to = (page.parent / path).resolve() if path else page
        names_heading = bool(anchor) and to.suffix == ".md" and to.exists()
        if not to.exists() or (names_heading and anchor not in anchors(to.read_text(encoding="utf-8"))):
            yield target


@pytest.mark.parametrize("name", pages())
def test_relative_links_lead_somewhere(name):
    page = ROOT / name

    assert list(broken_links(page, page.read_text(encoding="utf-8"))) == []


def test_the_index_of_the_docs_leads_to_every_page():
    index = LINK.findall((ROOT / "docs/README.md").read_text(encoding="utf-8"))
    needed = [name.removeprefix("docs/") for name in pages() if name.startswith("docs/") and "/decisions/" not in name]

    linked = {target.partition("#")[0] for target in index}
    assert [name for name in needed if name not in linked and name != "README.md"] == []


def test_a_link_that_leads_nowhere_is_seen(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# Here\n[a](nowhere.md) [b](#here) [c](#there) `[d](code.md)` [e](https://x.example/z) [f](page.md#here)"
    )

    assert list(broken_links(page, page.read_text())) == ["nowhere.md", "#there"]
