"""Megatron's checkpoints hold the weights that were saved, however they are split."""

import argparse
import re
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.analysis.checkpoint.assembled import assembled, assert_same
from tests.ranks import run_ranks
from trainermon.analysis.checkpoint.comparison import CheckpointOptions, compare_checkpoints
from trainermon.analysis.checkpoint.inspection import check_tensors
from trainermon.analysis.checkpoint.opening import open_checkpoint
from trainermon.core.errors import CheckpointError


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("megatron")
    run_ranks(Path(__file__).with_name("megatron_worker.py"), str(folder))
    return folder


def plain(name):
    """Return the name that the layer spec of the distributed layout gives a norm's parameter."""
    name = name.replace("self_attention.linear_qkv.layer_norm_", "input_layernorm.")
    return name.replace("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.")


@pytest.mark.distributed
@pytest.mark.parametrize("layout", ["tp_ranks", "pp_ranks", "vpp_ranks", "ep_ranks", "tp_dist", "pp_dist", "ep_dist"])
def test_the_weights_are_those_that_were_saved(saved, layout):
    expected = torch.load(saved / f"{layout.partition('_')[0]}_truth.pt")

    found = open_checkpoint(saved / layout)

    tensors = {plain(name): tensor for name, tensor in found.tensors.items()}
    if layout in ("pp_ranks", "vpp_ranks"):  # tied: the last stage has a copy
        expected["output_layer.weight"] = expected["embedding.word_embeddings.weight"]
    assert_same(tensors, expected)
    assert found.format == ("megatron" if layout.endswith("_ranks") else "megatron_dist")
    assert found.step == (5 if layout.endswith("_ranks") else 3)


@pytest.mark.distributed
@pytest.mark.parametrize(
    "name",
    [
        *("bf16_fully_reshardable", "bf16_ranks", "bf16_dp_ranks", "bf16_tp_ranks"),
        *("bf16_dp_reshardable", "bf16_dp_dp_reshardable"),
    ],
)
def test_the_optimizers_float32_weights_round_to_the_weights(saved, name):
    found = open_checkpoint(saved / name)

    assert set(found.optimizer) == {"main", "exp_avg", "exp_avg_sq"}
    assert set(found.optimizer["main"]) == set(found.tensors)
    for parameter, tensor in found.tensors.items():
        main = torch.from_numpy(assembled(found.optimizer["main"][parameter]))
        assert assembled(tensor).tobytes() == main.bfloat16().view(torch.uint16).numpy().tobytes(), parameter
        assert (assembled(found.optimizer["exp_avg_sq"][parameter]) >= 0).all()


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("ranks", "whole"),
    [
        ("bf16_ranks", "bf16_fully_reshardable"),
        ("bf16_tp_ranks", "bf16_tp_plain"),
        ("bf16_dp_reshardable", "bf16_fully_reshardable"),
        ("bf16_dp_ranks", "bf16_dp_dp_reshardable"),
    ],
)
def test_the_optimizers_state_is_what_megatron_writes_otherwise(saved, ranks, whole):
    by_name, found = (open_checkpoint(saved / name).optimizer for name in (whole, ranks))

    for kind in ("main", "exp_avg", "exp_avg_sq"):
        own = {plain(name): tensor for name, tensor in found[kind].items()}
        assert len(by_name[kind]) >= 28
        for name, tensor in by_name[kind].items():
            assert assembled(own[plain(name)]).tobytes() == assembled(tensor).tobytes(), (kind, name)


@pytest.mark.distributed
def test_an_optimizer_whose_sizes_are_not_the_models_is_not_read(saved, tmp_path):
    copied = shutil.copytree(saved / "bf16_tp_ranks", tmp_path / "copied")
    file = copied / "iter_0000005" / "mp_rank_01" / "model_optim_rng.pt"
    state = torch.load(file, weights_only=False)
    del state["model"]["decoder.final_layernorm.bias"]  # as if it were frozen
    torch.save(state, file)

    found = open_checkpoint(copied)

    assert not found.optimizer
    (note,) = found.notes
    assert "not read: of mp_rank_01, group" in note
    assert re.search(r"has \d+ parameters without weight decay, and the model \d+", note)


def with_common(source, folder, **arguments):
    """Copy a checkpoint, and have its `common.pt` have other arguments; None: without them."""
    copied = shutil.copytree(source, folder)
    common = torch.load(copied / "common.pt", weights_only=False)
    for name, value in arguments.items():
        setattr(common["args"], name, value)
    torch.save(common, copied / "common.pt")
    return copied


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"tensor_model_parallel_size": None}, "common.pt has no args that say over how many ranks it is split"),
        ({"pipeline_model_parallel_size": 1}, "have [0-9,]+ elements, which no number of layers from 0 on makes"),
        ({"tensor_model_parallel_size": 2}, "stage 1 has no buckets|no number of layers"),
    ],
)
def test_buckets_stay_as_they_are_if_it_is_not_certain_what_they_hold(saved, tmp_path, arguments, reason):
    copied = with_common(saved / "bf16_dp_reshardable", tmp_path / "copied", **arguments)

    found = open_checkpoint(copied)

    assert all("bucket_idx" in name for name in found.optimizer["main"])
    (note,) = [note for note in found.notes if "flat buckets" in note]
    assert re.search(reason, note)


