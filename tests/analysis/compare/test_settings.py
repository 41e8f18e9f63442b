"""What the script does otherwise in every step comes before the parameters that it has made different by then."""

import functools
import re

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, gelu

from trainermon import PrecisionDebugger
from trainermon.analysis.compare import compare
from trainermon.analysis.compare.answer.summary import causes_of, headline
from trainermon.analysis.compare.output.pages import write_html

WIDTH, LENGTH = 16, 8
DRIFT = (
    r"Module\.\S+\.parameters\.\w+|Functional\.\S+\.input\.\w+",
    r"\d+ of 23 parameters differ before the step, this one most,",
)


class Layer(nn.Module):
    """Attention and two linear layers, in which a training may be another by `how`."""

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.norm2 = nn.LayerNorm(WIDTH, eps=1e-3 if how == "eps" else 1e-5)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        hidden = torch.ones(LENGTH, LENGTH).triu(2 if self.how == "mask" else 1).bool()
        x = x + (q @ k.mT * 0.25).masked_fill(hidden, -torch.inf).softmax(-1) @ v
        h = self.up(self.norm2(x))
        h = gelu(h, approximate="tanh") if self.how == "gelu" else gelu(h)
        return x + self.down(h * 1.001 if self.how == "more" else h)


def recorded(folder, how, *, level="mix", task="tensor", step=3):
    """Train a small language model for a few steps, and return the dump of the last."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(11, WIDTH), Layer(""), Layer(how), nn.Linear(WIDTH, 11))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    debugger = PrecisionDebugger(dump_path=str(folder), level=level, task=task, step=[step])
    for _ in range(step + 1):
        tokens = torch.randint(11, (4, LENGTH + 1))
        debugger.start(model)
        cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
        debugger.stop()
        optimizer.step()
        optimizer.zero_grad()
        debugger.step()
    debugger.close()
    return folder


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """Return a function that compares a changed training with the plain one; each is recorded once."""

    @functools.cache
    def dump_of(how, **where):
        return recorded(tmp_path_factory.mktemp("dump"), how, **where)

    def compared_with_plain(how, **where):
        (comparison,) = compare(dump_of(how, **where), dump_of("", **where))
        return comparison

    return compared_with_plain


def behind_drift(sentence):
    """Return what a sentence says before it comes to the parameters that differ."""
    said, _, drift = re.fullmatch(rf"(.*); ({DRIFT[0]}): ({DRIFT[1]}.*)", sentence).groups()
    assert drift.endswith("and no call of the step made that: an earlier step did, or what was loaded.")
    return said


@pytest.mark.parametrize("task", ["statistics", "tensor"])
@pytest.mark.parametrize("level", ["L0", "L1", "mix"])
def test_an_epsilon_comes_before_the_parameters_that_it_changed(level, task, compared):
    comparison = compared("eps", level=level, task=task)

    said = behind_drift(headline(comparison))
    call = "Module.2.norm2.LayerNorm.forward.0 has eps" if level == "L0" else "Functional.layer_norm.3.forward"
    assert said.startswith(f"The first difference: {call}")
    assert "0.001, where the golden dump has 1e-05" in said
    assert "test_settings.py:" in said
    setting, drift, *_ = causes_of(comparison)
    assert "0.001" in setting.words
    assert re.match(DRIFT[1], drift.words)


@pytest.mark.parametrize("where", [{"level": "L1", "task": "statistics"}, {}])
@pytest.mark.parametrize(
    ("how", "call", "words"),
    [
        ("gelu", "Functional.gelu.1.forward", "was given tanh, where the golden dump has nothing (input.approximate)"),
        ("more", "Tensor.__mul__.2.forward", "is in the target alone"),
    ],
)
def test_what_one_side_alone_has_comes_before_the_parameters_that_it_changed(how, call, words, where, compared):
    said = behind_drift(headline(compared(how, **where)))

    assert said.startswith(f"The first difference: {call}")
    assert words in said


def test_what_the_golden_dump_alone_has_comes_first_as_well(tmp_path):
    (comparison,) = compare(recorded(tmp_path / "a", ""), recorded(tmp_path / "b", "more"))

    said = behind_drift(headline(comparison))
    assert said.startswith("The first difference: Tensor.__mul__.2.forward in 2 (Layer) is in the golden dump alone")


@pytest.mark.parametrize(
    ("how", "level", "words"),
    [
        ("eps", "mix", "it gave Functional.layer_norm.3.forward 0.001, where the golden dump has 1e-05 (input.eps)"),
        ("eps", "L0", "; it has eps 0.001, where the golden dump has 1e-05"),
        ("gelu", "mix", "; it was given tanh, where the golden dump has nothing (input.approximate)"),
        ("mask", "mix", "is not the same: input.1 is a mask with 21 of 64 true, where the golden dump has 28"),
    ],
)
def test_the_first_step_has_both_values(how, level, words, compared):
    assert words in headline(compared(how, level=level, step=0))


def test_only_what_the_sentence_blames_is_marked_in_the_page(compared, tmp_path):
    comparison = compared("eps")
    write_html(comparison, tmp_path / "page.html")

    calls = (tmp_path / "page.html").read_text().split("<summary>")[1:]
    marked = [
        re.search("<code>(.*?)</code>", call)[1] for call in calls if "to blame" in call.partition("</summary>")[0]
    ]
    assert sorted(marked) == sorted(one.call.key for one in causes_of(comparison))
    assert 1 < len(marked) < len(comparison.blamed)
