"""What is drawn for the families, and that a fault can be put into any of them."""

from typing import Any

import pytest
import torch

from benchmarks.diagnosis import own_operations
from benchmarks.diagnosis.family_cases import FAMILY_SPLITS, HELD_OUT, TUNED, family_cases
from benchmarks.diagnosis.family_jobs import places_of
from benchmarks.families.catalogue import FAMILIES


def test_families_are_split_once_and_for_all():
    assert not {*TUNED} & {*HELD_OUT}
    assert {*TUNED, *HELD_OUT} == {*FAMILIES}


def test_every_place_is_drawn_in_every_split_that_has_it():
    cases = family_cases(["resnet", "tabular"])

    assert len({case.run_id for case in cases}) == len(cases)
    assert {case.split for case in cases} == {*FAMILY_SPLITS}
    for case in cases:
        assert case.site == "healthy" or case.direction
        assert not (case.site == "reduction" and case.split != "ddp")
        if case.module and not case.module.startswith("("):
            places = places_of(case.family)
            assert case.module in places.holders or case.module in places.operations


def test_looking_for_places_in_the_middle_of_a_training_changes_no_random_number_of_it():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    places_of.cache_clear()

    places_of("tabular")

    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_an_operation_of_a_modules_own_code_is_changed_and_none_of_its_parts(place):
    family = FAMILIES["resnet"]
    torch.manual_seed(0)
    model: Any = family.build()
    batch = family.draw(torch.Generator().manual_seed(0))
    outputs = {}
    for name, module in model.named_modules():
        module.register_forward_hook(lambda _, __, output, name=name: outputs.__setitem__(name, output.detach()))
    family.loss(model, batch)
    sound = dict(outputs)

    assert own_operations.count(model.layers[1], lambda: family.loss(model, batch)) == 3
    with own_operations.changed(model.layers[1], lambda x: x.flip(0), place):
        family.loss(model, batch)

    assert torch.equal(outputs["layers.0"], sound["layers.0"])
    assert torch.equal(outputs["layers.1.conv1"], sound["layers.1.conv1"])
    assert not torch.equal(outputs["layers.1"], sound["layers.1"])
