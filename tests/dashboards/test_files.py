"""What may be in the page's folder: small modules, nothing inline, nothing foreign, readable colours, no drift."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from trainermon.analysis.diagnosis import findings
from trainermon.core.derived import DERIVED
from trainermon.core.values import Alert, Kind
from trainermon.exporters import views
from trainermon.exporters.heat_rows import HEATMAP_STATISTICS

WEB = Path(__file__).parents[2] / "trainermon" / "dashboards" / "web"
ALL_MODULES = sorted(str(path.relative_to(WEB)) for path in WEB.rglob("*.js"))
OTHER_PAGES = ("graph/", "runs/")
MODULES = [name for name in ALL_MODULES if not name.startswith(OTHER_PAGES)]
AA = 4.5


def test_modules_are_small_and_say_what_they_decide() -> None:
    for name in ALL_MODULES:
        lines = (WEB / name).read_text(encoding="utf-8").splitlines()
        code = [line for line in lines if not line.lstrip().startswith(("/**", "*", "//"))]
        assert len(code) <= 250, name
        assert lines[0].startswith("// "), f"{name} does not say what it decides"


def test_nothing_is_inline_and_nothing_comes_from_elsewhere() -> None:
    page = (WEB / "index.html").read_text(encoding="utf-8")
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\son\w+=|\sstyle=", page)
    for path in filter(Path.is_file, WEB.rglob("*")):
        addresses = re.findall(r"https?://[^\s\"')]+", path.read_text(encoding="utf-8"))
        assert set(addresses) <= {"http://www.w3.org/2000/svg"}, path.name


def test_every_module_is_preloaded() -> None:
    page = (WEB / "index.html").read_text(encoding="utf-8")

    assert sorted(re.findall(r'modulepreload" href="static/([\w./]+)"', page)) == MODULES


def test_text_enters_the_page_only_as_text() -> None:
    for name in ALL_MODULES:
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", (WEB / name).read_text())


def _colours(block: str) -> dict[str, str]:
    return dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", block))


def _luminance(colour: str) -> float:
    """Relative luminance by WCAG 2.2."""
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _contrast(one: str, other: str) -> float:
    light, dark = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_is_readable(scheme: str) -> None:
    light, _, rest = (WEB / "style.css").read_text(encoding="utf-8").partition("@media (prefers-color-scheme: dark)")
    colour = _colours(light) if scheme == "light" else _colours(rest.partition("/* The same")[0])
    tones = ("good", "info", "warning", "critical", "fatal")

    for text in ("ink", "muted", "accent", *tones):
        for surface in ("page", "panel", "plot"):
            assert _contrast(colour[text], colour[surface]) >= AA, (text, surface)
    for tone in tones:
        assert _contrast(colour[tone], colour[f"{tone}-soft"]) >= AA, tone
    assert _contrast(colour["panel"], colour["accent"]) >= AA
    assert _contrast(colour["panel"], colour["ink"]) >= AA
    assert _contrast(colour["nonfinite"], colour["plot"]) >= AA


def test_the_dark_that_one_chooses_is_that_of_the_system() -> None:
    _, _, rest = (WEB / "style.css").read_text(encoding="utf-8").partition("@media (prefers-color-scheme: dark)")
    system, _, chosen = rest.partition("/* The same")

    assert _colours(system) == _colours(chosen.partition("\n* {")[0])


def test_lines_are_seen_in_both_themes() -> None:
    light, _, rest = (WEB / "style.css").read_text(encoding="utf-8").partition("@media (prefers-color-scheme: dark)")
    for colour in (_colours(light), _colours(rest)):
        lines = [value for name, value in colour.items() if name.startswith("line-")]
        assert len(lines) == len(set(lines)) == 8
        assert all(_contrast(line, colour["plot"]) >= 3 for line in lines)


def test_page_knows_what_the_agent_offers() -> None:
    names = (WEB / "words.js").read_text(encoding="utf-8") + (WEB / "scales.js").read_text(encoding="utf-8")
    kinds = {kind.value for kind in Kind} - {"loss", "step", "checksum"}

    for name in (*kinds, *HEATMAP_STATISTICS, *DERIVED, *views.RANK_QUANTITIES):
        assert re.search(rf"\b{name}: ", names), name
    assert {"loss", "grad_norm"} <= set(views.LINES)


READ = {
    findings.Diagnosis: "verdict run_id headline reason step attempt rank module class_name call micro_step phase "
    "tensor source candidates chain ranks parameters consequences evidence dump",
    findings.BadTensor: "slot dtype shape count nans infs max min",
    findings.PathLink: "module class_name direction call tensor omitted",
    findings.RankFinding: "rank role replay unreduced reduced",
    findings.BadParameter: "name count nans infs",
    Alert: "id rule severity state attempt rank step first_step kind value baseline num_series findings message",
}


@pytest.mark.parametrize("type_", READ, ids=lambda type_: type_.__name__)
def test_fields_that_the_page_reads_exist(type_: type) -> None:
    assert set(READ[type_].split()) <= {field.name for field in dataclasses.fields(type_)}


def test_page_has_words_for_every_phase_and_role() -> None:
    report = (WEB / "diagnosis.js").read_text(encoding="utf-8")

    for closed in (findings.FaultPhase, findings.RankRole):
        assert all(re.search(rf"\b{member.value}: ", report) for member in closed), closed
