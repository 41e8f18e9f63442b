"""The page shows what was found, takes nothing from elsewhere, and nothing that a run names becomes markup."""

import dataclasses
import html.parser
import json
import math
import re
from typing import Any

import pytest
import torch
from playwright.sync_api import sync_playwright

from tests.analysis.stored_run import store
from tests.server_programs import find_program
from trainermon.analysis.diagnosis.diagnose import diagnose
from trainermon.analysis.diagnosis.findings import (
    BadParameter,
    BadTensor,
    Contrast,
    Diagnosis,
    DiagnosisVerdict,
    FaultPhase,
    LevelFinding,
    NextCollection,
    PathLink,
    PlaceLevel,
    RankFinding,
    RankRole,
)
from trainermon.analysis.diagnosis.page.history import curves
from trainermon.analysis.diagnosis.page.markup import STYLE, table
from trainermon.analysis.diagnosis.page.page import render_page
from trainermon.analysis.diagnosis.page.values import look
from trainermon.analysis.source.excerpts import excerpt
from trainermon.cli import main
from trainermon.core.values import Kind, SeriesKey
from trainermon.dump.debugger import PrecisionDebugger
from trainermon.dump.files.sources import NO_SOURCES
from trainermon.dump.files.verdicts import NonfiniteCause, OperationVerdict, Reproducibility

EVIL = "</title></style><script>alert(1)</script><img src=x onerror=alert(2)>\"'&\x1b[2J\u202e"
LOSS = SeriesKey(Kind.LOSS, "loss")
GRADIENT = SeriesKey(Kind.GRAD_UNREDUCED, "fc.weight")
PARTS = {
    "pre",
    "div",
    "code",
    "table",
    "tr",
    "th",
    "td",
    "section",
    "h1",
    "h2",
    "h3",
    "p",
    "svg",
    "ul",
    "li",
    "span",
    "b",
}


def moments(value, *, nans=0):
    """Four elements of this value, of which some are NaN."""
    finite = 4 - nans
    return (4, value, value, value * finite, value * value * finite, 0, nans, 0)


class Page(html.parser.HTMLParser):
    """Collects the tags, the attributes and the text of a page, and checks that tags are closed."""

    def __init__(self, content):
        super().__init__(convert_charrefs=True)
        self.tags, self.attributes, self.open, self.words = [], [], [], []
        self.feed(content)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag in PARTS:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag in PARTS:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)

    @property
    def text(self):
        return re.sub(r"\s+", " ", " ".join(self.words))


def everything(word):
    """Return a diagnosis in which every field that a run could name is `word`."""
    tensor = BadTensor(slot=word, dtype=word, shape=(2, 3), count=6, nans=1, infs=2, max=3.0, min=-1.0)
    ranks = (
        RankFinding(rank=0, role=RankRole.ORIGIN, replay="refused", replay_reason=word, unreduced=3, reduced=4),
        RankFinding(rank=1, role=RankRole.INNOCENT, replay="clean"),
    )
    return Diagnosis(
        verdict=DiagnosisVerdict.LOCATED,
        run_id=word,
        headline=word,
        reason=word,
        step=5,
        attempt=1,
        rank=0,
        module=word,
        class_name=word,
        call=2,
        micro_step=1,
        phase=FaultPhase.FORWARD,
        tensor=tensor,
        source=f"File {word}, line 3, in {word}: {word}",
        candidates=(word,),
        chain=(PathLink(module=word, class_name=word, direction=word, call=1, tensor=tensor, omitted=4),),
        ranks=ranks,
        parameters=(BadParameter(name=word, count=4, nans=1, infs=0),),
        consequences=(word,),
        evidence=(word,),
        dump=word,
        classification=OperationVerdict(
            operation=word, cause=NonfiniteCause.RANGE, reason=word, source=word, collect=word
        ),
        reproducibility=Reproducibility.NOT_REPRODUCIBLE,
        reproducibility_reason=word,
        api=word,
        reference=word,
        levels=(LevelFinding(level=PlaceLevel.MICRO_STEP, answer=word, reason=word, source=word),),
        contrasts=(Contrast(rank=1, place=word, value={word: 1.5}, usual={word: None}, relative=math.nan),),
        collect=NextCollection(reason=word, debugger={word: [word]}, monitor={word: {"a": 1}}),
    )


