"""A dump of a step under DeepSpeed, FSDP and Megatron-Core changes no bit, at any level, with any recomputation."""

import collections

import pytest

from tests.frameworks.dump.grid import results_of

pytestmark = pytest.mark.distributed

DEEPSPEED = ["1-bf16-nonreentrant-mix", "2-fp32-reentrant-L1", "3-fp32-none-L0", "3-bf16-reentrant-mix"]
FSDP = ["fsdp2-none-mix", "fsdp1-reentrant-L1", "dtensor-reentrant-mix"]
MEGATRON = ["tp-none-L0", "sp-full-mix", "vpp-selective-L1"]
COMPUTING = tuple(f"Functional.{name}." for name in ("linear", "gelu", "dropout", "layer_norm", "softmax", "embedding"))
SMALL = {"deepspeed_worker": DEEPSPEED, "fsdp_worker": FSDP, "megatron_worker": MEGATRON}


def assert_unchanged_and_whole(of_rank):
    """Check that no bit differs, that nothing was lost, and that what the level promises was recorded."""
    for found in of_rank.values():
        assert (found["same"], found["errors"], found["complete"]) == (True, "", True)
    for name, found in of_rank.items():
        keys, level = found["keys"], name.rpartition("-")[2]
        assert any(key.startswith("Functional.") for key in keys) == (level != "L0")
        modules = collections.Counter(key.split(".")[-2] for key in keys if key.startswith("Module."))
        forwards = {key for key in keys if key.startswith(COMPUTING) and key.endswith(".forward")}
        assert {key.replace(".forward", ".backward") for key in forwards} <= set(keys)  # repeated ones too
        if level == "L1":
            assert not modules
        else:
            assert modules["forward"] >= modules["backward"] > modules["parameters_grad"] > 0
        if name.startswith("dtensor") and level != "L1":
            assert {"blocks.0.up.parameters.weight", "head.parameters.weight"} <= set(found["parameters"])


@pytest.mark.parametrize("worker", SMALL)
def test_a_dump_changes_no_bit(worker, tmp_path):
    for of_rank in results_of(worker, tmp_path, SMALL[worker]):
        assert list(of_rank) == SMALL[worker]
        assert_unchanged_and_whole(of_rank)


@pytest.mark.slow
@pytest.mark.parametrize("worker", SMALL)
def test_a_dump_changes_no_bit_in_the_whole_grid(worker, tmp_path):
    for of_rank in results_of(worker, tmp_path, []):
        assert len(of_rank) > 30
        assert_unchanged_and_whole(of_rank)
