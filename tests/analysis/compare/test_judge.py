"""Who is blamed, on dumps made by hand: parameters, extra calls, sums of gradients, indices, and inner types."""

import math

import pytest
import torch

from tests.analysis.compare.dumps import forward, tensor, write_dump
from trainermon.analysis.compare import compare
from trainermon.analysis.compare.answer.summary import headline

BLOCK, LINEAR = "Module.b.Block.forward.0", "Module.b.fc.Linear.forward.0"


def form(value, shape=(64, 64), **more):
    return tensor(shape=shape, value=value, requires_grad=True, **more)


def found(tmp_path, target, golden, construct=None):
    sides = construct if isinstance(construct, tuple) else (construct, construct)
    ours, theirs = (
        write_dump(tmp_path / name, data, construct=nesting)
        for name, data, nesting in zip("ab", (target, golden), sides, strict=True)
    )
    (comparison,) = compare(ours, theirs)
    return comparison


def blamed(comparison):
    return [(call.key, call.origin) for call in comparison.blamed]


def block(weight, output, own=1.0):
    inner = forward(form(1.0), output=form(output), parameters={"weight": form(weight)})
    return {LINEAR: inner, BLOCK: forward(form(1.0), output=form(2 * output * own))}


def test_a_parameter_that_differs_is_the_origin_and_nothing_around_it(tmp_path):
    comparison = found(tmp_path, block(0.5005, 0.7007), block(0.5, 0.7), {LINEAR: BLOCK, BLOCK: None})

    assert blamed(comparison) == [(LINEAR, "parameters.weight")]
    (row,) = [row for row in comparison.rows() if row.messages and row.target.place == "parameters.weight"]
    assert row.result == "error"


def test_a_module_is_blamed_for_its_own_code_after_what_its_calls_made(tmp_path):
    comparison = found(tmp_path, block(0.5, 0.7, own=1.001), block(0.5, 0.7), {LINEAR: BLOCK, BLOCK: None})

    assert blamed(comparison) == [(BLOCK, "")]


def test_a_module_is_blamed_for_what_it_gave_to_a_call_within_it(tmp_path):
    def data(given):
        inner = forward(form(given), output=form(given), parameters={"weight": form(0.5)})
        return {LINEAR: inner, BLOCK: forward(form(1.0), output=form(given))}

    comparison = found(tmp_path, data(0.8008), data(0.8), {LINEAR: BLOCK, BLOCK: None})

    (call,) = comparison.blamed
    assert (call.key, call.given_to) == (BLOCK, LINEAR)


@pytest.mark.parametrize("dtype", ["torch.bfloat16", "torch.float32"])
def test_equal_inputs_and_a_result_that_is_four_hundredths_off_are_a_finding(dtype, tmp_path):
    def data(output):
        one = form(1.0, dtype=dtype)
        return {LINEAR: forward(one, output=one), BLOCK: forward(one, output=form(output, dtype=dtype))}

    assert blamed(found(tmp_path, data(0.52), data(0.5), {LINEAR: BLOCK, BLOCK: None})) == [(BLOCK, "")]


def adds(values, extra=False):
    """Two modules that add each; `extra`: the first adds nothing to what it has, once more."""
    data, nesting, number = {}, {}, 0
    for path, (before, after) in zip("ab", values, strict=True):
        module = f"Module.{path}.Adds.forward.0"
        for given, made in [(before, after), *([(after, after)] if extra and path == "a" else [])]:
            key = f"Tensor.__add__.{number}"
            data[f"{key}.forward"] = forward(form(given), output=form(made))
            nesting[f"{key}.forward"] = module
            number += 1
        data[module] = forward(form(before), output=form(after))
    for key in reversed([key for key in data if key.startswith("Tensor")]):
        backward = key.replace("forward", "backward")
        scale = data[key]["output"][0]["Max"]
        data[backward] = {"input": [form(scale / 7)], "output": [form(scale / 9)]}
        nesting[backward] = nesting[key].replace("forward", "backward")
    return data, nesting


def test_an_extra_call_shifts_neither_forwards_nor_backwards_behind_it(tmp_path):
    values = [(1.0, 0.6), (0.6, 0.3)]
    (ours, inner), (theirs, outer) = adds(values, extra=True), adds(values)

    comparison = found(tmp_path, ours, theirs, (inner, outer))

    assert comparison.blamed == ()
    partners = {call.target.key: call.golden and call.golden.key for call in comparison.calls if call.target}
    assert partners["Tensor.__add__.2.forward"] == "Tensor.__add__.1.forward"
    assert partners["Tensor.__add__.2.backward"] == "Tensor.__add__.1.backward"
    assert sum(partner is None for partner in partners.values()) == 2


