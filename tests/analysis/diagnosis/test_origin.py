"""The first non-finite value, in dumps made by hand."""

import itertools
import math
from pathlib import Path

import pytest

from trainermon.analysis.diagnosis.findings import FaultPhase
from trainermon.analysis.diagnosis.origin import INPUT, LOSS, MAX_LINKS, MODEL, bad_parameters, find_origin
from trainermon.dump.files.records import Dump, DumpInfo, EntryRecord, TensorRecord

_orders = itertools.count(1)


def tensor(slot, bad="", *, order=None, hooked=False):
    """A record of four elements; `bad` is "", nan, inf, or mask (two -inf beside zeros)."""
    numbers = {"": (2.0, -1.0, 0, 0), "nan": (None, None, 4, 0), "inf": (2.0, -1.0, 0, 1), "mask": (0.0, 0.0, 0, 2)}
    maximum, minimum, nans, infs = numbers[bad]
    return TensorRecord(
        slot=slot, dtype="torch.float32", shape=(4,), max=maximum, min=minimum, mean=0.5, norm=1.0,
        nans=nans, infs=infs, zeros=0, order=next(_orders) if order is None else order, hooked=hooked,
    )  # fmt: skip


def forward(name, given="", output="", *, weight=None, parent=None, taken=None):
    """A forward call; `taken` is the record that it takes over from another call."""
    inputs = tuple(x if isinstance(x, TensorRecord) else tensor("input.0", x) for x in ([taken] if taken else [given]))
    outputs = (tensor("output.0", output),)
    parameters = () if weight is None else (tensor("parameters.weight", weight),)
    return entry(name, "forward", inputs, outputs, parameters=parameters, parent=parent)


def entry(name, direction, inputs, outputs, *, parameters=(), parent=None):
    return EntryRecord(
        key=f"Module.{name}.Layer.{direction}.0", module=name, class_name="Layer", direction=direction, call=0,
        order=next(_orders), inputs=tuple(inputs), outputs=tuple(outputs), parameters=tuple(parameters),
        parent=None if parent is None else f"Module.{parent}.Layer.{direction}.0",
        stack=(f"File m.py, line 1, in {name}, \n y",),
    )  # fmt: skip


def dump(*entries, root=()):
    return Dump(directory=Path(), task="statistics", level="L0", info=DumpInfo(replay=True), entries=entries, root=root)


def root(given="", output="", weight=None):
    return (forward("root", given, output, weight=weight),)


def found(made):
    origin = find_origin(made)
    return origin and (origin.module, origin.phase, origin.tensor.slot)


def test_sound_step_has_no_origin_although_masks_are_infinite():
    made = dump(forward("mask", "mask", "mask"), forward("fc", "", "", weight=""), root=root())

    assert find_origin(made) is None


def test_mask_is_not_blamed_for_a_fault_behind_it():
    attention = entry(
        "attention", "forward", [tensor("input.0"), tensor("kwargs.mask", "mask")], [tensor("output.0", "nan")]
    )
    made = dump(forward("mask", "", "mask"), attention, root=root("", "nan"))

    assert found(made) == ("attention", FaultPhase.FORWARD, "output.0")


def test_innermost_call_with_finite_inputs_is_blamed_and_followed_to_the_output():
    inner = forward("h.0.fc", "", "inf", parent="h.0")
    made = dump(
        forward("emb"), inner, forward("h.0.act", "inf", "nan", parent="h.0"), forward("h.0", "", "nan"),
        forward("h.1.fc", "nan", "nan", parent="h.1"), forward("h.1", "nan", "nan"), root=root("", "nan"),
    )  # fmt: skip

    origin = find_origin(made)

    assert found(made) == ("h.0.fc", FaultPhase.FORWARD, "output.0")
    assert origin.source == "File m.py, line 1, in h.0.fc: y"
    assert [link.module for link in origin.chain] == ["h.0.fc", "h.0.act", "h.0", "h.1", MODEL]