def test_whatever_a_run_names_is_text(tmp_path):
    store(
        tmp_path,
        {step: {0: {LOSS: moments(1.0), SeriesKey(Kind.ACTV, EVIL, "output.0"): moments(2.0)}} for step in (4, 5)},
    )

    content = render_page(tmp_path, everything(EVIL))

    page = Page(content)
    assert not {"script", "img", "iframe", "link", "object", "base", "form", "a"} & set(page.tags)
    assert not [name for name, _ in page.attributes if name.startswith("on") or name in ("src", "href")]
    assert page.open == []
    assert "\x1b" not in content
    assert "\u202e" not in content
    assert page.text.count("<script>alert(1)</script>") > 30
    assert "Largest value that </title>" in page.text  # the title of a plot


def test_every_field_is_shown(tmp_path):
    fields = [field.name for field in dataclasses.fields(Diagnosis)]
    plain = everything("word")

    page = Page(render_page(tmp_path, plain)).text

    for name in fields:
        if isinstance(getattr(plain, name), str):
            marked = dataclasses.replace(plain, **{name: f"only-{name}"})
            if name not in ("verdict", "phase", "symptom"):
                assert f"only-{name}" in Page(render_page(tmp_path, marked)).text
    for text in (
        "micro step 1",
        "range",
        "not reproducible",
        "1 NaN + 2 Inf of 6",
        "50.0%",
        "… 4 more modules",
    ):
        assert text in page
    assert "call 2" in Page(render_page(tmp_path, dataclasses.replace(plain, api=""))).text  # else it is the function's
    for text in ("finite on one side only", "refused: word", "agrees", "1.5", '"a": 1', "(1 NaN, 0 Inf of 4)"):
        assert text in page


def test_settings_that_differ_stand_before_what_may_follow_from_them(tmp_path):
    settings = ("hyperparameters: lr is 2, in the reference 1",)
    found = dataclasses.replace(everything("word"), headline="What follows", setting_differences=settings)

    text = Page(render_page(tmp_path, found)).text

    assert 0 <= text.index(settings[0]) < text.rindex("What follows")


def test_nothing_is_loaded_from_elsewhere(tmp_path):
    content = render_page(tmp_path, everything("word"))

    assert "default-src 'none'; style-src 'unsafe-inline'" in content
    assert not re.search(r"https?://|url\(|@import", content)


def test_a_run_without_anything_has_a_page(tmp_path):
    page = Page(render_page(tmp_path, diagnose(tmp_path)))

    assert "nothing known" in page.text
    assert "svg" not in page.tags


def test_curves_are_those_of_the_store(tmp_path):
    steps = {
        step: {
            0: {LOSS: moments(float(step)), GRADIENT: moments(1.0)},
            1: {LOSS: moments(step + 10.0, nans=int(step >= 8)), GRADIENT: moments(3.0)},
        }
        for step in range(2, 10)
    }
    store(tmp_path, steps)
    diagnosis = Diagnosis(
        verdict=DiagnosisVerdict.LOCATED, run_id="r", headline="", reason="", step=8, attempt=1, rank=1
    )

    loss, norm = curves(tmp_path, diagnosis)

    assert [point.step for point in loss.points] == list(range(2, 10))
    assert [(point.low, point.high, point.own, point.bad) for point in loss.points[5:7]] == [
        (7.0, 17.0, 17.0, False),
        (8.0, 8.0, None, True),
    ]
    assert [(point.low, point.high, point.own) for point in norm.points] == [(2.0, 6.0, 6.0)] * 8
    assert norm.title == "Norm of the gradients before the reduction"


def test_curves_show_what_is_near_the_step(tmp_path):
    store(tmp_path, {step: {0: {LOSS: moments(1.0)}} for step in range(0, 1000, 5)})
    diagnosis = Diagnosis(verdict=DiagnosisVerdict.LOCATED, run_id="r", headline="", reason="", step=500, attempt=1)

    (loss,) = curves(tmp_path, diagnosis)

    assert [point.step for point in loss.points] == list(range(205, 580, 5))


