"""The noise model on operations that numpy carries out twice: soundly in another order, and with a fault.

Truth is float64: what a sound computation is off by, and whether it is off by more than its inputs were.
"""

import json
import math
from typing import Any

import numpy as np
import pytest

from trainermon.analysis.compare import CompareOptions, Mode, compare
from trainermon.analysis.compare.items import DumpRow
from trainermon.analysis.compare.metrics import relative_size, statistics_differences

SIZE = 256
OPERATIONS = {
    "Functional.linear": lambda x, w: x @ w.T,
    "Torch.add": lambda x, w: x[:, : len(w)] + w[: len(x), : len(w)],
    "Torch.sum": lambda x, w: x.sum(axis=1),
    "Torch.relu": lambda x, w: np.maximum(x, 0),
    "Functional.layer_norm": lambda x, w: (x - x.mean(1, keepdims=True)) / x.std(1, keepdims=True),
    "Functional.softmax": lambda x, w: (
        np.exp(x - x.max(1, keepdims=True)) / np.exp(x - x.max(1, keepdims=True)).sum(1, keepdims=True)
    ),
}


def form(array, dtype="torch.float32", **more):
    """Return a tensor's form as a dump has it, with statistics in float64."""
    exact = np.asarray(array, np.float64)
    numbers = {"Max": exact.max(), "Min": exact.min(), "Mean": exact.mean(), "Norm": np.linalg.norm(exact)}
    shape = list(exact.shape)
    return (
        {"type": "torch.Tensor", "dtype": dtype, "shape": shape, "requires_grad": False}
        | {name: float(number) for name, number in numbers.items()}
        | more
    )


def dump(folder, calls, construct=None):
    """Write a dump of `calls`: (key, inputs, outputs)."""
    folder.mkdir()
    data = {key: {"input_args": inputs, "input_kwargs": {}, "output": outputs} for key, inputs, outputs in calls}
    (folder / "dump.json").write_text(json.dumps({"task": "statistics", "level": "mix", "data": data}))
    (folder / "construct.json").write_text(json.dumps(construct or {}))
    return folder


def one_call(folder, name, x, w, result, **more):
    return dump(folder, [(f"{name}.0.forward", [form(x, **more), form(w, **more)], [form(result, **more)])])


def blamed(ours, theirs, **options):
    (comparison,) = compare(ours, theirs, options=CompareOptions(**options))
    return [call.key for call in comparison.blamed]


@pytest.fixture
def operands():
    random = np.random.default_rng(1)
    return random.normal(size=(16, SIZE)).astype(np.float32), random.normal(size=(16, SIZE)).astype(np.float32)


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("input_error", [0.0, 1e-6, 1e-3])
def test_a_sound_operation_is_not_blamed_for_the_error_of_its_inputs(name, input_error, operands, tmp_path):
    x, w = operands
    noisy = (x * (1 + input_error * np.random.default_rng(2).normal(size=x.shape))).astype(np.float32)
    ours = one_call(tmp_path / "a", name, noisy, w, OPERATIONS[name](noisy, w))
    theirs = one_call(tmp_path / "b", name, x, w, OPERATIONS[name](x.astype(np.float64), w.astype(np.float64)))

    assert blamed(ours, theirs) == []


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_result_that_is_a_hundredth_off_is_blamed(name, operands, tmp_path):
    x, w = operands
    result = OPERATIONS[name](x, w)
    ours, theirs = one_call(tmp_path / "a", name, x, w, result * 1.01), one_call(tmp_path / "b", name, x, w, result)

    assert blamed(ours, theirs) == [f"{name}.0.forward"]


def test_cancellation_explains_what_a_sum_makes_of_a_small_error(operands, tmp_path):
    x, _ = operands
    noise = (x * 1e-6 * np.random.default_rng(3).normal(size=x.shape)).astype(np.float32)
    near = (-x * (1 - 1e-4)).astype(np.float32)
    ours = one_call(tmp_path / "a", "Torch.add", x + noise, near, x + noise + near)
    theirs = one_call(tmp_path / "b", "Torch.add", x, near, x + near)

    (comparison,) = compare(ours, theirs)
    (call,) = comparison.calls
    assert call.output_error > 100 * call.input_error
    assert not call.blamed


def test_a_normalisation_may_enlarge_what_its_mean_hides(operands, tmp_path):
    x, w = operands
    layer_norm = OPERATIONS["Functional.layer_norm"]
    shifted = x.astype(np.float64) + 100
    noisy = shifted * (1 + 1e-3 * np.random.default_rng(2).normal(size=x.shape))
    ours = one_call(tmp_path / "a", "Functional.layer_norm", noisy, w, layer_norm(noisy, w))
    theirs = one_call(tmp_path / "b", "Functional.layer_norm", shifted, w, layer_norm(shifted, w))

    (comparison,) = compare(ours, theirs)
    (call,) = comparison.calls
    assert call.output_error > 5 * call.input_error
    assert not call.blamed