def test_nonfinite_weight_is_told_from_a_bad_operation():
    made = dump(forward("a", "", "", weight=""), forward("b", "", "nan", weight="inf"), root=root("", "nan"))

    assert found(made) == ("b", FaultPhase.PARAMETER, "parameters.weight")
    assert [name for name, _ in bad_parameters(made)] == ["b.weight"]


def test_a_weight_whose_output_is_still_finite_is_found():
    assert found(dump(forward("emb", "", "", weight="inf"), root=root())) == (
        "emb", FaultPhase.PARAMETER, "parameters.weight",
    )  # fmt: skip


def test_operation_between_modules_is_blamed_on_what_encloses_them():
    made = dump(
        forward("h.a", "", "", parent="h"), forward("h.b", "nan", "nan", parent="h"), forward("h", "", "nan"),
        root=root("", "nan"),
    )  # fmt: skip

    assert found(made) == ("h", FaultPhase.FORWARD, "input.0 of h.b")
    assert "between h.a and h.b" in find_origin(made).reason


def test_operation_behind_the_last_module_is_the_models_own():
    assert found(dump(forward("a"), root=root("", "nan"))) == (MODEL, FaultPhase.FORWARD, "output.0")


def test_bad_batch_is_the_input():
    made = dump(forward("h.norm", "nan", "nan", parent="h"), forward("h", "nan", "nan"), root=root("nan", "nan"))

    assert found(made) == (INPUT, FaultPhase.FORWARD, "input.0")


def test_value_that_nobody_used_is_not_blamed():
    lost = forward("side", "", "nan")
    made = dump(
        lost, forward("user", taken=lost.outputs[0], output=""), forward("bad", "", "nan"), root=root("", "nan")
    )

    assert found(made)[0] == "bad"


def test_value_is_followed_back_to_who_made_it():
    maker = forward("maker", "", "nan")
    wrapper = forward("late", taken=maker.outputs[0], output="nan")
    made = dump(wrapper, maker, root=root("", "nan"))

    assert found(made)[0] in ("maker", "late")


def test_long_way_is_shortened_in_the_middle():
    made = dump(
        forward("h.0", "", "nan"), *(forward(f"h.{n}", "nan", "nan") for n in range(1, 40)), root=root("", "nan")
    )

    chain = find_origin(made).chain

    assert len(chain) == MAX_LINKS
    assert (chain[0].module, chain[-1].module) == ("h.0", MODEL)
    assert sum(link.omitted for link in chain) + len(chain) == 41


def backward(name, given="", made="", *, parent=None, **more):
    inputs = [given if isinstance(given, TensorRecord) else tensor("input.0", given, **more)]
    outputs = [made if isinstance(made, TensorRecord) else tensor("output.0", made)]
    return entry(name, "backward", inputs, outputs, parent=parent)


def bad_gradient(name="w"):
    return entry(name, "parameters_grad", [], [tensor("weight", "nan")])


def test_backward_that_makes_a_bad_gradient_from_finite_ones_is_blamed():
    last = backward("last")
    bad = tensor("output.0", "nan")
    made = dump(forward("first"), forward("last"), last, backward("middle", "", bad),
                backward("first", tensor("input.0", "nan", order=bad.order), "nan"), bad_gradient(),
                root=root())  # fmt: skip

    assert found(made) == ("middle", FaultPhase.BACKWARD, "gradient of input.0")


@pytest.mark.parametrize("level", ["module", "between", "mask", "own"])
def test_a_forward_value_that_is_cut_off_is_named_if_it_spoils_a_gradient(level):
    """As rows that no loss takes: zero times infinity is NaN in the weight's gradient."""
    maker = forward("mod", "", {"module": "inf", "own": ""}.get(level, ""))
    given = {"module": maker.outputs[0], "mask": tensor("input.0", "mask"), "between": tensor("input.0", "inf")}
    user = forward(
        "out", taken=given.get(level), output={"module": "nan", "between": "nan", "own": "inf"}.get(level, "")
    )
    made = dump(maker, user, backward("out", "", "nan"), bad_gradient("out"), root=root())

    expected = {
        "module": ("mod", FaultPhase.FORWARD, "output.0"),
        "between": (MODEL, FaultPhase.FORWARD, "input.0 of out"),
        "mask": ("out", FaultPhase.BACKWARD, "gradient of input.0"),
        "own": ("out", FaultPhase.FORWARD, "output.0"),
    }
    assert found(made) == expected[level]
    assert ("reached no loss" in find_origin(made).reason) == (level != "mask")


