"""Names of Megatron and Hugging Face: one model, written in each by the rules of their converters, is the same."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.analysis.checkpoint.splits import checkpoint_of
from trainermon.analysis.checkpoint.comparison import CheckpointOptions, compare_checkpoints
from trainermon.analysis.checkpoint.verdicts import WeightVerdict
from trainermon.core.errors import CheckpointError

HEADS, GROUPS, WIDTH, HIDDEN, FFN = 4, 2, 2, 8, 6
VALUES = {"config": {"num_attention_heads": HEADS, "num_key_value_heads": GROUPS}}


def noise(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def hf_model(*, experts=0):
    """Return a model with the names of Hugging Face's Llama, or of its Qwen with experts."""
    tensors = {
        "model.embed_tokens.weight": noise(1, 16, HIDDEN),
        "model.norm.weight": noise(2, HIDDEN),
        "lm_head.weight": noise(3, 16, HIDDEN),
    }
    for layer in range(2):
        name = f"model.layers.{layer}"
        tensors |= {
            f"{name}.self_attn.q_proj.weight": noise(10 + layer, HEADS * WIDTH, HIDDEN),
            f"{name}.self_attn.k_proj.weight": noise(20 + layer, GROUPS * WIDTH, HIDDEN),
            f"{name}.self_attn.v_proj.weight": noise(30 + layer, GROUPS * WIDTH, HIDDEN),
            f"{name}.self_attn.o_proj.weight": noise(40 + layer, HIDDEN, HEADS * WIDTH),
            f"{name}.self_attn.q_norm.weight": noise(50 + layer, WIDTH),
            f"{name}.input_layernorm.weight": noise(60 + layer, HIDDEN),
            f"{name}.post_attention_layernorm.weight": noise(70 + layer, HIDDEN),
        }
        mlps = [f"{name}.mlp.experts.{number}" for number in range(experts)] or [f"{name}.mlp"]
        for number, mlp in enumerate(mlps):
            tensors |= {
                f"{mlp}.gate_proj.weight": noise(100 + 10 * number + layer, FFN, HIDDEN),
                f"{mlp}.up_proj.weight": noise(200 + 10 * number + layer, FFN, HIDDEN),
                f"{mlp}.down_proj.weight": noise(300 + 10 * number + layer, HIDDEN, FFN),
            }
        if experts:
            tensors[f"{name}.mlp.gate.weight"] = noise(400 + layer, experts, HIDDEN)
    return tensors