@pytest.mark.parametrize("is_first", [True, False])
def test_functions_are_paired_where_one_side_does_not_tell_how_calls_nest(is_first, tmp_path):
    data, nesting = adds([(1.0, 0.6), (0.6, 0.3)])

    comparison = found(tmp_path, data, data, (nesting, None) if is_first else (None, nesting))

    assert [call.golden and call.golden.key for call in comparison.calls] == list(data)


def test_a_call_whose_partner_has_other_shapes_is_not_blamed(tmp_path):
    ours = {"Torch.exp.0.forward": forward(form(1.0, (4, 32)), output=form(3.0, (4, 32)))}
    theirs = {"Torch.exp.0.forward": forward(form(1.0, (4, 1)), output=form(2.0, (4, 1)))}

    assert found(tmp_path, ours, theirs).blamed == ()


def gradients(shares):
    """Two calls that take one tensor, and what each says its gradient is."""
    data = {}
    for number, share in enumerate(shares):
        data[f"Torch.exp.{number}.forward"] = forward(form(1.0), output=form(2.0 + number))
        data[f"Torch.exp.{number}.backward"] = {"input": [form(0.3 + number)], "output": [form(share)]}
    return data


def test_a_sum_over_calls_and_a_share_of_one_call_are_not_compared(tmp_path):
    comparison = found(tmp_path, gradients([0.9, 0.9]), gradients([0.4, 0.5]))

    assert comparison.blamed == ()
    assert comparison.row_counts() == {"pass": 6, "unmatched": 2}


def test_shares_are_compared_with_shares(tmp_path):
    comparison = found(tmp_path, gradients([0.4, 0.55]), gradients([0.4, 0.5]))

    assert blamed(comparison) == [("Torch.exp.1.backward", "")]


@pytest.mark.parametrize("dtype", ["torch.int64", "torch.bool"])
def test_other_indices_explain_any_result_and_are_no_small_difference(dtype, tmp_path):
    def data(index, made):
        ids = tensor(dtype, (64,), index, requires_grad=False)
        return {"Functional.embedding.0.forward": forward(ids, output=form(made))}

    comparison = found(tmp_path, data(8, 0.9), data(9, 0.5))

    assert comparison.blamed == ()
    (given, _) = comparison.rows()
    assert "bits only" in given.messages[0]


def test_indices_that_equal_inputs_do_not_give_are_a_finding(tmp_path):
    def data(index):
        return {"Torch.argmax.0.forward": forward(form(0.7), output=tensor("torch.int64", (64,), index))}

    assert blamed(found(tmp_path, data(3), data(4))) == [("Torch.argmax.0.forward", "")]


def test_the_type_within_a_module_counts_for_its_rounding(tmp_path):
    """Under autocast a block takes and gives float32, and what is within it computes in bfloat16."""

    def data(dtype, made):
        inner = forward(form(1.0), output=form(0.7, dtype=dtype))
        return {LINEAR: inner, BLOCK: forward(form(1.0), output=form(made))}

    nesting = {LINEAR: BLOCK, BLOCK: None}
    assert found(tmp_path / "1", data("torch.bfloat16", 0.503), data("torch.float32", 0.5), nesting).blamed == ()
    assert found(tmp_path / "2", data("torch.float32", 0.503), data("torch.float32", 0.5), nesting).blamed


def test_memory_that_is_written_into_is_nobodys_difference(tmp_path):
    """`torch.empty` is not in a dump, and what it returns holds anything."""

    def data(before):
        write = {"input_args": [tensor("torch.int64", (64,), before), form(0.2)], "input_kwargs": {}, "output": []}
        return {"Tensor.__setitem__.0.forward": write, BLOCK: forward(form(1.0), output=form(0.7))}

    comparison = found(tmp_path, data(139973835563872), data(7), {"Tensor.__setitem__.0.forward": BLOCK, BLOCK: None})

    assert comparison.blamed == ()


