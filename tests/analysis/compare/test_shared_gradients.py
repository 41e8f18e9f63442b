"""Two modules that take one tensor add to one gradient: who changed it is told, or that the dump has the sum alone."""

import pytest

from tests.analysis.compare.small_models import build, record
from trainermon.analysis.compare import CompareOptions, Mode, compare
from trainermon.analysis.compare.answer.summary import causes_of, headline

every_mode = pytest.mark.parametrize("mode", [Mode.STATISTICS, Mode.TENSOR])
every_name = pytest.mark.parametrize("name", ["up", "gate"])


def scales_back(factor):
    """Return a hook that changes what a module passes back, behind its own backward."""
    return lambda _, given, made: tuple(g if g is None else factor * g for g in given)


def compared(folder, mode):
    (comparison,) = compare(folder / "target", folder / "golden", options=CompareOptions(mode=mode))
    return comparison


def recorded(folder, name, level):
    target = build("language")
    target.layers[1].get_submodule(name).register_full_backward_hook(scales_back(1.05))
    record(folder / "target", target, level=level)
    record(folder / "golden", build("language"), level=level)


@every_mode
@every_name
def test_where_functions_show_what_each_adds_the_other_one_is_innocent(name, mode, tmp_path):
    recorded(tmp_path, name, "mix")

    (call,) = compared(tmp_path, mode).blamed
    assert call.key == f"Module.layers.1.{name}.Linear.backward.0"


@every_mode
@every_name
def test_where_there_is_the_sum_alone_both_are_named_as_one(name, mode, tmp_path):
    recorded(tmp_path, name, "L0")
    comparison = compared(tmp_path, mode)

    (cause,) = causes_of(comparison)
    keys = [f"Module.layers.1.{each}.Linear.backward.0" for each in ("gate", "up")]
    assert sorted(call.key for call in comparison.blamed) == sorted(keys)
    assert cause.call.key in keys
    (other,) = {*keys} - {cause.call.key}
    assert f"; or in {other}: what they pass back is one sum, and of what each adds nothing is dumped" in cause.words
    assert other in headline(comparison)


@every_mode
@pytest.mark.parametrize("level", ["L0", "mix"])
def test_hooks_that_change_nothing_have_nobody_to_blame(mode, level, tmp_path):
    target = build("language")
    target.layers[1].up.register_full_backward_hook(scales_back(1.0))
    record(tmp_path / "target", target, level=level)
    record(tmp_path / "golden", build("language"), level=level)

    assert compared(tmp_path, mode).blamed == ()


@every_mode
def test_of_two_that_both_have_hooks_both_are_named(mode, tmp_path):
    target = build("language")
    target.layers[1].up.register_full_backward_hook(scales_back(1.05))
    target.layers[1].gate.register_full_backward_hook(scales_back(1.0))
    record(tmp_path / "target", target, level="mix")
    record(tmp_path / "golden", build("language"), level="mix")

    (cause,) = causes_of(compared(tmp_path, mode))
    assert "; or in Module.layers.1." in cause.words


@every_mode
@pytest.mark.parametrize("level", ["L0", "mix"])
def test_a_tied_weight_is_not_to_blame_for_what_its_other_use_was_given(mode, level, tmp_path):
    models = [build("language") for _ in range(2)]
    for model in models:
        model.head.weight = model.embed.weight
    models[0].layers[1].down.register_full_backward_hook(scales_back(1.05))
    for model, side in zip(models, ("target", "golden"), strict=True):
        record(tmp_path / side, model, level=level)

    assert [call.key for call in compared(tmp_path, mode).blamed] == ["Module.layers.1.down.Linear.backward.0"]
