"""What process groups are called."""

from types import SimpleNamespace

import pytest

from trainermon.monitor.taps.process_groups import GroupPurposes, purpose_from


def group(name, description="undefined", size=2):
    return SimpleNamespace(group_name=name, group_desc=description, size=lambda: size)


@pytest.fixture(autouse=True)
def _world_of_four(monkeypatch):
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 4)


@pytest.mark.parametrize(
    ("description", "purpose"),
    [
        ("mesh_tp", "tp"),
        ("mesh_dp_shard", "dp_shard"),
        ("TENSOR_MODEL_PARALLEL_GROUP", "tp"),
        ("PIPELINE_MODEL_PARALLEL_GROUP", "pp"),
        ("CONTEXT_PARALLEL_GROUP", "cp"),
        ("DATA_PARALLEL_GROUP_WITH_CP", "dp_with_cp"),
        ("DATA_PARALLEL_GROUP_GLOO", "dp_gloo"),
        ("EXPERT_MODEL_PARALLEL_GROUP", "ep"),
        ("EXPERT_DATA_PARALLEL_GROUP", "edp"),
        ("MODEL_PARALLEL_GROUP", "mp"),
        ("EMBEDDING_GROUP", "embedding"),
        ("default_pg", "world"),
        ("undefined", ""),
        ("mesh_default", ""),
        ("", ""),
    ],
)
def test_purpose_is_read_from_the_description(description, purpose):
    assert purpose_from(description) == purpose


def test_what_the_caller_says_comes_first():
    given = group("3", "mesh_tp")

    assert GroupPurposes({"3": "dp"}).name(given) == "dp"


def test_group_of_everybody_is_the_world_and_any_other_one_is_not():
    purposes = GroupPurposes({})

    assert (purposes.name(group("1", size=4)), purposes.name(group("2"))) == ("world", "other")


def test_second_group_of_a_purpose_is_numbered_and_keeps_its_number():
    purposes = GroupPurposes({})
    first, second = group("1", "mesh_dp"), group("2", "mesh_dp")

    assert [purposes.name(each) for each in (first, second, first, second)] == ["dp", "dp-2", "dp", "dp-2"]