@pytest.mark.distributed
def test_a_missing_rank_is_named(saved, tmp_path):
    copied = shutil.copytree(saved / "tp_ranks", tmp_path / "copied")
    shutil.rmtree(copied / "iter_0000005" / "mp_rank_01")

    with pytest.raises(CheckpointError, match="no folder of tensor rank 1, stage 0, expert rank 0"):
        open_checkpoint(copied)


# ---------------------------------------------------------------------- by hand: what no small job here makes


def save_rank(folder, name, args, model):
    (folder / name).mkdir(parents=True)
    state = {"args": argparse.Namespace(**args), "iteration": 1, "model": model}
    torch.save(state, folder / name / "model_optim_rng.pt")


def test_layers_of_uneven_stages_are_counted(tmp_path):
    layers = [torch.full((2,), float(number)) for number in range(4)]
    for stage, own in enumerate(([0], [1, 2], [3])):
        model = {f"decoder.layers.{local}.norm.weight": layers[number] for local, number in enumerate(own)}
        args = {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 3}
        save_rank(tmp_path / "release", f"mp_rank_00_{stage:03d}", args, model)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("release")

    found = open_checkpoint(tmp_path)

    assert_same(found.tensors, {f"decoder.layers.{number}.norm.weight": value for number, value in enumerate(layers)})


def test_the_halves_of_a_gated_layer_are_joined_one_by_one(tmp_path):
    gate, up = torch.randn(6, 4), torch.randn(6, 4)
    for rank in range(3):
        halves = [whole.chunk(3)[rank] for whole in (gate, up)]
        args = {"tensor_model_parallel_size": 3, "pipeline_model_parallel_size": 1, "swiglu": True}
        save_rank(tmp_path, f"mp_rank_{rank:02d}", args, {"mlp.linear_fc1.weight": torch.cat(halves)})

    assert_same(open_checkpoint(tmp_path).tensors, {"mlp.linear_fc1.weight": torch.cat([gate, up])})


@pytest.mark.parametrize("form", ["local", "grouped", "fused"])
def test_experts_have_the_same_names_however_a_rank_keeps_them(tmp_path, form):
    hidden, ffn = 3, 5
    first, second = torch.randn(4, ffn, hidden), torch.randn(4, hidden, ffn)
    for rank in range(2):
        own = range(2 * rank, 2 * rank + 2)
        model = {}
        for local, number in enumerate(own):
            names = {"local": f"local_experts.{local}.linear_fc%d.weight", "grouped": f"linear_fc%d.weight{local}"}
            if form in names:
                model[f"mlp.experts.{names[form] % 1}"] = first[number].clone()
                model[f"mlp.experts.{names[form] % 2}"] = second[number].clone()
        if form == "fused":  # as GroupedMLP views them
            model["mlp.experts.weight1"] = torch.stack([first[n].t() for n in own]).view(hidden, -1)
            model["mlp.experts.weight2"] = torch.stack([second[n].t() for n in own]).view(-1, hidden)
        args = {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1}
        save_rank(
            tmp_path, f"mp_rank_00_{rank:03d}", {**args, "expert_model_parallel_size": 2, "num_experts": 4}, model
        )

    expected = {f"mlp.experts.local_experts.{n}.linear_fc1.weight": first[n] for n in range(4)}
    expected |= {f"mlp.experts.local_experts.{n}.linear_fc2.weight": second[n] for n in range(4)}
    assert_same(open_checkpoint(tmp_path).tensors, expected)


def test_ranks_of_different_checkpoints_are_refused(tmp_path):
    for rank in range(2):
        args = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 1}
        save_rank(tmp_path, f"mp_rank_{rank:02d}", args, {"mlp.linear_fc2.weight": torch.zeros(2, 3 + rank)})

    with pytest.raises(
        CheckpointError, match=r"linear_fc2.weight' is float32\[2, 4\] in mp_rank_01, but float32\[2, 3\]"
    ):
        open_checkpoint(tmp_path)


def test_an_unknown_name_is_noted(tmp_path):
    for rank in range(2):
        args = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 1}
        model = {"decoder.final_layernorm.weight": torch.ones(2), "mlp.novel.weight": torch.full((2,), float(rank))}
        save_rank(tmp_path, f"mp_rank_{rank:02d}", args, model)

    found = open_checkpoint(tmp_path).tensors

    assert found["decoder.final_layernorm.weight"].notes == ("replicated",)
    assert found["mlp.novel.weight"].notes == ("its name does not tell whether tensor parallelism splits it",)


