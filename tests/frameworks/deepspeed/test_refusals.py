"""What is recognised as DeepSpeed, and what is refused with a word on what to do."""

import pytest

from tests.frameworks.deepspeed.test_truth import launch

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    (text,) = launch(tmp_path_factory.mktemp("refusals"), "refusals_worker.py", size=1, TORCH_COMPILE_DISABLE="1")
    return dict(line.split(": ", 1) for line in text.splitlines() if ": " in line)


@pytest.mark.parametrize(
    "what",
    [
        "engine",
        "engine and optimizer",
        "engine and client optimizer",
        "engine and accelerate's optimizer",
        "compiled engine",
    ],
)
def test_an_engine_with_or_without_its_optimizer_is_recognised(told, what):
    assert told[what] == "deepspeed"


@pytest.mark.parametrize("what", ["inner module", "inner module alone", "inner module at stage 0"])
def test_a_model_without_its_engine_is_refused(told, what):
    assert told[what].startswith("model: DeepSpeed trains it, but this is not its engine; pass what deepspeed.init")


def test_an_optimizer_that_is_not_the_engines_is_refused(told):
    assert told["foreign optimizer"].startswith("optimizer: found a SGD that is not the engine's own")


def test_an_engine_without_optimizer_is_refused(told):
    assert "no optimizer" in told["no optimizer"]


def test_an_update_in_the_place_of_a_gradient_is_not_called_one(told):
    assert told["muon"] == "gain embedding.weight inner.up.bias, norm None"


def test_a_step_with_leaf_modules_at_stage_3_is_not_replayed(told):
    assert told["replay with 0 leaves"] == "possible"
    assert told["replay with 1 leaves"] == (
        "ZeRO stage 3 treats embedding as one leaf (set_z3_leaf_modules), whose hooks want every gradient"
    )
