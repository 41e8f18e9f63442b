"""Faults in recorded steps of small models: which call is to blame, and that a sound twin has nobody to blame."""

import pytest
import torch

from tests.analysis.compare.small_models import FAMILIES, build, record
from trainermon.analysis.compare import CompareOptions, Mode, compare
from trainermon.dump.files.reader import split_key

FAULTY = {
    "language": "layers.1.down",
    "images": "body.0",
    "table": "left.3",
    "series": "inner",
    "experts": "experts.1.gate",
}
LEVELS = ("L0", "L1", "mix")
MODES = (Mode.STATISTICS, Mode.TENSOR)
every_family = pytest.mark.parametrize("family", FAULTY)
every_level = pytest.mark.parametrize("level", LEVELS)


def compared(folder, mode=Mode.STATISTICS):
    (comparison,) = compare(folder / "target", folder / "golden", options=CompareOptions(mode=mode))
    return comparison


def recorded(folder, family, change=None, **more):
    """Record a step of a model that `change` was made to, and one of a sound model."""
    target = build(family)
    if change is not None:
        change(target.get_submodule(FAULTY[family]))
    record(folder / "target", target, **more)
    record(folder / "golden", build(family), level=more.get("level", "mix"))


def where(call):
    name, _, direction, _ = split_key(call.key)
    return name, direction


@every_family
@every_level
def test_sound_twins_have_nobody_to_blame(family, level, tmp_path):
    recorded(tmp_path, family, level=level)

    assert [compared(tmp_path, mode).blamed for mode in MODES] == [(), ()]


def scales_what_it_passes_back(module):
    """Change a gradient behind the backward of the module's function, as a hook of a wrapper does."""
    module.register_full_backward_hook(lambda _, given, made: tuple(g if g is None else 1.05 * g for g in given))


@every_family
@pytest.mark.parametrize("level", ["L0", "mix"])
def test_a_gradient_that_is_changed_behind_its_backward_is_the_modules_fault(family, level, tmp_path):
    recorded(tmp_path, family, scales_what_it_passes_back, level=level)

    for mode in MODES:
        assert where(compared(tmp_path, mode).blamed[0]) == (FAULTY[family], "backward")


@pytest.mark.parametrize("family", ["language", "table", "series"])
def test_without_modules_it_came_in_with_the_backward_behind_it(family, tmp_path):
    recorded(tmp_path, family, scales_what_it_passes_back, level="L1")

    (call,) = compared(tmp_path).blamed
    assert (call.target.direction, call.origin) == ("backward", "input.0")


def unseen(factor):
    """Return a hook that changes what a module is given, where no dump looks."""

    def change(_, given):
        with torch._C.DisableTorchFunction():
            return (given[0] * factor,)

    return change


@pytest.mark.parametrize(
    ("family", "owner", "name"),
    [
        ("language", "layers.1", "layers.1.drop"),
        ("images", "body", "body.2"),
        ("images", "body", "body.3"),
        ("table", "left", "left.2"),
        ("table", "right", "right.2"),
    ],
)
@pytest.mark.parametrize("level", ["L0", "mix"])
def test_an_operation_that_returns_what_it_is_given_hides_no_gap_before_it(family, owner, name, level, tmp_path):
    target = build(family)
    target.get_submodule(name).register_forward_pre_hook(unseen(1.09), prepend=True)
    record(tmp_path / "target", target, level=level)
    record(tmp_path / "golden", build(family), level=level)

    for mode in MODES:
        (call,) = compared(tmp_path, mode).blamed
        assert where(call) == (owner, "forward")
        assert split_key(call.given_to)[0] == name


def reversed_blocks(name, result):
    """Return the same elements in another order: statistics cannot tell, elements can."""
    return result.flip(0) if name == "dropout" else result


@pytest.mark.parametrize("family", ["language", "images", "table", "experts"])
def test_the_same_elements_in_another_order_are_not_what_was_given(family, tmp_path):
    recorded(tmp_path, family, change=None, level="L1")
    record(tmp_path / "other", build(family), level="L1", change=reversed_blocks)

    (comparison,) = compare(tmp_path / "other", tmp_path / "golden", options=CompareOptions(mode=Mode.TENSOR))
    assert split_key(comparison.blamed[0].key)[0] == "dropout"