def test_of_backwards_that_share_a_gradient_the_one_whose_own_results_differ_is_to_blame(tmp_path):
    """Queries and values are made of one tensor, whose gradient is one sum; each has a gradient of its weight."""

    def data(shared, own):
        calls = {}
        for number, of_weight in enumerate([0.4, own]):
            key = f"Functional.linear.{number}"
            calls[f"{key}.forward"] = forward(form(1.0), form(0.5 + number), output=form(2.0 + number))
            calls[f"{key}.backward"] = {"input": [form(0.3 + number)], "output": [form(shared), form(of_weight)]}
        return calls

    comparison = found(tmp_path, data(0.95, 0.66), data(0.9, 0.6))

    assert blamed(comparison) == [("Functional.linear.1.backward", "")]


def test_a_gradient_that_a_later_backward_hands_on_is_no_gap(tmp_path):
    """A bias of positions goes into every layer: its gradient stands in both, and the first layer is listed first."""
    outer, first, last = "Module.m.Model.backward.0", "Module.m.0.Layer.backward.0", "Module.m.1.Layer.backward.0"
    inner = "Module.m.1.fc.Linear.backward.0"

    def data(shared, made):
        return {
            outer: {"input": [form(0.9)], "output": [form(made / 7)]},
            first: {"input": [form(made), form(shared)], "output": [form(made / 7)]},
            inner: {"input": [form(0.9)], "output": [form(made)]},
            last: {"input": [form(0.9), form(shared)], "output": [form(made), form(shared)]},
        }

    nesting = {outer: None, first: outer, inner: last, last: outer}
    comparison = found(tmp_path, data(0.33, 0.7), data(0.3, 0.6), nesting)

    assert blamed(comparison) == [(inner, "")]


def test_of_modules_that_share_a_gradient_the_one_whose_parameters_differ_is_to_blame(tmp_path):
    def data(shared, own):
        calls = {}
        for number, (name, of_weight) in enumerate([("q", 0.4), ("v", own)]):
            key = f"Module.m.{name}.Linear"
            calls[f"{key}.forward.0"] = forward(form(1.0), output=form(2.0 + number))
            calls[f"{key}.parameters_grad.0"] = {"weight": [form(of_weight)]}
            calls[f"{key}.backward.0"] = {"input": [form(0.3 + number)], "output": [form(shared)]}
        return calls

    comparison = found(tmp_path, data(0.95, 0.66), data(0.9, 0.6))

    assert {key.rpartition(".Linear.")[0] for key, _ in blamed(comparison)} == {"Module.m.v"}


@pytest.mark.parametrize(("greatest", "takes_gradient"), [(4.0, False), (4.0, True), (4.004, False)])
def test_few_other_elements_of_an_input_explain_all_that_follows(greatest, takes_gradient, tmp_path):
    """Of 4096 elements one is off by 1, which no extremum shows; where extrema differ too, more may."""

    def data(off, made):
        values = {"Max": greatest if off else 4.0, "Min": -4.0, "Mean": off / 4096, "Norm": 64.0 * (1 + off / 4000)}
        image = tensor(shape=(64, 64), requires_grad=takes_gradient) | values
        return {LINEAR: forward(image, output=form(made)), BLOCK: forward(image, output=form(made))}

    comparison = found(tmp_path, data(1.0, 640.0), data(0.0, 64.0), {LINEAR: BLOCK, BLOCK: None})

    assert bool(comparison.blamed) == (takes_gradient or greatest > 4.0)


def test_a_norm_that_was_added_up_in_another_order_tells_of_no_other_input(tmp_path):
    """The squares of the parts of a batch are added up where ranks are put together: another last bit of float64."""

    def data(norm, made):
        image = tensor(shape=(64, 64), requires_grad=False) | {"Max": 4.0, "Min": -4.0, "Mean": 0.0, "Norm": norm}
        return {LINEAR: forward(image, output=form(made)), BLOCK: forward(image, output=form(made))}

    target, golden = data(math.nextafter(64.0, 65.0), 64.64), data(64.0, 64.0)

    assert found(tmp_path, target, golden, {LINEAR: BLOCK, BLOCK: None}).blamed