def test_consumers_of_one_tensor_that_cannot_be_told_apart_are_candidates():
    bad = tensor("output.0", "nan")
    made = dump(*(backward(f"attention.{name}", "", bad) for name in "qkv"), bad_gradient(), root=root())

    origin = find_origin(made)

    assert {origin.module, *origin.candidates} == {"attention.q", "attention.k", "attention.v"}
    assert len(origin.candidates) == 2


def test_bad_weight_gradient_alone_is_its_owners():
    made = dump(backward("fc"), bad_gradient("fc"), backward("first"), root=root())

    assert found(made) == ("fc", FaultPhase.BACKWARD, "gradient of weight")


def test_bad_gradient_from_outside_is_the_losss():
    grad = tensor("input.0", "nan")
    made = dump(
        backward("head", grad, "nan"), bad_gradient(),
        root=(*root(), entry("root", "backward", [grad], [])),
    )  # fmt: skip

    assert found(made) == (LOSS, FaultPhase.BACKWARD, "gradient of output.0")


def test_gradient_hook_of_the_script_is_named_unless_it_hooks_everything():
    sound = [backward(f"s{number}") for number in range(10)]
    grad = tensor("input.0", "nan", hooked=True)
    user = backward("user", "", tensor("output.0", "nan", order=grad.order, hooked=True))
    made = dump(*sound, user, backward("hooked", grad, "nan"), bad_gradient(), root=root())
    everywhere = dump(
        user, backward("hooked", grad, tensor("output.0", "nan", hooked=True)), bad_gradient(), root=root()
    )

    assert found(made) == ("hooked", FaultPhase.BACKWARD, "gradient of output.0")
    assert "gradient hook of the script" in find_origin(made).reason
    assert found(everywhere)[0] == "user"


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_dump_of_msprobe_without_counts_and_order(value):
    def record(slot, number):
        return TensorRecord(slot=slot, dtype="torch.float32", shape=(4,), max=number, min=0.0, mean=number, norm=1.0)

    made = dump(
        entry("a", "forward", [record("input.0", 1.0)], [record("output.0", 1.0)]),
        entry("b", "forward", [record("input.0", 1.0)], [record("output.0", value)]),
        entry("b", "parameters_grad", [], [record("weight", value)]),
    )

    origin = find_origin(made)

    assert (origin.module, origin.phase) == ("b", FaultPhase.FORWARD)
    assert origin.chain[0].tensor.nans == -1


def test_operation_that_takes_a_lent_parameter_and_the_output_is_the_enclosing_modules():
    """As in Megatron: a layer returns its bias, which its parent's parent adds."""
    lent, output = tensor("input.1", "nan"), tensor("input.0", "nan")
    bias = TensorRecord(slot="bias", dtype="torch.float32", shape=(4,), nans=4, infs=0, order=lent.order)
    given = tensor("input.0")
    made = dump(
        *(forward(name, parent=parent) for name, parent in (("h.mlp.fc", "h.mlp"), ("h.mlp", "h"), ("h", None))),
        entry("h", "backward", [given], [tensor("output.0", "nan")]),
        entry("h.mlp", "backward", [output, lent], [tensor("output.0", "nan")], parent="h"),
        entry("h.mlp.fc", "backward", [output, lent], [tensor("output.0", "nan")], parent="h.mlp"),
        entry("h.mlp.fc", "parameters_grad", [], [bias]),
        root=root(),
    )

    assert found(made) == ("h", FaultPhase.BACKWARD, "gradient of output.1")
