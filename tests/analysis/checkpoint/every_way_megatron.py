"""Saves the models of `every_way_models` by Megatron-Core, split every way, in both layouts of files."""

import argparse
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import TransformerConfig

from tests.analysis.checkpoint.every_way_models import (
    EXPERTS,
    FFN,
    GROUPS,
    HEADS,
    HIDDEN,
    LAYERS,
    LENGTH,
    MOMENTS,
    TOKENS,
    VOCABULARY,
    for_megatron,
    hugging_face,
    state_of,
)
from tests.frameworks.megatron import gpt


class Split(NamedTuple):
    """How a model is spread over ranks: stages may have other numbers of layers."""

    layout: gpt.Layout
    first: int | None = None
    last: int | None = None
    stages: str | None = None


def split(first=None, last=None, stages=None, **layout):
    return Split(gpt.Layout(**layout), first, last, stages)


OWN: dict[str, dict[str, Any]] = {"dense": {"tied": False}, "tied": {}, "experts": {"experts": EXPERTS, "tied": False}}
ZERO = {"distributed_optimizer": True}
SPLITS = {  # by number of ranks, model and name of the checkpoint
    1: {kind: {"one": split(**own)} for kind, own in OWN.items()},
    2: {
        "dense": {
            "tp": split(tp=2, tied=False),
            "pp": split(pp=2, tied=False, **ZERO),
            "vpp": split(pp=2, vpp=2, tied=False, **ZERO),
            "dp": split(tied=False, bucket=2000, overlap=True, **ZERO),
        },
        "tied": {"tp": split(tp=2), "pp": split(pp=2, **ZERO)},  # tp: more ranks than groups of heads
        "experts": {
            "tp": split(tp=2, experts=EXPERTS, tied=False, **ZERO),
            "ep": split(ep=2, experts=EXPERTS, tied=False, **ZERO),
        },
    },
    3: {
        "dense": {
            "pp211": split(pp=3, first=2, last=1, tied=False),
            "pp121": split(pp=3, stages="Et|tt|tL", tied=False, **ZERO),
        }
    },
    4: {
        "dense": {
            "tp2pp2": split(tp=2, pp=2, tied=False),
            "tp2dp2": split(tp=2, tied=False, **ZERO),
            "tp2vpp2": split(tp=2, pp=2, vpp=2, tied=False, **ZERO),
        },
        "tied": {"tp4": split(tp=4), "tp2pp2": split(tp=2, pp=2, **ZERO)},
        "experts": {
            "ep2pp2": split(ep=2, pp=2, experts=EXPERTS, tied=False, **ZERO),
            "ep2tp2": split(ep=2, tp=2, experts=EXPERTS, tied=False),
        },
    },
}


def configuration(kind, chosen):
    layout = chosen.layout
    base = gpt.transformer_config(layout)
    changes = {
        "num_layers": LAYERS[kind],
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
        "num_layers_in_first_pipeline_stage": chosen.first,
        "num_layers_in_last_pipeline_stage": chosen.last,
        "pipeline_model_parallel_layout": chosen.stages,
    }
    if layout.experts:
        changes |= {"moe_ffn_hidden_size": FFN}
    kept = (
        "num_attention_heads",
        "use_cpu_initialization",
        "pipeline_dtype",
        "num_moe_experts",
        "moe_router_topk",
        "moe_token_dispatcher_type",
        "tensor_model_parallel_size",
        "sequence_parallel",
        "pipeline_model_parallel_size",
        "virtual_pipeline_model_parallel_size",
        "expert_model_parallel_size",
        "hidden_dropout",
        "attention_dropout",
        "moe_aux_loss_coeff",
        "gradient_accumulation_fusion",
        "bias_activation_fusion",
        "masked_softmax_fusion",
        "bias_dropout_fusion",
    )
    return TransformerConfig(**{name: getattr(base, name) for name in kept}, **changes)


