"""Saves one Llama and one mixture of experts in every way there is, by the frameworks themselves, on two ranks.

The weights of Megatron's models are those of the ones of Hugging Face; that both then compute the same is checked.
"""

import argparse
import os
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig
from safetensors.torch import save_file
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from tests.analysis.checkpoint.formats import sharded_worker
from tests.frameworks.deepspeed import engines
from tests.frameworks.megatron import gpt

HIDDEN, FFN, LAYERS, HEADS, VOCABULARY, EXPERTS, LENGTH = 16, 24, 2, 4, 48, 4, 6
GROUPS = {"dense": 2, "tied": 1, "experts": 2}
STAGES = {"dense": (0, 2, 1, 3), "tied": (1, 3), "experts": (1, 3)}
TOKENS = torch.arange(LENGTH)[None] * 5 % VOCABULARY
STRIPES = ("gate_proj", "up_proj")
MEGATRON = {  # how Megatron's models are split, by the name of the checkpoint
    "dense": {"tp": gpt.Layout(tp=2, tied=False), "pp": gpt.Layout(pp=2, tied=False)},
    "tied": {"tp": gpt.Layout(tp=2)},  # of one group of heads: over more ranks than groups
    "experts": {
        "tp": gpt.Layout(tp=2, experts=EXPERTS, tied=False),
        "ep": gpt.Layout(ep=2, experts=EXPERTS, tied=False),
    },
}


def hugging_face(kind):
    """Return the model, the same on every rank."""
    torch.manual_seed(7)
    sizes = {
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": LAYERS,
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


def trained_by_nothing(model, optimizer_class=torch.optim.AdamW):
    """Return an optimizer whose steps leave the weights as they are, and fill its moments."""
    return optimizer_class(model.parameters(), lr=0.0, weight_decay=0.0)


# ---------------------------------------------------------------------- by torch, transformers, FSDP2, DeepSpeed


def save_by_one(kind, folder):
    model = hugging_face(kind)
    weights = model.state_dict()
    torch.save({"model": weights, "step": 1}, folder / "torch.pt")
    save_file({name: weight.clone() for name, weight in weights.items()}, folder / "plain.safetensors")
    model.save_pretrained(folder / "hf", max_shard_size="8KB")


def save_by_fsdp(kind, folder):
    model = hugging_face(kind)
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = trained_by_nothing(model)
    model(TOKENS, labels=TOKENS).loss.backward()
    optimizer.step()
    weights, state = get_state_dict(model, optimizer)
    state_dict_saver.save({"model": weights, "optim": state}, checkpoint_id=folder)


def save_by_deepspeed(kind, folder, stage):
    model = hugging_face(kind)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 8},
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 1_000_000,
    }
    engine = engines.deepspeed.initialize(model=model, optimizer=trained_by_nothing(model), config=config)[0]
    engine.backward(engine(TOKENS, labels=TOKENS).loss)
    engines.step_engine(engine)
    state = {"universal_checkpoint_info": {"universal_checkpoint_version": 0.2}}
    engine.save_checkpoint(str(folder), tag="global_step1", client_state=state)


# ---------------------------------------------------------------------- by Megatron


def megatron_config(kind, layout):
    base = gpt.transformer_config(layout)
    changes = {
        "hidden_size": HIDDEN,
        "ffn_hidden_size": FFN,
        "num_query_groups": GROUPS[kind],
        "kv_channels": HIDDEN // HEADS,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "normalization": "RMSNorm",
        "layernorm_epsilon": 1e-5,
        "apply_rope_fusion": False,
    }
    if layout.experts:
        changes |= {"moe_ffn_hidden_size": FFN}
    names = {field for field in TransformerConfig.__dataclass_fields__ if hasattr(base, field)}
    kept = (
        "num_layers",
        "num_attention_heads",
        "use_cpu_initialization",
        "pipeline_dtype",
        "num_moe_experts",
        "moe_router_topk",
        "moe_token_dispatcher_type",
        "tensor_model_parallel_size",
        "sequence_parallel",
        "pipeline_model_parallel_size",
        "expert_model_parallel_size",
        "hidden_dropout",
        "attention_dropout",
        "moe_aux_loss_coeff",
        "gradient_accumulation_fusion",
        "bias_activation_fusion",
        "masked_softmax_fusion",
        "bias_dropout_fusion",
    )
    return TransformerConfig(**{name: getattr(base, name) for name in kept if name in names}, **changes)


