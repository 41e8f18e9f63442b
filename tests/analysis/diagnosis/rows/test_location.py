"""Which of many bad series was first, in series made by hand."""

import dataclasses

from trainermon.analysis.diagnosis.findings import FaultPhase
from trainermon.analysis.diagnosis.rows.location import locate
from trainermon.analysis.diagnosis.rows.order import StepOrder
from trainermon.core.values import Kind

# as Megatron's: the core of an attention is defined before what it is given by, and called after it
MODULES = ["decoder", "decoder.core", "decoder.qkv", "decoder.proj", "head"]
FINITE_ELSEWHERE = {*MODULES}


@dataclasses.dataclass(frozen=True)
class Row:
    kind: str
    name: str
    slot: str = ""
    call: int = 0
    micro_step: int | None = None
    stage: int = 0
    rank: int = 0
    fingerprint: object = None


def actv(name, slot, *, rank=0):
    return Row(Kind.ACTV, name, slot, micro_step=0, rank=rank)


def gradient(name, slot, *, rank=0):
    return Row(Kind.ACTV_GRAD, name, slot, micro_step=0, rank=rank)


def located(*bad):
    location = locate(bad, StepOrder(MODULES, {}), FINITE_ELSEWHERE)
    return location.module, location.phase, location.ranks


def test_a_module_that_is_called_before_another_though_defined_after_it_is_first():
    made, given = actv("decoder.qkv", "output.0"), actv("decoder.core", "input.0")

    assert located(given, actv("decoder.core", "output.0"), made) == ("decoder.qkv", FaultPhase.FORWARD, (0,))


def test_what_came_by_communication_to_a_rank_whose_own_input_is_sound_is_not_first():
    """As after a sum over tensor parallel ranks: the output is bad on both, what went in on one."""
    passed_on = [actv("decoder.proj", "input.0"), *(actv("decoder.proj", "output.0", rank=rank) for rank in (0, 1))]

    assert located(*passed_on, actv("decoder.qkv", "output.0")) == ("decoder.qkv", FaultPhase.FORWARD, (0,))


def test_what_a_module_was_given_by_no_other_is_made_around_it():
    given = actv("decoder.core", "input.0"), actv("decoder.core", "output.0"), actv("decoder.proj", "input.0")

    assert located(*given, actv("decoder", "output.0")) == ("decoder", FaultPhase.FORWARD, (0,))


def test_the_loss_of_the_whole_step_comes_after_what_a_module_made():
    loss = Row(Kind.LOSS, "loss")

    late = dataclasses.replace(actv("head", "output.0"), micro_step=1)
    assert located(loss, late) == ("head", FaultPhase.FORWARD, (0,))
    assert located(loss, gradient("head", "input.0")) == ("(loss)", FaultPhase.FORWARD, (0,))


def test_the_rank_whose_own_part_is_bad_is_told_from_those_that_were_sent_it():
    """The gradient of what tensor parallel ranks share is added up over them, that of a weight is each one's own."""
    shared = [gradient("decoder.qkv", "input.0", rank=rank) for rank in (0, 1)]
    own = Row(Kind.GRAD_UNREDUCED, "decoder.qkv.weight", rank=1)

    assert located(*shared, own) == ("decoder.qkv", FaultPhase.BACKWARD, (1,))
    assert located(*shared) == ("decoder.qkv", FaultPhase.BACKWARD, (0, 1))


def test_the_gradient_of_a_shared_tensor_is_there_when_the_first_of_its_takers_gave_its_own_back():
    """A short cut takes what the block takes: the sum of both is bad after what the block's last layer gave back."""
    order = StepOrder(["block", "block.conv1", "block.conv2", "block.shortcut"], {})
    shared = [
        dataclasses.replace(gradient(name, "input.0"), fingerprint=7) for name in ("block.shortcut", "block.conv1")
    ]
    bad = [*shared, dataclasses.replace(gradient("block.conv2", "input.0"), fingerprint=8)]

    assert locate(bad, order, {"block"}).module == "block.conv2"


ATTENTION = ["attention", "attention.q", "attention.k", "attention.v"]


def shared_by(*names):
    return [dataclasses.replace(gradient(name, "input.0"), fingerprint=7) for name in names]


def test_of_modules_that_took_one_tensor_the_innermost_is_named_not_what_only_holds_it():
    order = StepOrder(["heads", "heads.first", "heads.first.dense"], {})
    bad = [*shared_by("heads", "heads.first", "heads.first.dense"), gradient("heads.first.dense", "output.0")]

    assert locate(bad, order, {"heads", "heads.first"}).module == "heads.first"


def test_of_modules_that_took_one_tensor_that_one_is_named_whose_own_weight_has_a_bad_gradient():
    """It was given a sound gradient, and the gradient of its weight is bad: no other has a part in that."""
    weight = Row(Kind.GRAD_UNREDUCED, "attention.v.weight")
    order = StepOrder(ATTENTION, {})

    assert locate([*shared_by(*ATTENTION), weight], order, {"attention"}).module == "attention.v"
    assert locate(shared_by(*ATTENTION), order, {"attention"}).module == "attention.q"


def test_what_a_module_passed_on_to_a_shared_tensor_was_made_by_the_code_around_it():
    """The sum is bad because of the value's part in it: the queries' and keys' are as sound as what they were given."""
    given = gradient("attention.v", "output.0"), Row(Kind.GRAD_UNREDUCED, "attention.v.weight")

    location = locate([*shared_by(*ATTENTION), *given], StepOrder(ATTENTION, {}), {*ATTENTION})

    assert (location.module, location.phase) == ("attention", FaultPhase.BACKWARD)


def test_an_identity_is_given_the_shared_tensor_itself_which_explains_nothing():
    """As the places for cross attention in a layer of Megatron-Core without one."""
    modules = ["layer", "layer.cross_attention", "layer.norm", "layer.mlp"]
    same = dataclasses.replace(gradient("layer.cross_attention", "output.0"), fingerprint=7)
    bad = [same, *shared_by("layer.cross_attention", "layer.norm")]

    assert locate(bad, StepOrder(modules, {}), {*modules}).module == "layer.norm"


def test_after_the_backward_what_is_worst_was_first():
    """Clipping changes every gradient a little when one of them is half as large again."""
    order = StepOrder(["stem", "head"], {}, has_unreduced=True)
    bad = [Row(Kind.GRAD_REDUCED, "stem.weight"), Row(Kind.GRAD_REDUCED, "head.weight")]

    location = locate(bad, order, set(), [0.01, 0.5])

    assert (location.module, location.phase) == ("head", FaultPhase.REDUCTION)
    assert locate(bad, order, set(), [0.4, 0.5]).module == "stem"


def test_a_weight_that_the_forward_used_is_a_parameter_though_the_optimizers_copy_is_sound():
    used = Row(Kind.PARAM_USED, "decoder.proj.weight", rank=1)

    assert located(actv("decoder.proj", "output.0", rank=1), used) == ("decoder.proj", FaultPhase.PARAMETER, (1,))


def test_a_weight_that_a_module_is_handed_is_a_parameter_of_it():
    order = StepOrder(["embedding", "output_layer"], {})
    bad = [actv("output_layer", "input.weight"), actv("output_layer", "output.0")]

    location = locate(bad, order, {"output_layer"})

    assert (location.module, location.phase) == ("output_layer", FaultPhase.PARAMETER)