def test_the_reference_is_drawn_beside(tmp_path):
    for name, factor in (("run", 2.0), ("good", 1.0)):
        store(tmp_path / name, {step: {0: {LOSS: moments(step * factor)}} for step in range(9)})
    found = Diagnosis(
        verdict=DiagnosisVerdict.LOCATED,
        run_id="r",
        headline="",
        reason="",
        step=5,
        rank=0,
        reference=str(tmp_path / "good"),
    )

    (loss,) = curves(tmp_path / "run", found)
    page = Page(render_page(tmp_path / "run", found))

    assert [point.own for point in loss.points] == [step * 2.0 for step in range(9)]
    assert [point.own for point in loss.reference] == [float(step) for step in range(9)]
    assert ("class", "reference") in page.attributes
    assert "Dashed: the reference" in page.text
    assert "attempt None" not in page.text


def test_gradients_that_no_reduction_changed_are_drawn_once(tmp_path):
    reduced = SeriesKey(Kind.GRAD_REDUCED, "fc.weight")
    store(tmp_path, {step: {0: {GRADIENT: moments(step), reduced: moments(step)}} for step in range(1, 5)})
    found = Diagnosis(verdict=DiagnosisVerdict.LOCATED, run_id="r", headline="", reason="", step=3, attempt=1, rank=0)

    assert [curve.title for curve in curves(tmp_path, found)] == ["Norm of the gradients before the reduction"]


@pytest.mark.parametrize("values", [[1.0, 1.0], [0.0, 0.0], [-5.0, 1e-30], [1e-300, 1e300], [3e38, 3.1e38]])
def test_any_numbers_can_be_drawn(values, tmp_path):
    store(
        tmp_path,
        {step: {0: {LOSS: moments(value), GRADIENT: moments(abs(value))}} for step, value in enumerate(values)},
    )
    diagnosis = Diagnosis(
        verdict=DiagnosisVerdict.LOCATED, run_id="r", headline="", reason="", step=1, attempt=1, rank=0
    )

    page = Page(render_page(tmp_path, diagnosis))

    numbers = [value for name, value in page.attributes if name in ("y1", "y2", "cy", "points")]
    assert page.tags.count("polyline") == 2
    assert all(0 <= float(number.split(",")[-1]) <= 210 for value in numbers for number in value.split())


def code_file(tmp_path, name="model.py"):
    path = tmp_path / name
    path.write_text("".join(f"line_{number} = 1 < 2\n" for number in range(1, 21)))
    return path


def test_of_code_outside_of_functions_the_line_alone_is_shown(tmp_path):
    path = code_file(tmp_path)

    assert excerpt(f"File {path}, line 9, in <module>, \n line_9 = 1 < 2").context == ((9, "line_9 = 1 < 2"),)


def test_the_lines_around_a_frame_are_shown(tmp_path):
    path = tmp_path / "model.py"
    path.write_text("def forward():\n" + "".join(f"    line_{number} = 1 < 2\n" for number in range(2, 31)))

    found = excerpt(f"File {path}, line 9, in forward, \n line_9 = 1 < 2")

    assert (found.file, found.line, found.function, found.missing) == (str(path), 9, "forward", "")
    assert found.context == tuple((number, f"    line_{number} = 1 < 2") for number in range(4, 15))
    assert excerpt("no frame") is None


@pytest.mark.parametrize(
    ("name", "line", "code", "missing"),
    [
        ("model.py", 9, "line_8 = 1 < 2", "the file has changed since"),
        ("model.py", 99, "line_9 = 1 < 2", "the file has changed since"),
        ("model.py", 9, "", "the file has changed since"),
        ("secret.txt", 9, "line_9 = 1 < 2", "the file is not on this machine"),
        ("none.py", 9, "line_9 = 1 < 2", "the file is not on this machine"),
    ],
)
def test_a_file_that_is_not_the_code_that_ran_is_not_shown(name, line, code, missing, tmp_path):
    code_file(tmp_path)
    code_file(tmp_path, "secret.txt")

    found = excerpt(f"File {tmp_path / name}, line {line}, in forward: {code}")

    assert (found.missing, found.context) == (missing, ())


def dumped_run(run_dir):
    """Leave the dump of a step, with tensors, in which the first layer makes Inf of one row."""
    model: Any = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 12))
    with torch.no_grad():
        model[0].weight.fill_(1.0)
    batch = torch.ones(20, 3)
    batch[17] = 3e38
    debugger = PrecisionDebugger(dump_path=str(run_dir / "dumps/look/attempt1"), task="tensor", level="L0", step=[5])
    debugger.set_init_step(5)
    debugger.start(model)
    model(batch).sum().backward()
    debugger.stop()
    debugger.close()