def save_split(folder, model, num_ranks, dims):
    """Save a model on tensor parallel ranks, each tensor split in the dimension of `dims`, or whole on every rank."""
    for rank in range(num_ranks):
        parts = {
            name: value if dims.get(name) is None else value.chunk(num_ranks, dims[name])[rank].clone()
            for name, value in model.items()
        }
        args = {"tensor_model_parallel_size": num_ranks, "pipeline_model_parallel_size": 1}
        save_rank(folder, f"mp_rank_{rank:02d}", args, parts)
    return folder


def novel_model():
    shapes = {"a.weight": (12, 8), "b.weight": (8, 12), "c.bias": (12,), "d.weight": (8,), "e": ()}
    return {f"novel.{name}": torch.randn(shape) for name, shape in shapes.items()}


NOVEL = {"novel.a.weight": 0, "novel.b.weight": 1, "novel.c.bias": 0}


@settings(max_examples=25)
@given(
    ranks=st.tuples(*[st.sampled_from([1, 2, 4])] * 2),
    damaged=st.none() | st.tuples(st.sampled_from(sorted(NOVEL)), st.integers(0, 11)),
)
def test_unknown_names_are_the_same_over_any_split_and_a_changed_element_is_found(tmp_path_factory, ranks, damaged):
    model, folder = novel_model(), tmp_path_factory.mktemp("split")
    other = {name: value.clone() for name, value in model.items()}
    if damaged:
        other[damaged[0]].view(-1)[damaged[1]] += 1

    ours, theirs = save_split(folder / "a", model, ranks[0], NOVEL), save_split(folder / "b", other, ranks[1], NOVEL)
    found = compare_checkpoints(ours, theirs, options=CheckpointOptions(weights_only=True, jobs=1))

    wrong = [(tensor.name, tensor.unequal) for tensor in found.differing()]
    assert wrong == ([(damaged[0], 1)] if damaged else [])
    assert damaged or found.headline == "the same model"


def test_a_copy_that_one_rank_has_wrong_is_damage_and_hides_no_other_difference(tmp_path):
    model = novel_model()
    ours = save_split(tmp_path / "a", model, 1, NOVEL)
    theirs = save_split(tmp_path / "b", {**model, "novel.a.weight": model["novel.a.weight"] + 1}, 2, NOVEL)
    file = theirs / "mp_rank_01" / "model_optim_rng.pt"
    state = torch.load(file, weights_only=False)
    state["model"]["novel.d.weight"][3] += 1
    torch.save(state, file)

    found = compare_checkpoints(ours, theirs)

    assert found.headline == (
        "cannot be compared in full: 1 damaged, first novel.d.weight; 1 more differ, first novel.a.weight;"
        " 1 other value differs"
    )
    checked = {tensor.name: tensor.faults for tensor in check_tensors(open_checkpoint(theirs))}
    assert [name for name, faults in checked.items() if faults] == ["novel.d.weight"]


def test_the_bias_of_an_output_layer_is_split_as_its_weight_is(tmp_path):
    model = {f"{head}.{kind}": torch.randn(8, *rest) for head in ("output_layer", "lm_head.output_layer", "lm_head")
             for kind, rest in (("weight", (2,)), ("bias", ()))}  # fmt: skip

    found = open_checkpoint(save_split(tmp_path / "a", model, 2, dict.fromkeys(model, 0)))

    assert_same(found.tensors, model)


def test_another_backend_is_refused(tmp_path):
    (tmp_path / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    (tmp_path / "common.pt").touch()

    with pytest.raises(CheckpointError, match="names the backend 'zarr'"):
        open_checkpoint(tmp_path)


def test_more_ranks_than_the_arguments_say_are_refused(tmp_path):
    for rank in range(2):
        args = {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1}
        save_rank(tmp_path, f"mp_rank_{rank:02d}", args, {"mlp.linear_fc2.weight": torch.zeros(2, 3)})

    with pytest.raises(CheckpointError, match="has folders of 2 tp ranks, and its args say 1"):
        open_checkpoint(tmp_path)


def test_ranks_of_two_steps_are_refused(tmp_path):
    for rank in range(2):
        args = argparse.Namespace(tensor_model_parallel_size=2, pipeline_model_parallel_size=1)
        place = tmp_path / f"mp_rank_{rank:02d}"
        place.mkdir()
        state = {"args": args, "iteration": 5 + rank, "model": {"mlp.linear_fc2.weight": torch.zeros(2, 3)}}
        torch.save(state, place / "model_optim_rng.pt")

    with pytest.raises(CheckpointError, match="mp_rank_00 is of step 5, mp_rank_01 is of step 6"):
        open_checkpoint(tmp_path)


@pytest.mark.distributed
def test_a_missing_file_of_the_optimizer_leaves_its_state_out(saved, tmp_path):
    copied = shutil.copytree(saved / "bf16_ranks", tmp_path / "copied")
    (copied / "iter_0000005" / "mp_rank_00_001" / "distrib_optim.pt").unlink()

    found = open_checkpoint(copied)

    assert found.tensors
    assert not found.optimizer
    assert found.notes == (
        "the state of the optimizer is not read: mp_rank_00_001 has no distrib_optim.pt, copy it, too",
    )