def own_part(whole, name, layout):
    """Return what this rank holds of a tensor: of a gated layer, its part of each half."""
    if name.endswith("linear_fc1.weight"):
        return torch.cat([gpt.part_of(half, name, layout) for half in whole.chunk(2)])
    return gpt.part_of(whole, name, layout)


def parameters_of(model, layout):
    """Yield the parameters of a part of the model with their names in the whole; each layer knows its number."""
    for path, parameter in model.named_parameters():
        parts = path.split(".")
        if "layers" in parts:
            at = parts.index("layers") + 1
            parts[at] = str(model.decoder.layers[int(parts[at])].layer_number - 1)
        if "local_experts" in parts:
            at = parts.index("local_experts") + 1
            first = parallel_state.get_expert_model_parallel_rank() * (layout.experts // layout.ep)
            parts[at] = str(int(parts[at]) + first)
        yield ".".join(parts), parameter


def build(kind, chosen):
    """Return the parts of the model that this rank has, and an optimizer: its values are those of `state_of`."""
    layout = chosen.layout
    gpt.initialise(layout)
    config = configuration(kind, chosen)
    spec = get_gpt_layer_local_spec(layout.experts or None, moe_grouped_gemm=False, normalization="RMSNorm")
    wrapped = DistributedDataParallelConfig(
        use_distributed_optimizer=layout.distributed_optimizer,
        overlap_grad_reduce=layout.overlap,
        bucket_size=layout.bucket,
    )
    wholes = {of: for_megatron(kind, state) for of, state in state_of(kind).items()}
    chunks = []
    for stage in range(layout.vpp):
        virtual = {"ignore_virtual": False, "vp_stage": stage} if layout.vpp > 1 else {}
        model = GPTModel(
            config=config,
            transformer_layer_spec=spec,
            vocab_size=VOCABULARY,
            max_sequence_length=64,
            pre_process=parallel_state.is_pipeline_first_stage(**virtual),
            post_process=parallel_state.is_pipeline_last_stage(**virtual),
            share_embeddings_and_output_weights=layout.tied,
            position_embedding_type="rope",
            parallel_output=False,
            **({"vp_stage": stage} if layout.vpp > 1 else {}),
        ).eval()
        with torch.no_grad():
            for name, parameter in parameters_of(model, layout):
                parameter.copy_(own_part(wholes["weight"][name], name, layout))
        chunks.append(DistributedDataParallel(config, wrapped, model, disable_bucketing=stage > 0))
    options = OptimizerConfig(optimizer="adam", lr=0.0, use_distributed_optimizer=layout.distributed_optimizer)
    optimizer = get_megatron_optimizer(options, chunks)
    set_moments(optimizer, chunks, wholes, layout)
    return chunks, optimizer


@torch.no_grad()
def set_moments(chained, chunks, wholes, layout):
    """Give the optimizer of every rank its part of the moments."""
    places = {parameter: name for chunk in chunks for name, parameter in parameters_of(chunk.module, layout)}
    for optimizer in getattr(chained, "chained_optimizers", [chained]):
        if layout.distributed_optimizer:
            optimizer._init_optimizer_states_with_dummy_values()
            own = optimizer.model_param_group_index_map
        else:
            optimizer.init_state_fn(optimizer.optimizer)
            groups = optimizer.optimizer.param_groups
            own = {parameter: None for group in groups for parameter in group["params"]}
        for parameter in own:
            name = places[parameter]
            state = {of: own_part(wholes[of][name], name, layout).detach() for of in MOMENTS}
            if layout.distributed_optimizer:
                cut = optimizer._get_model_param_range_map(parameter)["param"]
                state = {of: value.reshape(-1)[cut.start : cut.end] for of, value in state.items()}
                state |= {"param": parameter.detach().reshape(-1)[cut.start : cut.end], "step": torch.tensor(1.0)}
                optimizer._set_main_param_and_optimizer_states(parameter, state)
            else:
                for of, value in state.items():
                    optimizer.optimizer.state[parameter][of].copy_(value)


def assert_computes_the_same(kind, model):
    """Fail unless both models have the same outputs, so that the weights are where they belong."""
    expected = hugging_face(kind)(TOKENS).logits
    mask = torch.triu(torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool), 1)
    found = model(TOKENS, torch.arange(LENGTH)[None], mask)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