def replace_weight(module):
    draws = torch.Generator().manual_seed(77)
    with torch.no_grad():
        module.weight.copy_(module.weight.std() * torch.randn(module.weight.shape, generator=draws))


def nudge_weight(module):
    """Another order of the weights, and of each a little more: statistics show the little alone."""
    with torch.no_grad():
        module.weight.copy_(1.012 * module.weight.flip(0))


@every_family
@every_level
@pytest.mark.parametrize("change", [replace_weight, nudge_weight])
def test_a_weight_that_differs_explains_whatever_is_made_of_it(family, level, change, tmp_path):
    recorded(tmp_path, family, change, level=level)

    for mode in MODES:
        blamed = compared(tmp_path, mode).blamed
        assert blamed[0].origin in ("parameters.weight", "input.1")
        assert {call.target.direction for call in blamed} == {"forward"}
        assert len({call.target.name for call in blamed}) == 1


@every_family
@every_level
def test_nothing_is_judged_of_batches_of_other_sizes(family, level, tmp_path):
    recorded(tmp_path, family, level=level, size=4)

    assert [compared(tmp_path, mode).blamed for mode in MODES] == [(), ()]


@every_level
def test_other_routes_of_tokens_explain_what_experts_are_given_and_their_gradients(level, tmp_path):
    target = build("experts")
    with torch.no_grad():
        target.router.weight.mul_(-1.0)
    record(tmp_path / "target", target, level=level)
    record(tmp_path / "golden", build("experts"), level=level)

    for mode in MODES:
        (call,) = compared(tmp_path, mode).blamed
        assert where(call)[0] in ("router", "linear")


def spoils_what_it_passes_back(module):
    module.register_full_backward_hook(lambda _, given, made: tuple(g if g is None else g * torch.nan for g in given))


def is_given_nan(module):
    """The gradient of what the module returns is NaN."""

    def watch(_, given, made):
        made.register_hook(lambda gradient: gradient * torch.nan)

    module.register_forward_hook(watch)


@pytest.mark.parametrize("family", ["language", "images", "table", "experts"])
@pytest.mark.parametrize("level", ["L0", "mix"])
@pytest.mark.parametrize("change", [spoils_what_it_passes_back, is_given_nan])
def test_a_nan_of_a_backward_is_blamed_once_and_where_the_target_alone_shows_it(family, level, change, tmp_path):
    recorded(tmp_path, family, change, level=level)

    for mode in MODES:
        (call,) = compared(tmp_path, mode).blamed
        assert where(call) == (FAULTY[family], "backward")


@pytest.mark.parametrize("family", ["language", "images", "table", "series", "experts"])
@pytest.mark.parametrize("change", [spoils_what_it_passes_back, is_given_nan])
def test_a_nan_of_a_backward_has_one_origin_among_functions(family, change, tmp_path):
    recorded(tmp_path, family, change, level="L1")

    assert len(compared(tmp_path).blamed) == 1


def last_bits(name, result):
    """Move bfloat16 results by its unit roundoff: another kernel."""
    if result.dtype is not torch.bfloat16 or name not in ("linear", "conv2d", "gelu", "tanh", "silu", "layer_norm"):
        return result
    signs = torch.sign(torch.randn(result.shape, generator=torch.Generator().manual_seed(3)))
    return result * (1 + 2**-8 * signs).to(torch.bfloat16)


@every_family
@every_level
def test_what_was_cast_from_a_coarser_type_may_be_off_by_that(family, level, tmp_path):
    """Losses are computed in float32 of logits that are bfloat16."""
    record(tmp_path / "target", build(family), level=level, dtype=torch.bfloat16, change=last_bits)
    record(tmp_path / "golden", build(family), level=level, dtype=torch.bfloat16)

    for mode in MODES:
        comparison = compared(tmp_path, mode)
        assert set(comparison.row_counts()) == {"pass"}
        assert any(row.difference.relative for row in comparison.rows())


def test_every_family_has_a_fault():
    assert set(FAULTY) == set(FAMILIES)
