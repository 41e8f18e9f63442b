"""A LoRA adapter merged into weights that the other side joins, pads or keeps in another order is still told."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from trainermon.analysis.checkpoint.comparison import CheckpointOptions, compare_checkpoints
from trainermon.analysis.checkpoint.verdicts import SAME

HIDDEN, HEADS, GROUPS, WIDTH, FFN, VOCABULARY = 32, 4, 2, 8, 48, 50
SHAPES = {
    "model.embed_tokens": (VOCABULARY, HIDDEN),
    "model.layers.0.self_attn.q_proj": (HEADS * WIDTH, HIDDEN),
    "model.layers.0.self_attn.k_proj": (GROUPS * WIDTH, HIDDEN),
    "model.layers.0.self_attn.v_proj": (GROUPS * WIDTH, HIDDEN),
    "model.layers.0.self_attn.o_proj": (HIDDEN, HEADS * WIDTH),
    "model.layers.0.mlp.gate_proj": (FFN, HIDDEN),
    "model.layers.0.mlp.up_proj": (FFN, HIDDEN),
    "model.layers.0.mlp.down_proj": (HIDDEN, FFN),
    "model.norm": (HIDDEN,),
}
QKV = "decoder.layers.0.self_attention.linear_qkv.weight"
FC1 = "decoder.layers.0.mlp.linear_fc1.weight"
JOINED = {"q_proj": QKV, "k_proj": QKV, "v_proj": QKV, "gate_proj": FC1, "up_proj": FC1}


def write_hf(folder, dtype, size, targets):
    """Return a base and what an adapter of a rank and alpha adds to it by module, in float64; both are written."""
    rank, alpha = size
    chance = np.random.default_rng(0)
    base = {name: torch.from_numpy(0.1 * chance.standard_normal(shape)).to(dtype) for name, shape in SHAPES.items()}
    folder.mkdir()
    save_file({f"{name}.weight": tensor for name, tensor in base.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"num_attention_heads": HEADS, "num_key_value_heads": GROUPS}))
    factors, added = {}, {}
    for name, (rows, columns) in ((name, shape) for name, shape in SHAPES.items() if len(shape) == 2):
        if name.rpartition(".")[2] in targets:
            a, b = (torch.from_numpy(0.1 * chance.standard_normal(shape)) for shape in ((rank, columns), (rows, rank)))
            a, b = a.to(dtype), b.to(dtype)
            factors |= {f"base_model.model.{name}.lora_{part}.weight": each for part, each in (("A", a), ("B", b))}
            added[name] = alpha / rank * (b.double() @ a.double())
    write_adapter(folder / "adapter", factors, rank=rank, alpha=alpha)
    return base, added


def write_adapter(folder, factors, *, rank, alpha):
    folder.mkdir()
    save_file(factors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def write_megatron(path, merged):
    """Write weights of Hugging Face's names as Megatron-Core has them, the vocabulary padded."""
    inner = {name.rpartition(".")[2]: tensor for name, tensor in merged.items()}
    rows = []
    for group in range(GROUPS):
        for part, heads in (("q_proj", HEADS // GROUPS), ("k_proj", 1), ("v_proj", 1)):
            rows.append(inner[part][group * heads * WIDTH : (group + 1) * heads * WIDTH])
    padding = torch.zeros(14, HIDDEN, dtype=inner["embed_tokens"].dtype)
    tensors = {
        "embedding.word_embeddings.weight": torch.cat([inner["embed_tokens"], padding]),
        QKV: torch.cat(rows),
        "decoder.layers.0.self_attention.linear_proj.weight": inner["o_proj"],
        FC1: torch.cat([inner["gate_proj"], inner["up_proj"]]),
        "decoder.layers.0.mlp.linear_fc2.weight": inner["down_proj"],
        "decoder.final_layernorm.weight": inner["norm"],
    }
    save_file(tensors, path)


def merged_with(base, added, share):
    """Return what PEFT would merge: the product rounded to the type of the base, and the sum rounded again."""
    found = dict(base)
    for name, delta in added.items():
        of = share.get(name.rpartition(".")[2], 1.0)
        found[name] = base[name] + (of * delta).to(base[name].dtype)
    return found


def differing(folder, megatron, *, scheme="megatron", turned=False):
    sides = [f"{folder}+{folder / 'adapter'}", megatron]
    found = compare_checkpoints(*(sides[::-1] if turned else sides), options=CheckpointOptions(scheme=scheme))
    return {
        (tensor.other_name if not turned else tensor.name): tensor
        for tensor in found.tensors
        if tensor.verdict not in SAME
    }


ALL = (*JOINED, "o_proj", "down_proj")


@pytest.mark.parametrize("scheme", ["megatron", "hf"])
@pytest.mark.parametrize("targets", [ALL, ("q_proj", "v_proj"), ("v_proj",), ("up_proj",)])
@pytest.mark.parametrize("size", [(1, 1), (4, 16), (8, 4)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_rightly_merged_adapter_is_no_difference_in_joined_weights(tmp_path, dtype, size, targets, scheme):
    base, added = write_hf(tmp_path / "hf", dtype, size, targets)
    write_megatron(tmp_path / "megatron.safetensors", merged_with(base, added, {}))

    for turned in (False, True):
        assert differing(tmp_path / "hf", tmp_path / "megatron.safetensors", scheme=scheme, turned=turned) == {}


@pytest.mark.parametrize("share", [0.0, 0.5, 2.0, -1.0])
@pytest.mark.parametrize("part", JOINED)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_part_that_holds_another_share_of_the_adapter_is_found(tmp_path, dtype, part, share):
    base, added = write_hf(tmp_path / "hf", dtype, (4, 16), ALL)
    write_megatron(tmp_path / "megatron.safetensors", merged_with(base, added, {part: share}))

    found = differing(tmp_path / "hf", tmp_path / "megatron.safetensors")

    assert set(found) == {JOINED[part]}
    assert "elements differ by more than rounding" in " ".join(found[JOINED[part]].notes)


@pytest.mark.parametrize("share", [0.0, 1.0, 4.0])
def test_the_share_is_told_over_all_joined_parts(tmp_path, share):
    base, added = write_hf(tmp_path / "hf", torch.float32, (4, 16), ALL)
    write_megatron(tmp_path / "megatron.safetensors", merged_with(base, added, dict.fromkeys(ALL, share)))

    found = differing(tmp_path / "hf", tmp_path / "megatron.safetensors")

    assert (QKV in found) is (FC1 in found) is (share != 1.0)
    for tensor in found.values():
        assert f"holds {share:.3g} times what the adapter adds" in " ".join(tensor.notes)


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_an_adapter_of_an_embedding_that_is_padded_is_told(tmp_path, share):
    base, added = write_hf(tmp_path / "hf", torch.float16, (4, 16), ("embed_tokens",))
    write_megatron(tmp_path / "megatron.safetensors", merged_with(base, added, {"embed_tokens": share}))

    found = differing(tmp_path / "hf", tmp_path / "megatron.safetensors")

    assert set(found) == (set() if share == 1.0 else {"embedding.word_embeddings.weight"})


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_gates_and_ups_that_take_turns_are_told(tmp_path, share):
    """Megatron-Core's `moe_mlp_glu_interleave_size`: the base says it, and the merged weights are in plain order."""
    name = "decoder.layers.0.mlp.experts.local_experts.0.linear_fc1"
    chance = np.random.default_rng(0)
    base, a, b = (torch.from_numpy(chance.standard_normal(shape)).half() for shape in ((8, 16), (1, 16), (8, 1)))
    turns = [0, 1, 4, 5, 2, 3, 6, 7]  # gates 0-3 and ups 4-7 in blocks of two
    state = {"args": {"moe_mlp_glu_interleave_size": 2}, "model": {f"{name}.weight": base[turns]}}
    torch.save(state, tmp_path / "base.pt")
    factors = {f"base_model.model.{name}.lora_A.weight": a, f"base_model.model.{name}.lora_B.weight": b[turns]}
    write_adapter(tmp_path / "adapter", factors, rank=1, alpha=1)
    save_file({f"{name}.weight": base + share * (b @ a)}, tmp_path / "merged.safetensors")

    found = compare_checkpoints(f"{tmp_path / 'base.pt'}+{tmp_path / 'adapter'}", tmp_path / "merged.safetensors")

    assert [tensor.name for tensor in found.differing()] == ([] if share == 1.0 else [f"{name}.weight"])