def test_the_elements_around_the_first_bad_one_are_shown(tmp_path, capsys):
    dumped_run(tmp_path)
    store(tmp_path, {5: {0: {LOSS: moments(1.0, nans=4)}}})

    assert main(["diagnose", str(tmp_path), "--html", str(tmp_path / "page.html"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    page = Page((tmp_path / "page.html").read_text())

    assert found["headline"] in page.text
    assert found["tensor"]["infs"] + found["tensor"]["nans"] > 0
    assert "dimension 0: 1 of 20 indices: 17" in page.text
    assert ("class", "bad") in page.attributes
    assert "assert main" not in page.text


def test_damaged_sources_cost_neither_the_stack_nor_the_tensor(tmp_path):
    dumped_run(tmp_path)
    store(tmp_path, {5: {0: {LOSS: moments(1.0, nans=4)}}})
    found = diagnose(tmp_path)
    whole = look(tmp_path, found)
    (sources,) = tmp_path.rglob("sources.json")
    sources.write_text(sources.read_text()[:50])

    assert whole.stack
    assert whole.tensor is not None
    assert look(tmp_path, found) == dataclasses.replace(whole, sources=NO_SOURCES)


class Lossy(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        gradient = gradient.clone()
        gradient[2, 1] = math.nan
        return gradient


class LossyBackward(torch.nn.Module):
    def forward(self, x):
        return Lossy.apply(x)


def test_of_a_backward_the_gradient_is_shown(tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), LossyBackward(), torch.nn.Linear(4, 1))
    debugger = PrecisionDebugger(dump_path=str(tmp_path / "dumps/look/attempt1"), task="tensor", level="L0")
    debugger.start(model)
    model(torch.ones(5, 3)).sum().backward()
    debugger.stop()
    debugger.close()
    store(tmp_path, {0: {0: {GRADIENT: moments(1.0, nans=2)}}})

    found = diagnose(tmp_path)
    view = look(tmp_path, found)

    assert (found.module, found.tensor.slot) == ("1", "gradient of input.0")
    assert view.tensor is not None
    assert [place.position for place in view.tensor.found.bad] == [(2, 1)]


def test_a_page_that_cannot_be_written_is_an_error(tmp_path, capsys):
    store(tmp_path, {5: {0: {LOSS: moments(1.0)}}})

    assert main(["diagnose", str(tmp_path), "--html", str(tmp_path / "none" / "page.html")]) == 1
    assert "cannot write" in capsys.readouterr().err


@pytest.mark.server
def test_a_table_that_goes_on_has_a_shade_at_that_edge():
    rows = [("a cell that is quite long " * 3,) * 3]
    content = f"<style>{STYLE} td{{white-space:nowrap}}</style>{table(('one', 'two', 'three'), rows)}"

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=find_program("chromium"), args=["--no-sandbox"])
        page = chromium.new_page(viewport={"width": 390, "height": 800})
        page.set_content(content)
        box = page.locator(".scroll").bounding_box()

        def edges():
            places = (box["x"], box["x"] + box["width"] - 2)
            return [page.screenshot(clip={"x": x, "y": box["y"] + 1, "width": 2, "height": 2}) for x in places]

        plain, shade = edges()
        page.locator(".scroll").evaluate("e => (e.scrollLeft = e.scrollWidth)")
        left, right = edges()
        chromium.close()

    assert plain == right
    assert plain not in (shade, left)


@pytest.mark.server
def test_a_browser_shows_it_light_and_dark_and_asks_for_nothing(tmp_path):
    store(tmp_path, {step: {0: {LOSS: moments(1.0 + step)}, 1: {LOSS: moments(2.0)}} for step in range(8)})
    place = tmp_path / "page.html"
    place.write_text(render_page(tmp_path, everything(EVIL)))
    asked, said, backs = [], [], set()

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=find_program("chromium"), args=["--no-sandbox"])
        for scheme in ("light", "dark"):
            page = chromium.new_context(color_scheme=scheme, viewport={"width": 390, "height": 800}).new_page()
            page.on("request", lambda request: asked.append(request.url))
            page.on("console", lambda message: said.append(message.text))
            page.on("dialog", lambda dialog: said.append(dialog.message))
            page.goto(place.as_uri())
            backs.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
            width = page.evaluate("document.documentElement.scrollWidth")
        chromium.close()

    assert set(asked) == {place.as_uri()}
    assert said == []
    assert len(backs) == 2
    assert width <= 390  # no sideways scrolling on a telephone
