"""Faults in recorded steps of small models: which call is to blame, and that a sound twin has nobody to blame."""

import pytest
import torch

from tests.analysis.compare.small_models import FAMILIES, build, record
from trainermon.analysis.compare import CompareOptions, Mode, compare
from trainermon.analysis.compare.answer.remarks import first_unequal
from trainermon.analysis.compare.answer.summary import causes_of, headline
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


def scales_what_comes_back(module):
    """Change the gradient of what the module returns, as a hook on a tensor does."""

    def watch(_, given, made):
        made.register_hook(lambda gradient: 1.05 * gradient)

    module.register_forward_hook(watch)


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("language", "layers.1.up"),  # whose gradient is one sum with that of another module
        ("language", "layers.1.norm"),
        ("language", "layers.1.drop"),  # which hands on what it is given
        ("language", "layers.1.mix"),
        ("language", "layers.2"),
        ("images", "body"),
        ("images", "body.1"),
        ("table", "right.2"),
        ("experts", "router"),
    ],
)
@every_level
@pytest.mark.parametrize("change", [scales_what_it_passes_back, scales_what_comes_back])
def test_a_gradient_that_changes_between_two_backwards_is_an_origin(family, name, level, change, tmp_path):
    target = build(family)
    change(target.get_submodule(name))
    record(tmp_path / "target", target, level=level)
    record(tmp_path / "golden", build(family), level=level)

    for mode in MODES:
        blamed = compared(tmp_path, mode).blamed
        assert blamed[0].target.direction in ("backward", "parameters_grad")
        assert blamed[0].origin == "input.0" or not blamed[0].input_error
        if change is scales_what_it_passes_back and level != "L1":
            assert f"Module.{name}." in " ".join(call.key for call in blamed)


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


class OneCall:
    """Makes the result of one function larger, the `number`-th of its name that has gradients."""

    def __init__(self, family, size):
        self.name, self.number = FUNCTION[family]
        self.size = size
        self.count = -1

    def __call__(self, name, result):
        if name != self.name or not result.requires_grad:
            return result
        self.count += 1
        noise = torch.randn(result.shape, generator=torch.Generator().manual_seed(9))
        return result * (1 + self.size * noise).to(result.dtype) if self.count == self.number else result


FUNCTION = {
    "language": ("linear", 7),
    "images": ("conv2d", 1),
    "table": ("linear", 1),
    "series": ("linear", 2),
    "experts": ("linear", 3),
}


@every_family
@every_level
@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 3e-7), (torch.bfloat16, 4e-3)])
def test_of_what_is_within_rounding_the_first_that_is_not_equal_is_named(family, level, dtype, size, tmp_path):
    record(tmp_path / "target", build(family), level=level, dtype=dtype, change=OneCall(family, size))
    record(tmp_path / "golden", build(family), level=level, dtype=dtype)

    for mode in MODES:
        comparison = compared(tmp_path, mode)
        found = first_unequal(comparison)
        assert comparison.blamed == ()
        assert "error" not in comparison.row_counts()
        assert where(found.call)[0] in (FAULTY[family], FUNCTION[family][0])
        assert not found.is_given
        assert f"{found.call.key} ({found.size:.2g})" in headline(comparison)
        assert headline(comparison).startswith("The dumps agree: ")


@every_family
def test_two_dumps_without_any_difference_have_no_first_one(family, tmp_path):
    recorded(tmp_path, family)

    assert first_unequal(compared(tmp_path)) is None


@every_family
@every_level
def test_inputs_of_other_shapes_are_said(family, level, tmp_path):
    recorded(tmp_path, family, level=level, size=4)

    assert headline(compared(tmp_path)).startswith("The inputs have other shapes ([")


@pytest.mark.parametrize(
    ("ours", "theirs"), [("language", "images"), ("table", "language"), ("experts", "images"), ("series", "table")]
)
def test_two_models_are_said_to_be_two(ours, theirs, tmp_path):
    record(tmp_path / "target", build(ours))
    record(tmp_path / "golden", build(theirs))

    assert headline(compared(tmp_path)).startswith("These are different models: ")


def test_a_dump_beside_itself_is_said_to_be_one(tmp_path):
    record(tmp_path / "target", build("table"))
    (tmp_path / "golden").symlink_to(tmp_path / "target")

    assert headline(compared(tmp_path)).startswith("The target is the golden dump itself, ")


@every_family
@every_level
def test_another_type_is_one_note(family, level, tmp_path):
    recorded(tmp_path, family, level=level, dtype=torch.bfloat16)

    for mode in MODES:
        comparison = compared(tmp_path, mode)
        assert comparison.notes[0] == "the target runs in bfloat16, the golden dump in float32"
        assert set(comparison.row_counts()) == {"pass"}


@pytest.mark.parametrize("family", ["language", "images", "table", "experts"])
@every_level
def test_after_a_faulty_step_the_weights_are_said_once(family, level, tmp_path):
    steps = {"level": level, "steps": 2, "lr": 0.05}
    record(tmp_path / "target", build(family), change=OneCall(family, 0.1), **steps)
    record(tmp_path / "golden", build(family), **steps)

    first, second = compare(tmp_path / "target", tmp_path / "golden", options=CompareOptions(mode=Mode.STATISTICS))

    assert where(first.blamed[0])[0] in (FAULTY[family], FUNCTION[family][0])
    (cause,) = causes_of(second)
    assert "parameters differ before the step" in cause.words


def test_every_family_has_a_fault():
    assert set(FAULTY) == set(FAMILIES)


@pytest.mark.parametrize(
    ("family", "name", "number"),
    [("language", "layers.1", 10), ("language", "layers.2.down", 2), ("images", "body.0", 2)],
)
@pytest.mark.parametrize("level", ["L0", "mix"])
def test_a_module_that_is_frozen_on_one_side_is_named_with_what_is_missing(family, name, number, level, tmp_path):
    model = build(family)
    model.get_submodule(name).requires_grad_(False)
    assert sum(1 for _ in model.get_submodule(name).parameters()) == number
    record(tmp_path / "target", model, level=level)
    record(tmp_path / "golden", build(family), level=level)

    for sides, where in ((("target", "golden"), "in the target"), (("golden", "target"), "in the golden dump")):
        (comparison,) = compare(*(tmp_path / side for side in sides))
        assert headline(comparison) == f"{name} is frozen {where}: {number} parameters, {number} gradients missing."


def test_without_modules_the_weights_that_functions_take_are_frozen(tmp_path):
    model = build("language")
    model.layers[1].requires_grad_(False)
    record(tmp_path / "target", model, level="L1")
    record(tmp_path / "golden", build("language"), level="L1")

    said = headline(compared(tmp_path))

    assert said.startswith("10 parameters of the 33, the first of them Functional.layer_norm.1.forward.input.weight, ")
    assert said.endswith(" are frozen in the target: 10 gradients missing.")
