"""Weights that differ after a step that went wrong are said once, with what that step did; its fault stays first."""

import pytest

from tests.analysis.compare.small_models import build, record
from tests.analysis.compare.test_small_models import scales_what_it_passes_back
from trainermon.analysis.compare import CompareOptions, Mode, compare
from trainermon.analysis.compare.answer.summary import causes_of, first_different, headline
from trainermon.analysis.compare.distributed import outcomes

LOWEST = {"language": "layers.0.down", "images": "body.0", "table": "left.3", "experts": "experts.0.down"}
every_level = pytest.mark.parametrize("level", ["L0", "L1", "mix"])


def recorded(folder, family, level, change=None, *, lr=0.05, steps=2):
    target = build(family)
    if change is not None:
        change(target.get_submodule(LOWEST[family]))
    record(folder / "target", target, level=level, steps=steps, lr=lr)
    record(folder / "golden", build(family), level=level, steps=steps, lr=0.05)


def compared(folder):
    return list(compare(folder / "target", folder / "golden", options=CompareOptions(mode=Mode.STATISTICS)))


@pytest.mark.parametrize("family", LOWEST)
@every_level
def test_gradients_of_the_step_before_are_named_once(family, level, tmp_path):
    recorded(tmp_path, family, level, scales_what_it_passes_back)

    first, second = compared(tmp_path)

    place = causes_of(first)[0].call.key
    assert place.split(".")[-2 if level != "L1" else -1] == "backward"
    (cause,) = [one for one in causes_of(second) if one.call.target.direction == "forward"]
    assert " parameters differ before the step, this one most, by " in cause.words or "the parameter " in cause.words
    assert cause.words.endswith(f": gradients of step 0 differed, where {place} is the first difference")


@every_level
def test_an_optimizer_that_made_other_weights_of_equal_gradients_is_named(level, tmp_path):
    recorded(tmp_path, "language", level, lr=0.1)

    first, second = compared(tmp_path)

    assert not first.blamed
    said = "of step 0 the gradients agree: its optimizer made that, or what wrote to weights since."
    assert headline(second).endswith(f": {said}")


def test_the_step_with_the_fault_stays_first(tmp_path):
    recorded(tmp_path, "language", "mix", scales_what_it_passes_back, steps=3)

    found = list(outcomes(tmp_path / "target", tmp_path / "golden", None, options=CompareOptions()))

    assert first_different(found).label.startswith("step0")
    assert [len([words for _, words in one.blamed if "parameter" in words]) for one in found] == [0, 1, 1]


def test_of_a_step_alone_nothing_is_known_of_the_one_before(tmp_path):
    recorded(tmp_path, "language", "mix", scales_what_it_passes_back)
    step = "step1/rank0"

    (comparison,) = compare(tmp_path / "target" / step, tmp_path / "golden" / step)
    assert comparison.step_before.step == 0
    (tmp_path / "golden/step0/rank0/dump.json").unlink()
    (comparison,) = compare(tmp_path / "target" / step, tmp_path / "golden" / step)
    assert comparison.step_before is None