@pytest.mark.parametrize("name", ["Functional.linear", "Torch.relu", "Functional.layer_norm"])
def test_half_as_much_again_is_blamed_in_bfloat16_though_inputs_differ_by_a_hundredth(name, operands, tmp_path):
    x, w = operands
    named = {"dtype": "torch.bfloat16"}
    noisy = x * (1 + 1e-2 * np.random.default_rng(2).normal(size=x.shape))
    theirs = one_call(tmp_path / "b", name, x, w, OPERATIONS[name](x, w), **named)
    ours = one_call(tmp_path / "a", name, noisy, w, OPERATIONS[name](noisy, w), **named)
    faulty = one_call(tmp_path / "c", name, noisy, w, 1.5 * OPERATIONS[name](noisy, w), **named)

    assert blamed(ours, theirs) == []
    assert blamed(faulty, theirs) == [f"{name}.0.forward"]


@pytest.mark.parametrize(
    ("dtype", "unit"), [("float64", 2.0**-53), ("float32", 2.0**-24), ("float16", 2.0**-11), ("bfloat16", 2.0**-8)]
)
def test_thresholds_follow_the_type(dtype, unit, operands, tmp_path):
    x, w = operands
    named = {"dtype": f"torch.{dtype}"}
    theirs = one_call(tmp_path / "b", "Torch.relu", x, w, x, **named)
    below = one_call(tmp_path / "below", "Torch.relu", x, w, x.astype(np.float64) * (1 + 2 * unit), **named)
    above = one_call(tmp_path / "above", "Torch.relu", x, w, x.astype(np.float64) * (1 + 64 * unit), **named)

    assert blamed(below, theirs) == []
    assert blamed(above, theirs) == ["Torch.relu.0.forward"]


def test_the_blamed_child_clears_its_parents_and_only_these(operands, tmp_path):
    x, w = operands
    y = x @ w.T

    def step(folder, factor):
        keys = ["Functional.linear.0.forward", "Module.mlp.fc.Linear.forward.0", "Module.mlp.MLP.forward.0"]
        calls = [(key, [form(x), form(w)], [form(y * factor)]) for key in keys]
        calls.append(("Torch.relu.0.forward", [form(y * factor)], [form(y * factor * factor)]))
        return dump(folder, calls, {keys[0]: keys[1], keys[1]: keys[2], keys[2]: None})

    (comparison,) = compare(step(tmp_path / "a", 2.0), step(tmp_path / "b", 1.0))
    assert [call.key for call in comparison.blamed] == ["Functional.linear.0.forward"]
    assert [call.result for call in comparison.calls] == ["error", "warning", "warning", "warning"]
    messages = [row.messages[0] for row in comparison.rows() if row.messages]
    assert any("because of a call within it" in message for message in messages)
    assert any("explained by its inputs" in message for message in messages)


@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1e-3, 1e30])
def test_a_fault_is_a_fault_at_any_magnitude(scale, operands, tmp_path):
    x, w = (operand.astype(np.float64) * scale for operand in operands)
    theirs = one_call(tmp_path / "b", "Torch.relu", x, w, x)

    assert blamed(one_call(tmp_path / "a", "Torch.relu", x, w, 2 * x), theirs) == ["Torch.relu.0.forward"]
    assert blamed(one_call(tmp_path / "c", "Torch.relu", x, w, x), theirs) == []


def test_what_is_zero_on_one_side_and_next_to_it_on_the_other_is_no_difference(operands, tmp_path):
    x, w = operands
    ours, theirs = (
        one_call(tmp_path / name, "Torch.relu", x, w, x * scale) for name, scale in (("a", 0), ("b", 1e-42))
    )

    assert blamed(ours, theirs) == []
    assert blamed(ours, one_call(tmp_path / "c", "Torch.relu", x, w, x)) == ["Torch.relu.0.forward"]


NONFINITE: dict[str, Any] = {
    "NaN that is counted": ({"nans": 1, "infs": 0}, {"nans": 0, "infs": 0}),
    "Inf that is counted": ({"nans": 0, "infs": 2}, {"nans": 0, "infs": 0}),
    "another number of NaN": ({"nans": 2, "infs": 0}, {"nans": 1, "infs": 0}),
    "NaN instead of Inf": ({"nans": 1, "infs": 0}, {"nans": 0, "infs": 1}),
    "NaN in msprobe's statistics": ({"Max": math.nan, "Min": math.nan, "Mean": math.nan, "Norm": math.nan}, {}),
    "Inf in msprobe's statistics": ({"Max": math.inf, "Mean": math.inf, "Norm": math.inf}, {}),
    "NaN instead of Inf in msprobe's": ({"Max": math.nan, "Min": math.nan}, {"Max": math.inf}),
}


@pytest.mark.parametrize("case", NONFINITE)
@pytest.mark.parametrize("order", [1, -1])
def test_what_is_not_finite_on_one_side_only_is_always_an_error(case, order, operands, tmp_path):
    x, w = operands
    ours, theirs = (
        dump(tmp_path / name, [("Torch.relu.0.forward", [form(x), form(w)], [form(x, **more)])])
        for name, more in zip("ab", NONFINITE[case][::order], strict=True)
    )

    (comparison,) = compare(ours, theirs)
    assert [call.key for call in comparison.blamed] == ["Torch.relu.0.forward"]
    assert [row.result for row in comparison.rows()] == ["pass", "pass", "error"]