def megatron_weights(kind):
    """Return the weights by Megatron's names, q, k and v by group: [group, (queries, key, value), hidden]."""
    model, groups, width = hugging_face(kind), GROUPS[kind], HIDDEN // HEADS
    state = model.state_dict()
    found = {
        "embedding.word_embeddings.weight": state["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": state["model.norm.weight"],
        "output_layer.weight": state["lm_head.weight"],
    }
    for number, layer in enumerate(model.model.layers):
        own = layer.state_dict()
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


def own_part(whole, name, layout):
    """Return what this rank holds of a tensor: of a gated layer, its part of each half."""
    if name.endswith("linear_fc1.weight"):
        return torch.cat([gpt.part_of(half, name, layout) for half in whole.chunk(2)])
    return gpt.part_of(whole, name, layout)


def megatron(kind, layout):
    gpt.initialise(layout)
    config = megatron_config(kind, layout)
    spec = get_gpt_layer_local_spec(layout.experts or None, moe_grouped_gemm=False, normalization="RMSNorm")
    model = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=VOCABULARY,
        max_sequence_length=64,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=layout.tied,
        position_embedding_type="rope",
        parallel_output=False,
    ).eval()
    weights = megatron_weights(kind)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            name = gpt.whole_name(path, layout, 0)
            parameter.copy_(own_part(weights[name], name, layout))
    return model


def assert_computes_the_same(kind, model):
    """Fail unless both models have the same outputs, so that the weights are where they belong."""
    expected = hugging_face(kind)(TOKENS).logits
    mask = torch.triu(torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool), 1)
    found = model(TOKENS, torch.arange(LENGTH)[None], mask)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


def arguments(kind, layout):
    return argparse.Namespace(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        expert_model_parallel_size=layout.ep,
        num_experts=layout.experts or None,
        num_attention_heads=HEADS,
        num_query_groups=GROUPS[kind],
        group_query_attention=True,
        swiglu=True,
    )


def save_by_rank(kind, folder, layout, model):
    """Save as Megatron-LM's `get_checkpoint_name` says."""
    name = f"mp_rank_{parallel_state.get_tensor_model_parallel_rank():02d}"
    name += f"_{parallel_state.get_pipeline_model_parallel_rank():03d}" if layout.pp > 1 else ""
    name += f"_{parallel_state.get_expert_model_parallel_rank():03d}" if layout.ep > 1 else ""
    place = folder / "iter_0000001" / name
    place.mkdir(parents=True, exist_ok=True)
    weights = model.state_dict_for_save_checkpoint()
    torch.save({"args": arguments(kind, layout), "iteration": 1, "model": weights}, place / "model_optim_rng.pt")


def save_torch_dist(kind, folder, layout, model):
    folder.mkdir(exist_ok=True)
    dist.barrier()
    state = {"model": model.sharded_state_dict(), "iteration": 1, "args": arguments(kind, layout)}
    dist_checkpointing.save(state, str(folder))


def save_without_megatron(kind, folder):
    folder.mkdir(exist_ok=True)
    dist.barrier()
    save_by_fsdp(kind, folder / "fsdp2")
    for stage in STAGES[kind]:
        save_by_deepspeed(kind, folder / f"zero{stage}", stage)
    if dist.get_rank() == 0:
        save_by_one(kind, folder)
        for stage in STAGES[kind][-2:]:
            sharded_worker.convert(folder / f"zero{stage}", folder / f"universal{stage}")


def save_by_megatron(kind, folder):
    for name, layout in MEGATRON[kind].items():
        model = megatron(kind, layout)
        if layout.pp == 1 and (layout.tp == 1 or not layout.experts):  # which need sequence parallelism with tp
            assert_computes_the_same(kind, model)
        save_by_rank(kind, folder / f"megatron_{name}", layout, model)
        save_torch_dist(kind, folder / f"torch_dist_{name}", layout, model)


def main(output):
    engines.start()
    for save in (save_without_megatron, save_by_megatron):  # which lets go of the groups of others
        for kind in MEGATRON:
            save(kind, output / kind)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(Path(sys.argv[1]))