def arguments(kind, chosen):
    layout = chosen.layout
    return argparse.Namespace(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        expert_model_parallel_size=layout.ep,
        data_parallel_size=dist.get_world_size() // (layout.tp * layout.pp),
        num_layers=LAYERS[kind],
        num_experts=layout.experts or None,
        num_attention_heads=HEADS,
        num_query_groups=GROUPS[kind],
        group_query_attention=True,
        swiglu=True,
        untie_embeddings_and_output_weights=not layout.tied,
        use_distributed_optimizer=layout.distributed_optimizer,
        overlap_grad_reduce=layout.overlap,
        ddp_bucket_size=layout.bucket,
    )


def save_by_rank(kind, folder, chosen, chunks, optimizer):
    """Save as Megatron-LM's `get_checkpoint_name` and `save_checkpoint` say: files of the first replica."""
    layout = chosen.layout
    name = f"mp_rank_{parallel_state.get_tensor_model_parallel_rank():02d}"
    name += f"_{parallel_state.get_pipeline_model_parallel_rank():03d}" if layout.pp > 1 else ""
    name += f"_{parallel_state.get_expert_model_parallel_rank():03d}" if layout.ep > 1 else ""
    place = folder / "iter_0000001" / name
    place.mkdir(parents=True, exist_ok=True)
    keys = [f"model{number}" for number in range(len(chunks))] if len(chunks) > 1 else ["model"]
    models = {key: chunk.module.state_dict_for_save_checkpoint() for key, chunk in zip(keys, chunks, strict=True)}
    if layout.distributed_optimizer:
        optimizer.save_parameter_state(str(place / "distrib_optim.pt"))
    if parallel_state.get_expert_data_parallel_rank() == 0:
        state = {"args": arguments(kind, chosen), "iteration": 1, **models, "optimizer": optimizer.state_dict()}
        torch.save(state, place / "model_optim_rng.pt")
    dist.barrier()


def save_torch_dist(folder, common, chunks, optimizer, sharding):
    folder.mkdir(exist_ok=True)
    dist.barrier()
    keys = [f"model{number}" for number in range(len(chunks))] if len(chunks) > 1 else ["model"]
    models = {key: chunk.module.sharded_state_dict() for key, chunk in zip(keys, chunks, strict=True)}
    state = {**models, **common}
    metadata = {"distrib_optim_sharding_type": sharding} if sharding else {}
    model = models["model"] if len(models) == 1 else models
    state["optimizer"] = optimizer.sharded_state_dict(model, metadata=metadata)
    dist_checkpointing.save(state, str(folder))


def save(kind, folder, world_size):
    for name, chosen in SPLITS[world_size].get(kind, {}).items():
        layout = chosen.layout
        chunks, optimizer = build(kind, chosen)
        if layout.pp == 1 and (layout.tp == 1 or not layout.experts):  # which need sequence parallelism with tp
            assert_computes_the_same(kind, chunks[0].module)
        save_by_rank(kind, folder / f"megatron_{name}", chosen, chunks, optimizer)
        shardings: tuple[str, ...] = ("",)
        if layout.distributed_optimizer:  # with several buckets, Megatron writes others as `fully_reshardable`
            shardings = ("dp_reshardable",) if layout.bucket else ("fully_reshardable", "dp_reshardable")
        for sharding in shardings:
            end = "_buckets" if sharding == "dp_reshardable" else ""
            common = {"iteration": 1, "args": arguments(kind, chosen)}
            save_torch_dist(folder / f"torch_dist_{name}{end}", common, chunks, optimizer, sharding)