def test_what_a_kink_turned_is_hidden_in_statistics_and_seen_where_the_gradient_goes(tmp_path):
    """A gradient passes relu on one side alone in a few elements: no extremum, and little of a norm."""

    def data(off):
        return {
            "Functional.linear.0.forward": forward(form(1.0), form(0.4), output=form(0.5 * (1 + off))),
            "Functional.relu.0.forward": forward(form(0.5 * (1 + off)), output=form(0.45 * (1 + off))),
            "Functional.relu.0.backward": {"input": [form(0.7)], "output": [form(0.6 * (1 + off))]},
            "Functional.linear.0.backward": {"input": [form(0.6 + 0.6 * off)], "output": [form(0.2 + 100 * off)]},
        }

    target, golden = data(1e-4), data(0.0)
    target["Functional.linear.0.forward"]["input_args"][1] = form(0.4 * (1 + 1e-4))

    assert blamed(found(tmp_path, target, golden)) == [("Functional.linear.0.forward", "input.1")]


@pytest.mark.parametrize(("is_explained", "off"), [(True, 1e-2), (False, 0.0)])
def test_a_backward_whose_gradient_was_not_dumped_is_explained_by_what_was_around_it(is_explained, off, tmp_path):
    """Autograd rewrites the backward of a write into a view: what it is given comes from no call of the dump."""
    outer = "Module.b.Block.backward.0"
    write, silu = "Tensor.copy_.0.backward", "Functional.silu.0.backward"

    def data(off, made):
        return {
            silu: {"input": [form(0.7 * (1 + off))], "output": [form(0.6 * (1 + off))]},
            outer: {"input": [form(0.9 * (1 + off))], "output": [form(0.8 * (1 + off))]},
            write: {"input": [None], "output": [None, form(made)]},
        }

    comparison = found(tmp_path, data(off, 0.52), data(0.0, 0.5), {silu: outer, write: outer, outer: None})

    assert (write not in [key for key, _ in blamed(comparison)]) == is_explained


@pytest.mark.parametrize(("is_explained", "index"), [(True, 8), (False, 9)])
def test_another_mask_explains_an_infinity_elsewhere(is_explained, index, tmp_path):
    def data(mask, least):
        given = form(0.5), tensor("torch.int64", (64,), mask, requires_grad=False)
        return {"Tensor.masked_fill.0.forward": forward(*given, output=form(0.5) | {"Min": least})}

    comparison = found(tmp_path, data(index, -math.inf), data(9, -0.5))

    assert any(math.isnan(row.difference.relative or 0.0) for row in comparison.rows())
    assert (comparison.blamed == ()) == is_explained


@pytest.mark.parametrize(
    ("dtype", "off", "is_blamed"),
    [(torch.bfloat16, 0.0, False), (torch.float32, 1e-3, True), (torch.bfloat16, 1e-2, True)],
)
def test_a_weight_that_was_cast_from_a_coarser_type_is_no_origin(dtype, off, is_blamed, tmp_path):
    """A router's weight is cast to float32 before the product, and no dump shows a cast."""

    def data(dtype, off):
        values = torch.tensor([0.1234, -0.1177, 0.0]).mul(1 + off).to(dtype).float().tolist()
        weight = form(0.4) | dict(zip(("Max", "Min", "Mean"), values, strict=True))
        return {"Functional.linear.0.forward": forward(form(1.0), weight, output=form(0.5))}

    comparison = found(tmp_path, data(dtype, off), data(torch.float32, 0.0))

    assert bool(comparison.blamed) == is_blamed
    assert any(row.result != "pass" for row in comparison.rows())


def test_a_weight_that_a_view_of_it_was_taken_of_first_is_where_it_began(tmp_path):
    """Megatron's linear layers transpose their weight in the forward: the view has the same values."""
    view, product = "Tensor.t.0.forward", "Torch.matmul.0.forward"

    def dump(weight):
        return {
            view: forward(form(weight), output=form(weight)),
            product: forward(form(2.0), form(weight), output=form(3 * weight)),
            LINEAR: forward(form(2.0), output=form(3 * weight), parameters={"weight": form(weight)}),
        }

    nesting = {view: LINEAR, product: LINEAR, LINEAR: None}

    comparison = found(tmp_path, dump(1.25), dump(1.0), nesting)

    assert blamed(comparison) == [(LINEAR, "parameters.weight")]


@pytest.mark.parametrize(
    ("key", "given", "filled"),
    [
        ("Distributed.all_to_all_single.0.forward", ("buffer", "own"), 0),
        ("Distributed.reduce_scatter_tensor.0.forward", ("buffer", "own"), 0),
        ("Distributed.irecv.0.forward", ("buffer",), 0),
        ("Distributed.gather.0.forward", ("own", ["buffer"]), 1),
    ],
)
def test_what_stood_in_a_buffer_before_it_is_filled_says_nothing(key, given, filled, tmp_path):
    def dump(chance):
        values = {"buffer": form(chance), "own": form(2.0)}
        forms = [[values[one[0]]] if isinstance(one, list) else values[one] for one in given]
        results = [form(5.0) if place == filled else one for place, one in enumerate(forms)]
        return {key: {"input_args": forms, "input_kwargs": {}, "output": results}}

    comparison = found(tmp_path, dump(math.nan), dump(1e38))

    assert blamed(comparison) == []
    assert set(comparison.row_counts()) == {"pass"}