def megatron_model(hf, *, experts=0):
    """Return the same with the names and layouts of Megatron-Core with Transformer Engine.

    Source: NVIDIA/Megatron-LM, tools/checkpoint/loader_llama_mistral.py: rows of q, k, v by query group, gate above up.
    """
    tensors = {
        "embedding.word_embeddings.weight": hf["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": hf["model.norm.weight"],
        "output_layer.weight": hf["lm_head.weight"],
    }
    for layer in range(2):
        old, new = f"model.layers.{layer}", f"decoder.layers.{layer}"
        q, k, v = (hf[f"{old}.self_attn.{part}_proj.weight"].reshape(GROUPS, -1, HIDDEN) for part in ("q", "k", "v"))
        tensors |= {
            f"{new}.self_attention.linear_qkv.weight": np.concatenate([q, k, v], axis=1).reshape(-1, HIDDEN),
            f"{new}.self_attention.linear_qkv.layer_norm_weight": hf[f"{old}.input_layernorm.weight"],
            f"{new}.self_attention.linear_proj.weight": hf[f"{old}.self_attn.o_proj.weight"],
            f"{new}.self_attention.q_layernorm.weight": hf[f"{old}.self_attn.q_norm.weight"],
        }
        norm = f"{new}.pre_mlp_layernorm.weight" if experts else f"{new}.mlp.linear_fc1.layer_norm_weight"
        tensors[norm] = hf[f"{old}.post_attention_layernorm.weight"]
        for number in range(experts or 1):
            mlp, end = (f"{old}.mlp.experts.{number}", number) if experts else (f"{old}.mlp", "")
            to = f"{new}.mlp.experts" if experts else f"{new}.mlp"
            halves = [hf[f"{mlp}.{part}_proj.weight"] for part in ("gate", "up")]
            tensors[f"{to}.linear_fc1.weight{end}"] = np.concatenate(halves)
            tensors[f"{to}.linear_fc2.weight{end}"] = hf[f"{mlp}.down_proj.weight"]
        if experts:
            tensors[f"{new}.mlp.router.weight"] = hf[f"{old}.mlp.gate.weight"]
    return tensors


LEGACY = (
    ("embedding.", "language_model.embedding."),
    ("output_layer.", "language_model.output_layer."),
    ("decoder.final_layernorm.", "language_model.encoder.final_norm."),
    ("decoder.", "language_model.encoder."),
    (".linear_qkv.layer_norm_weight", ".input_norm.weight"),
    (".self_attention.input_norm.", ".input_norm."),
    (".mlp.linear_fc1.layer_norm_weight", ".post_attention_norm.weight"),
    (".linear_qkv.", ".query_key_value."),
    (".linear_proj.", ".dense."),
    (".linear_fc1.", ".dense_h_to_4h."),
    (".linear_fc2.", ".dense_4h_to_h."),
)


def legacy(name):
    for new, old in LEGACY:
        name = name.replace(new, old) if new.startswith(".") or name.startswith(new) else name
    return name


def compared(tmp_path, ours, theirs, **options):
    sides = [checkpoint_of(tmp_path / str(number), side, values=VALUES) for number, side in enumerate((ours, theirs))]
    return compare_checkpoints(*sides, options=CheckpointOptions(jobs=1, **options))


@pytest.mark.parametrize("scheme", ["megatron", "hf"])
@pytest.mark.parametrize("experts", [0, 3], ids=["dense", "experts"])
def test_a_model_of_hugging_face_is_that_of_megatron(tmp_path, scheme, experts):
    ours = hf_model(experts=experts)

    found = compared(tmp_path, ours, megatron_model(ours, experts=experts), scheme=scheme)

    assert found.headline == "the same model", [(t.name, t.verdict.value) for t in found.differing()]
    assert len(found.tensors) == (len(ours) if scheme == "hf" else len(megatron_model(ours, experts=experts)))


def test_a_legacy_model_is_that_of_megatron_core(tmp_path):
    ours = megatron_model(hf_model())

    found = compared(tmp_path, {legacy(name): array for name, array in ours.items()}, ours)

    assert found.headline == "the same model", [(t.name, t.verdict.value) for t in found.differing()]


def test_a_row_that_differs_is_found_within_the_joined_tensor(tmp_path):
    ours = hf_model()
    theirs = megatron_model(ours)
    changed = ours | {"model.layers.1.self_attn.k_proj.weight": ours["model.layers.1.self_attn.k_proj.weight"].copy()}
    changed["model.layers.1.self_attn.k_proj.weight"][WIDTH, 5] += 1  # the first row of k of the second group

    (found,) = compared(tmp_path, changed, theirs).differing()

    assert found.other_name == "decoder.layers.1.self_attention.linear_qkv.weight"
    assert found.first_at == (HEADS * WIDTH // GROUPS * 2 + 2 * WIDTH, 5)
    assert found.name == "model.layers.1.self_attn.(q_proj + k_proj + v_proj).weight"


def test_names_given_in_a_file_come_first(tmp_path):
    found = compared(tmp_path, {"a": noise(1, 3)}, {"b": noise(1, 3)}, renamed={"b": "a"})

    assert [(tensor.name, tensor.other_name) for tensor in found.tensors] == [("a", "b")]


def test_wrappers_of_parallel_frameworks_are_no_names(tmp_path):
    found = compared(tmp_path, {"module.fc.weight": noise(1, 3)}, {"_orig_mod.fc.weight": noise(1, 3)})

    assert found.headline == "the same model"


def test_two_names_that_become_one_are_an_error(tmp_path):
    with pytest.raises(
        CheckpointError, match=r"module\.fc\.w and fc\.w are both fc\.w|fc\.w and module\.fc\.w are both"
    ):
        compared(tmp_path, {"fc.w": noise(1, 3), "module.fc.w": noise(1, 3)}, {"x.w": noise(1, 3)})


def test_the_order_of_tensors_in_a_file_does_not_matter(tmp_path):
    ours = hf_model()

    found = compared(tmp_path, dict(sorted(ours.items())), megatron_model(ours))

    assert found.headline == "the same model", [(t.name, t.verdict.value) for t in found.differing()]


def stacked(hf, experts, *, turned):
    """Return a model with the experts of a layer in one tensor, as transformers 5 does, or turned, as its Llama 4."""
    apart = [name for name in hf if ".experts." in name]
    tensors = {name: array for name, array in hf.items() if name not in apart}
    for layer in range(2):
        mlp = f"model.layers.{layer}.mlp.experts"
        of = [{part: hf[f"{mlp}.{n}.{part}_proj.weight"] for part in ("gate", "up", "down")} for n in range(experts)]
        both = np.stack([np.concatenate([expert["gate"], expert["up"]]) for expert in of])
        down = np.stack([expert["down"] for expert in of])
        tensors[f"{mlp}.gate_up_proj"] = both.transpose(0, 2, 1).copy() if turned else both
        tensors[f"{mlp}.down_proj"] = down.transpose(0, 2, 1).copy() if turned else down
    return tensors


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("other", ["hugging face", "megatron"])
def test_stacked_experts_are_those_of_every_other_layout(tmp_path, turned, other):
    apart = hf_model(experts=3)
    theirs = apart if other == "hugging face" else megatron_model(apart, experts=3)

    found = compared(tmp_path, stacked(apart, 3, turned=turned), theirs)

    assert found.headline == "the same model", [(t.name, t.verdict.value) for t in found.differing()]


@pytest.mark.parametrize("part", ["q", "k", "v"])
@pytest.mark.parametrize("change", [0.0, 1.0])
def test_parts_of_several_types_are_joined_as_numbers(tmp_path, part, change):
    hf = hf_model()
    name = f"model.layers.1.self_attn.{part}_proj.weight"
    hf[name] = hf[name].astype(np.float16)
    megatron = megatron_model(hf)
    hf[name] = hf[name] + np.float16(change)
    assert megatron["decoder.layers.1.self_attention.linear_qkv.weight"].dtype == np.float32

    found = compared(tmp_path, hf, megatron)

    joined = "model.layers.1.self_attn.(q_proj + k_proj + v_proj).weight"
    assert [tensor.name for tensor in found.differing()] == ([joined] if change else [])
    if change:
        (tensor,) = found.differing()
        assert tensor.unequal == hf[name].size
        assert tensor.largest == pytest.approx(change, rel=1e-3)


def test_gates_and_ups_of_experts_that_take_turns_are_put_apart(tmp_path):
    """Megatron-Core's `moe_mlp_glu_interleave_size` of 2: two rows of gate, two of up, and so on."""
    plain = megatron_model(hf_model(experts=2), experts=2)
    turns = {
        name: array.reshape(2, -1, 2, HIDDEN).transpose(1, 0, 2, 3).reshape(array.shape) if "fc1" in name else array
        for name, array in plain.items()
    }
    args = {"args": {"moe_mlp_glu_interleave_size": 2}}
    ours = checkpoint_of(tmp_path / "a", {name: array.copy() for name, array in turns.items()}, values=args)

    found = compare_checkpoints(ours, checkpoint_of(tmp_path / "b", plain), options=CheckpointOptions(jobs=1))

    assert found.differing() == []


def test_the_encoder_of_a_legacy_t5_is_not_its_decoder(tmp_path):
    parts = {
        "encoder.layers.0.self_attention.query_key_value.weight": "encoder.layers.0.self_attention.linear_qkv.weight",
        "encoder.final_layernorm.weight": "encoder.final_layernorm.weight",
        "decoder.layers.0.self_attention.query_key_value.weight": "decoder.layers.0.self_attention.linear_qkv.weight",
        "decoder.layers.0.post_attention_layernorm.weight": "decoder.layers.0.pre_cross_attn_layernorm.weight",
        "decoder.layers.0.inter_attention.key_value.weight": "decoder.layers.0.cross_attention.linear_kv.weight",
        "decoder.layers.0.post_inter_attention_layernorm.weight": "decoder.layers.0.pre_mlp_layernorm.weight",
    }
    arrays = {new: noise(number, 4, 4) for number, new in enumerate(parts.values())}

    found = compared(tmp_path, {f"language_model.{old}": arrays[new] for old, new in parts.items()}, arrays)

    assert {tensor.name: tensor.other_name for tensor in found.tensors} == {
        f"language_model.{old}": new for old, new in parts.items()
    }


def test_a_tied_output_layer_is_the_embedding_of_the_other_side(tmp_path):
    untied = hf_model()
    tied = {name: array for name, array in untied.items() if name != "lm_head.weight"}
    copy = untied | {"lm_head.weight": untied["model.embed_tokens.weight"]}

    assert compared(tmp_path / "same", copy, tied).headline == "the same model"
    (found,) = compared(
        tmp_path / "other", megatron_model(tied | {"lm_head.weight": noise(9, 16, HIDDEN)}), tied
    ).differing()
    assert (found.name, found.verdict.value) == ("output_layer.weight", "different")


@pytest.mark.parametrize(
    ("values", "missing", "said"),
    [
        ({}, "", "how many heads there are stands in no config.json"),
        (VALUES, "v_proj", "its layer has no v"),
        ({"config": {"num_attention_heads": 3}}, "", "8 rows do not make 3 groups"),
    ],
)
def test_what_stays_unmatched_says_why(tmp_path, values, missing, said):
    hf = hf_model()
    ours = {name: array for name, array in hf.items() if not missing or missing not in name}
    sides = [checkpoint_of(tmp_path / str(n), side, values=values) for n, side in enumerate((ours, megatron_model(hf)))]

    found = compare_checkpoints(*sides, options=CheckpointOptions(jobs=1))

    reasons = {note for tensor in found.tensors if "q_proj" in tensor.name for note in tensor.notes}
    assert len(reasons) == 1
    assert said in reasons.pop()


PARTS = (  # what mindspore.nn and torch.nn call the same parameters. Source: MindSpore's documentation of each layer
    ("embedding", {"embedding_table": "weight"}),
    ("norm", {"gamma": "weight", "beta": "bias"}),
    ("batch", {"gamma": "weight", "beta": "bias", "moving_mean": "running_mean", "moving_variance": "running_var"}),
    ("dense", {"weight": "weight", "bias": "bias"}),
)


@pytest.mark.parametrize("turned", [False, True])
def test_parameters_of_mindspore_are_those_of_torch(tmp_path, turned):
    names = {f"net.{part}.{old}": f"net.{part}.{new}" for part, of in PARTS for old, new in of.items()}
    arrays = {new: noise(number, 4) for number, new in enumerate(names.values())}
    counter = {"net.batch.num_batches_tracked": np.array(7)}
    sides = [{old: arrays[new] for old, new in names.items()}, {**arrays, **counter}]

    found = compared(tmp_path, *(sides[::-1] if turned else sides))

    assert found.headline == "the same model"
    assert len(found.tensors) == len(names)
    assert found.notes == (
        "7 tensors are paired by PyTorch's names",
        "not compared: 1 counters of BatchNorm (num_batches_tracked), which one side does not keep",
    )


def test_a_name_of_mindspore_beside_that_of_torch_stays_what_it_is(tmp_path):
    ours = {"block.gamma": noise(1, 4), "block.weight": noise(2, 4), "a.bias": noise(3, 4)}
    theirs = {"block.gamma": noise(1, 4), "block.weight": noise(2, 4), "b.bias": noise(3, 4)}

    found = compared(tmp_path, ours, theirs)

    assert [(t.name, t.other_name) for t in found.tensors if t.verdict is WeightVerdict.IDENTICAL] == [
        ("block.gamma", "block.gamma"),
        ("block.weight", "block.weight"),
    ]


def test_a_counter_of_one_side_alone_is_unmatched_if_the_other_keeps_counters(tmp_path):
    both = {"a.num_batches_tracked": np.array(1)}

    found = compared(tmp_path, {**both, "b.num_batches_tracked": np.array(2)}, both)

    assert found.headline == "differs in 1 of 2 tensors, first b.num_batches_tracked"


@pytest.mark.parametrize("changed", [False, True])
def test_names_that_share_their_elements_are_the_one_that_the_other_side_has(tmp_path, changed):
    shared = noise(1, 5, 4)
    ours = checkpoint_of(tmp_path / "a", {"shared.weight": shared + changed})
    theirs = checkpoint_of(tmp_path / "b", {"shared.weight": shared})
    tied = {
        name: replace(theirs.tensors["shared.weight"], name=name)
        for name in ("encoder.tokens.weight", "lm_head.weight")
    }
    theirs = replace(theirs, tensors={**theirs.tensors, **tied})

    found = compare_checkpoints(ours, theirs, options=CheckpointOptions(jobs=1))

    assert {tensor.verdict for tensor in found.tensors} == {
        WeightVerdict.DIFFERENT if changed else WeightVerdict.IDENTICAL
    }
    assert len(found.tensors) == 3
