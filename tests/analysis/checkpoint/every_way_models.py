"""One Llama, one with tied embeddings and one mixture of experts, what AdamW remembers of each, and both for Megatron.

Weights and moments do not depend on how a model is spread over ranks, so that every checkpoint of it holds the same.
"""

import zlib

import torch
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

HIDDEN, FFN, HEADS, VOCABULARY, EXPERTS, LENGTH = 16, 24, 4, 48, 4, 6
GROUPS = {"dense": 2, "tied": 1, "experts": 2}
LAYERS = {"dense": 4, "tied": 2, "experts": 2}
MOMENTS = ("exp_avg", "exp_avg_sq")
TOKENS = torch.arange(LENGTH)[None] * 5 % VOCABULARY
STRIPES = ("gate_proj", "up_proj")


def hugging_face(kind):
    """Return the model, the same on every rank."""
    torch.manual_seed(7)
    sizes = {
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": LAYERS[kind],
        "num_attention_heads": HEADS,
        "num_key_value_heads": GROUPS[kind],
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": kind == "tied",
        "initializer_range": 0.3,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    }
    if kind != "experts":
        model = LlamaForCausalLM(LlamaConfig(**sizes))
    else:
        model = MixtralForCausalLM(MixtralConfig(num_local_experts=EXPERTS, num_experts_per_tok=2, **sizes))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(torch.rand(parameter.shape) + 0.5)
    return model.eval()


def state_of(kind):
    """Return what there is of each parameter by its name: under `weight`, and under each of `MOMENTS`."""
    model = hugging_face(kind)
    weights = dict(model.named_parameters())
    return {
        "weight": weights,
        **{moment: {name: _moment(name, moment, weights[name]) for name in weights} for moment in MOMENTS},
    }


def _moment(name, moment, weight):
    generator = torch.Generator().manual_seed(zlib.crc32(f"{moment} {name}".encode()))
    values = torch.randn(weight.shape, generator=generator)
    return values.square() if moment.endswith("_sq") else values


def for_megatron(kind, state):
    """Return tensors by Megatron's names, q, k and v by group: [group, (queries, key, value), hidden]."""
    groups, width = GROUPS[kind], HIDDEN // HEADS
    embedding = state["model.embed_tokens.weight"]
    found = {
        "embedding.word_embeddings.weight": embedding,
        "decoder.final_layernorm.weight": state["model.norm.weight"],
        "output_layer.weight": state.get("lm_head.weight", embedding),
    }
    for number in range(LAYERS[kind]):
        start = f"model.layers.{number}."
        own = {name.removeprefix(start): value for name, value in state.items() if name.startswith(start)}
        parts = [own[f"self_attn.{part}_proj.weight"].view(groups, -1, width, HIDDEN) for part in "qkv"]
        new = {
            "input_layernorm.weight": own["input_layernorm.weight"],
            "pre_mlp_layernorm.weight": own["post_attention_layernorm.weight"],
            "self_attention.linear_proj.weight": own["self_attn.o_proj.weight"],
            "self_attention.linear_qkv.weight": torch.cat(parts, 1).reshape(-1, HIDDEN),
        }
        if "mlp.gate.weight" in own:
            new["mlp.router.weight"] = own["mlp.gate.weight"]
            for expert in range(EXPERTS):
                place = f"mlp.experts.local_experts.{expert}"
                new[f"{place}.linear_fc1.weight"] = own["mlp.experts.gate_up_proj"][expert]
                new[f"{place}.linear_fc2.weight"] = own["mlp.experts.down_proj"][expert]
        else:
            new["mlp.linear_fc1.weight"] = torch.cat([own[f"mlp.{stripe}.weight"] for stripe in STRIPES])
            new["mlp.linear_fc2.weight"] = own["mlp.down_proj.weight"]
        found |= {f"decoder.layers.{number}.{name}": value for name, value in new.items()}
    return found