def added_to(name, chance, beta, place):
    """Return a function that multiplies its first argument by a number, behind one that is equal on all sides."""
    number = {"type": "float", "value": beta}
    given = (form(chance), form(2.0), form(3.0), *([number] if place is None else []))
    call = forward(*given, output=form(5.0), **({place: number} if place else {}))
    return {"Torch.relu.0.forward": forward(form(2.0), output=form(2.0)), f"Torch.{name}.0.forward": call}


@pytest.mark.parametrize("place", ["beta", None])
@pytest.mark.parametrize("name", ["baddbmm", "baddbmm_", "addmm", "addmv", "addbmm", "addr", "_addmm_activation"])
def test_what_is_multiplied_by_zero_before_it_is_added_to_says_nothing(name, place, tmp_path):
    for at, chance in enumerate((math.nan, 1e38, 1.0000001)):
        comparison = found(tmp_path / f"{at}", added_to(name, chance, 0.0, place), added_to(name, 1.0, 0.0, place))

        assert set(comparison.row_counts()) == {"pass"}
        assert "not equal" not in headline(comparison)


def test_what_is_multiplied_by_another_number_before_it_is_added_to_counts(tmp_path):
    unequal = found(tmp_path, added_to("baddbmm", 1.0000001, 1.0, "beta"), added_to("baddbmm", 1.0, 1.0, "beta"))

    assert "what was given to Torch.baddbmm.0.forward" in headline(unequal)


@pytest.mark.parametrize("is_tuple", [False, True])
def test_what_stood_in_the_tensor_that_takes_the_result_says_nothing(is_tuple, tmp_path):
    def dump(chance):
        out = [form(chance)] if is_tuple else form(chance)
        call = forward(form(2.0), form(3.0), output=form(5.0), out=out)
        return {"Torch.relu.0.forward": forward(form(2.0), output=form(2.0)), "Torch.sort.0.forward": call}

    for at, chance in enumerate((math.nan, 1e38, 1.0000001)):
        comparison = found(tmp_path / f"{at}", dump(chance), dump(1.0))

        assert set(comparison.row_counts()) == {"pass"}
        assert "not equal" not in headline(comparison)


def test_of_a_batch_what_is_received_is_a_buffer_and_what_is_sent_is_not(tmp_path):
    def batch(sent, chance):
        taken, given = [sent, chance], [sent, 5.0]
        operations = [
            [{"op": "isend" if not at else "irecv", "tensor": form(one)} for at, one in enumerate(values)]
            for values in (taken, given)
        ]
        key = "Distributed.batch_isend_irecv.0.forward"
        return {key: {"input_args": [operations[0]], "input_kwargs": {}, "output": [operations[1]]}}

    assert set(found(tmp_path / "chance", batch(2.0, 1e38), batch(2.0, 3.0)).row_counts()) == {"pass"}
    assert [origin for _, origin in blamed(found(tmp_path / "sent", batch(2.5, 1.0), batch(2.0, 1.0)))] == [
        "input.0.0.tensor"
    ]


@pytest.mark.parametrize(("size", "result"), [(1e-9, "pass"), (0.1, "error")])
def test_a_bias_gradient_of_which_all_but_rounding_cancels_passes(size, result, tmp_path):
    """That of keys before a softmax is zero but for the rounding of its terms."""

    def data(of_bias):
        return {
            LINEAR: forward(form(1.0), output=form(0.7), parameters={"bias": form(0.5, (64,))}),
            "Module.b.fc.Linear.parameters_grad.0": {"bias": [form(of_bias, (64,))]},
            "Module.b.fc.Linear.backward.0": {"input": [form(0.9)], "output": [form(0.3)]},
        }

    comparison = found(tmp_path, data(2 * size), data(size))

    (row,) = [row for row in comparison.rows() if row.target.place == "bias"]
    assert row.difference.relative == pytest.approx(0.5)
    assert row.result == result
