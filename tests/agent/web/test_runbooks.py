"""The runbooks are pages of the agent and of the controller."""

import asyncio
import re
from html.parser import HTMLParser

import httpx
import pytest
from fastapi import FastAPI

from trainermon.agent.web.runbooks import add_runbooks, as_html, entries
from trainermon.alerts.prometheus.command import default_files
from trainermon.alerts.rules import RUNBOOK, load_rules

VOID = {"meta", "link", "br"}


class Reader(HTMLParser):
    """Collects links, anchors and text, and fails where a tag is not closed."""

    def __init__(self):
        super().__init__()
        self.open, self.links, self.anchors, self.text = [], [], set(), ""

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.links += [values["href"]] if "href" in values else []
        self.anchors |= {values["id"]} if "id" in values else set()
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag
        self.text += "\n" if tag in ("p", "li", "h1", "h2") else ""

    def handle_data(self, data):
        self.text += data


@pytest.fixture
def ask():
    app = FastAPI()
    add_runbooks(app)

    async def answer(path):
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://agent") as client:
            return await client.get(path)

    return lambda path: asyncio.run(answer(path))


def read(answer):
    reader = Reader()
    reader.feed(answer.text)
    assert reader.open == []
    return reader


def test_every_rule_and_every_alert_of_prometheus_has_a_page(ask):
    index = read(ask("/runbook"))
    linked = {link.removeprefix("runbook/") for link in index.links if link.startswith("runbook/")}
    alerts = re.findall(r"runbook_url: \S+#(\S+)", default_files()["prometheus_rules.yaml"])

    assert {rule.runbook for rule in load_rules()} | set(alerts) <= linked
    assert entries().keys() <= linked


def test_an_entry_says_what_the_runbook_says(ask):
    answer = ask("/runbook/gradient-nonfinite")
    page = read(answer)

    assert answer.status_code == 200
    source = RUNBOOK.read_text().partition("## gradient-nonfinite\n")[2].partition("\n## ")[0]
    words = " ".join(re.sub(r"[*`]", "", source).split())
    assert words in " ".join(page.text.split())
    assert {"../", "../runbook", "gradient-nonfinite-local", "steps-skipped"} <= set(page.links)


def test_the_whole_pages_have_the_anchors_that_prometheus_links_to(ask):
    for name in ("runbook.md", "prometheus_runbook.md"):
        anchors = read(ask(f"/runbook/{name}")).anchors
        wanted = re.findall(rf"runbook_url: \S+/{name}#(\S+)", default_files()["prometheus_rules.yaml"])
        assert set(wanted) <= anchors


@pytest.mark.parametrize("name", ["nothing", "<script>", "..%2Frunbook", "%2e%2e"])
def test_a_name_without_an_entry_is_said_and_never_becomes_markup(ask, name):
    answer = ask(f"/runbook/{name}")

    assert answer.status_code == 404
    assert "<script" not in answer.text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a <b> & c", "<p>a &lt;b&gt; &amp; c</p>"),
        ("* one\n  more\n* two", "<ul><li>one more</li><li>two</li></ul>"),
        ("```sh\na < b\n```", "<pre>a &lt; b</pre>"),
        ("[x](javascript:alert)", "<p>x</p>"),
        ("[x](../docs/guide.md)", "<p>x</p>"),
        ('[x](https://a.example/")', "<p>x</p>"),
        ("[x](https://a.example/y?z=1)", '<p><a href="https://a.example/y?z=1">x</a></p>'),
        ("exp_avg, 2 * 3 * 4, `a_b`", "<p>exp_avg, 2 * 3 * 4, <code>a_b</code></p>"),
        ("", ""),
    ],
)
def test_markdown_becomes_html(text, shown):
    assert as_html(text) == shown