@pytest.mark.parametrize("more", [{"nans": 3, "infs": 1}, {"Min": -math.inf, "Mean": -math.inf, "Norm": math.inf}])
def test_beside_the_same_nonfinite_elements_the_finite_ones_are_compared(more, operands, tmp_path):
    x, w = operands
    ours, theirs, same = (
        dump(tmp_path / name, [("Torch.relu.0.forward", [form(x), form(w)], [form(x * factor, **more)])])
        for name, factor in (("a", 3.0), ("b", 1.0), ("c", 1.0))
    )

    assert blamed(ours, theirs) == ["Torch.relu.0.forward"]
    assert blamed(same, theirs) == []


def test_many_rows_at_once_are_measured_as_each_of_them():
    random = np.random.default_rng(5)
    values = [0.0, 1.0, -2.0, 1e-40, 1e30, math.nan, math.inf, None, 3, True]

    def item():
        max_, min_, mean, norm = (values[index] for index in random.integers(0, len(values), 4))
        norm = norm and abs(norm)
        counted = int(random.integers(0, 2)) if random.random() < 0.5 else None
        dtype = ("torch.float32", "torch.int64", None)[random.integers(0, 3)]
        return DumpRow("output.0", "output", dtype, (4, 2), False, max_, min_, mean, norm, counted, counted)

    pairs = [(item(), item()) for _ in range(3000)]
    found = [difference.relative for difference in statistics_differences(pairs)]
    one_by_one = [relative_size(*pair) for pair in pairs]

    assert [size is None for size in found] == [size is None for size in one_by_one]
    found, one_by_one = ([size for size in sizes if size is not None] for sizes in (found, one_by_one))
    assert found == pytest.approx(one_by_one, nan_ok=True, rel=1e-12)


def test_a_baseline_of_the_golden_side_counts_as_one_of_the_target(operands, tmp_path):
    x, w = operands
    runs = [one_call(tmp_path / name, "Torch.relu", x, w, x * (1 + 1e-3 * index)) for index, name in enumerate("abc")]

    assert blamed(runs[1], runs[0]) == ["Torch.relu.0.forward"]
    assert blamed(runs[1], runs[0], baseline=(runs[2], runs[1])) == []
    assert blamed(runs[1], runs[0], baseline=(runs[0], runs[0]), mode=Mode.STATISTICS) == ["Torch.relu.0.forward"]


def biased(folder, gradient, x, bias_gradient):
    """Write a dump of a linear function whose bias takes the sum of `gradient`, and of its backward."""
    weight, bias = np.ones((SIZE, SIZE)), np.ones(SIZE)
    calls = [("Functional.linear.0.forward", [form(x), form(weight), form(bias)], [form(x)])]
    folder = dump(folder, calls)
    whole = json.loads((folder / "dump.json").read_text())
    made = [form(gradient), form(gradient.T.astype(np.float64) @ x), form(bias_gradient)]
    whole["data"]["Functional.linear.0.backward"] = {"input": [form(gradient)], "output": made}
    (folder / "dump.json").write_text(json.dumps(whole))
    return folder


def test_a_gradient_that_is_zero_but_for_rounding_is_not_compared_with_that_of_another_order(operands, tmp_path):
    """As that of the keys' bias, which softmax does not see: half of the terms are the negative of the others."""
    x, _ = operands
    random = np.random.default_rng(4)
    half = random.normal(size=(8, SIZE)).astype(np.float32)
    gradient = np.concatenate([half, -half])
    orders = [random.permutation(16) for _ in range(2)]
    sums = [np.add.accumulate(gradient[order], axis=0, dtype=np.float32)[-1] for order in orders]
    assert np.linalg.norm(sums[0] - sums[1]) > 0.5 * np.linalg.norm(sums[0])
    ours, theirs = (biased(tmp_path / name, gradient, x, made) for name, made in zip("ab", sums, strict=True))
    faulty = biased(tmp_path / "c", gradient, x, sums[0] + np.float32(0.01))

    assert blamed(ours, theirs) == []
    assert blamed(faulty, theirs) == ["Functional.linear.0.backward"]


def test_limits_of_two_types_are_one_mask_as_plain_arguments_too(operands, tmp_path):
    x, w = operands
    limits = (-float(np.finfo(np.float64).max), -float(np.finfo(np.float32).max))
    nesting = {"Torch.where.0.forward": "Module.a.A.forward.0", "Module.a.A.forward.0": None}
    ours, theirs = (
        dump(
            tmp_path / name,
            [
                ("Torch.where.0.forward", [form(x), form(w), {"type": "float", "value": limit}], [form(x)]),
                ("Module.a.A.forward.0", [form(x), form(w)], [form(x)]),
            ],
            nesting,
        )
        for name, limit in zip("ab", limits, strict=True)
    )

    (comparison,) = compare(ours, theirs)
    assert comparison.blamed == ()
    assert not comparison.row_counts().get("error")
