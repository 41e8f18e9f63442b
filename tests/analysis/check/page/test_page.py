"""The page of a check: it shows a planted fault, it is markup and nothing else, and a browser takes it."""

import html.parser
import math

import pytest
import torch
from playwright.sync_api import sync_playwright

from tests.analysis.check.test_check import dumped, lose_the_tail, plant_nan
from tests.server_programs import find_program
from trainermon.accuracy.judge import Judgement, Status
from trainermon.analysis.check.checking import CallsCheck, CheckedCall, check_dump
from trainermon.analysis.check.page.page import render_page, write_html, write_markdown
from trainermon.analysis.check.page.views import EDGES, CallView, views_of
from trainermon.cli import main

EVIL = "</title></style><script>alert(1)</script><img src=x onerror=alert(2)>\"'&|`\x1b[2J\u202e"


class Page(html.parser.HTMLParser):
    """Collects the tags and the text of a page, and checks that tags are closed."""

    EMPTY = ("meta", "rect", "line", "br")

    def __init__(self, content):
        super().__init__(convert_charrefs=True)
        self.tags, self.open, self.words = set(), [], []
        self.feed(content)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        assert not any(name.startswith("on") or name in {"src", "href"} for name, _ in attrs)
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in self.EMPTY:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


def linear_view(directory):
    [view] = views_of(check_dump(directory))["Functional.linear.0.forward"].results
    return view


def test_every_element_is_counted_by_its_error(tmp_path):
    view = linear_view(dumped(tmp_path, alter=plant_nan))

    assert sum(view.counts) == 16 * 64
    assert view.counts[-1] == 1  # the NaN
    assert sum(view.counts[2 + EDGES.index(1.0) : -1]) == 0


def test_the_map_and_the_numbers_show_where_the_fault_is(tmp_path):
    view = linear_view(dumped(tmp_path, alter=lose_the_tail))

    bad = [row for row, cells in enumerate(view.heat) if max(cells) > 1]
    assert (len(view.heat), len(view.heat[0]), bad) == (16, 64, [15])  # the last 64 of 16 by 64
    assert view.rows == range(9, 16)
    assert set(view.recorded[-1]) == {0.0}
    assert all(max(row) <= 1 for row in view.ratios[:-1])


def test_numbers_without_a_distance_and_single_numbers_have_a_view(tmp_path):
    check = check_dump(dumped(tmp_path, alter=lambda values: values.fill_(math.inf)))

    view = views_of(check)["Functional.linear.0.forward"].results[0]

    assert view.counts[-1] == 16 * 64
    assert all(cell > 1e300 for row in view.heat for cell in row)


def test_a_page_says_what_is_wrong_and_how_to_reproduce_it(tmp_path):
    directory = dumped(tmp_path / "dump", alter=lose_the_tail)
    check = check_dump(directory)
    write_html(check, tmp_path / "page.html")

    page = Page((tmp_path / "page.html").read_text(encoding="utf-8"))
    words = " ".join(page.words)

    assert page.open == []
    assert "2 of 5 forward calls are wrong; first: Functional.linear.0.forward" in words
    assert "tail [15, 0:64], 64 elements" in words
    assert f"trainermon script {directory} Functional.linear.0" in words


def test_no_text_of_a_dump_becomes_markup(tmp_path):
    judgement = Judgement(status=Status.ERROR, reason=EVIL, dtype=EVIL, standard=EVIL)
    calls = (
        CheckedCall(key=EVIL, judgements=(judgement,), line=EVIL, cause=EVIL),
        CheckedCall(key=EVIL, skipped=EVIL),
    )
    check = CallsCheck(source=EVIL, calls=calls)

    page = Page(render_page(check, {EVIL: CallView((EVIL,), ())}))
    write_markdown(check, tmp_path / "page.md")

    assert page.open == []
    assert page.tags.isdisjoint({"script", "img"})
    text = (tmp_path / "page.md").read_text(encoding="utf-8")
    assert "<script>" not in text
    [row] = [line for line in text.splitlines() if line.startswith("| error")]
    assert row.replace("\\|", "").count("|") == 5


def test_a_call_that_cannot_be_looked_into_has_a_fold_without_drawings(tmp_path):
    directory = dumped(tmp_path, alter=plant_nan)
    check = check_dump(directory)
    for file in (directory / "dump_tensor_data").iterdir():
        file.unlink()

    assert views_of(check)["Functional.linear.0.forward"].results == ()
    assert "Functional.linear.0.forward" in render_page(check, views_of(check))


def test_a_device_has_a_page_too(tmp_path):
    words = ["--dtype", "float32", "--only", "nn.functional.gelu.*", "-f", "html", "-f", "md", "-o", str(tmp_path)]

    assert main(["check", "ops", *words]) == 0

    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".html", ".md"]


@pytest.mark.parametrize("width", [420, 1200])
def test_a_browser_shows_it_and_loads_nothing(tmp_path, width):
    check = check_dump(dumped(tmp_path / "dump", dtype=torch.bfloat16, alter=lose_the_tail))
    path = tmp_path / "page.html"
    write_html(check, path)
    complaints = []

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find_program("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": width, "height": 900})
        page.on("console", lambda message: complaints.append(message.text))
        page.on("request", lambda request: complaints.append(request.url))
        page.goto(path.as_uri())
        seen = page.locator("details[open] svg").count()
        wide = page.evaluate("document.documentElement.scrollWidth")
        browser.close()

    assert complaints == [path.as_uri()]
    assert (seen, wide <= width) == (2, True)
