"""A small Megatron GPT in any layout, with weights that do not depend on the layout, and its data."""

import contextlib
import dataclasses
import gc
import inspect
import zlib

import torch
import torch.distributed as dist

from examples import megatron_cpu
from tests.frameworks.megatron import fused_gemm, host_memory

fused_gemm.install()
megatron_cpu.install()

import megatron.core.distributed  # noqa: E402
from megatron.core import __version__ as version  # noqa: E402, F401  # after the CPU took CUDA's place
from megatron.core import parallel_state  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.optimizer.optimizer import ChainedOptimizer, FP32Optimizer  # noqa: E402, F401
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402
from megatron.core.transformer.module import Float16Module  # noqa: E402
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules  # noqa: E402

from tests.frameworks.megatron.substitutes import GatheringAttention, SequenceLayerNorm  # noqa: E402

# 0.12 asks a global variable for the virtual stage, later versions are told.
KNOWS_STAGES = "vp_stage" in inspect.signature(GPTModel.__init__).parameters
HIDDEN, HEADS, FFN, VOCAB, SEQUENCE, BATCH, MICRO_BATCHES = 16, 4, 48, 64, 8, 2, 2
# Adam's usual 1e-8 would let the sign of a gradient that is only rounding noise (of the bias of keys) move a parameter.
LEARNING_RATE, EPSILON = 0.01, 1e-2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """How the model is spread over the ranks, and what else can be chosen."""

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 0
    sp: bool = False
    experts: int = 0
    dispatcher: str = "alltoall"
    layers: int = 2
    tied: bool = True
    distributed_optimizer: bool = False
    instances: int = 1
    overlap: bool = False
    overlap_gather: bool = False
    bucket: int | None = None
    dtype: torch.dtype = torch.float32
    average_in_collective: bool = False
    per_token_loss: bool = False
    loss_scale: float | None = None
    clip: float = 1e9
    dropout: float = 0.0
    fused: bool = False
    layer_wise: bool = False
    offload: bool = False
    gated: bool = False

    @property
    def name(self):
        changed = [f for f in dataclasses.fields(self) if getattr(self, f.name) != f.default]
        return " ".join(f"{f.name}={getattr(self, f.name)}" for f in changed) or "plain"


_sizes = None


def initialise(layout):
    """Have Megatron's groups be those of a layout; they stay if the layout before had the same."""
    global _sizes
    sizes = (layout.tp, layout.pp, layout.vpp, layout.cp, layout.ep, layout.etp, layout.instances)
    if sizes != _sizes:
        release()
        form_groups(layout)
        _sizes = sizes
    if layout.vpp > 1:
        parallel_state.set_virtual_pipeline_model_parallel_rank(0)  # as at the beginning
    model_parallel_cuda_manual_seed(123)


def form_groups(layout):
    parallel_state._POSITION_EMBEDDING_GLOBAL_RANKS = None  # 0.12 forgets to
    parallel_state.initialize_model_parallel(
        layout.tp,
        layout.pp,
        layout.vpp if layout.vpp > 1 else None,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp or None,
        **({"num_distributed_optimizer_instances": layout.instances} if layout.instances > 1 else {}),
    )


def release():
    """Let go of the layout before: Megatron forgets its groups, but each gloo group keeps its threads."""
    parallel_state.destroy_model_parallel()
    world = dist.distributed_c10d._world
    for group in [group for group in world.pg_map if group is not dist.group.WORLD]:
        dist.destroy_process_group(group)
    gc.collect()  # models hold their groups in circles


def transformer_config(layout):
    half = layout.dtype is not torch.float32
    moe = {}
    if layout.experts:
        moe = {
            "num_moe_experts": layout.experts,
            "moe_router_topk": 2,
            "moe_ffn_hidden_size": FFN,
            "moe_token_dispatcher_type": layout.dispatcher,
            "moe_aux_loss_coeff": 0.0,
            "add_bias_linear": False,
        }
    return TransformerConfig(
        num_layers=layout.layers,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        ffn_hidden_size=FFN,
        use_cpu_initialization=True,
        params_dtype=layout.dtype,
        pipeline_dtype=layout.dtype,
        bf16=layout.dtype is torch.bfloat16,
        fp16=layout.dtype is torch.float16,
        attention_softmax_in_fp32=half,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp or None,
        sequence_parallel=layout.sp,
        attention_dropout=layout.dropout,
        hidden_dropout=layout.dropout,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=layout.fused,
        gated_linear_unit=layout.gated,
        activation_func=torch.nn.functional.silu if layout.gated else torch.nn.functional.gelu,
        calculate_per_token_loss=layout.per_token_loss,
        **moe,
    )


def layer_spec(layout):
    spec = get_gpt_layer_local_spec(layout.experts or None, moe_grouped_gemm=False)
    parts = spec.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = SequenceLayerNorm
    if layout.cp > 1:
        parts.self_attention.submodules.core_attention = GatheringAttention
    return spec


def build(layout):
    """Return (chunks, optimizer) with the weights of `full_weight`."""
    config = transformer_config(layout)
    per_chunk = layout.layers // (layout.pp * layout.vpp)
    layers = TransformerBlockSubmodules([layer_spec(layout)] * per_chunk, layer_norm=SequenceLayerNorm)
    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=layout.distributed_optimizer,
        num_distributed_optimizer_instances=layout.instances,
        overlap_grad_reduce=layout.overlap,
        overlap_param_gather=layout.overlap_gather,
        bucket_size=layout.bucket,
        grad_reduce_in_fp32=layout.dtype is not torch.float32,
        average_in_collective=layout.average_in_collective,
    )
    chunks = []
    for stage in range(layout.vpp):
        stage_arguments = {}
        if layout.vpp > 1:
            parallel_state.set_virtual_pipeline_model_parallel_rank(stage)
            stage_arguments = {"vp_stage": stage} if KNOWS_STAGES else {}
        model = GPTModel(
            config=config,
            transformer_layer_spec=layers,
            vocab_size=VOCAB,
            max_sequence_length=SEQUENCE,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, **stage_arguments),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, **stage_arguments),
            share_embeddings_and_output_weights=layout.tied,
            **stage_arguments,
        )
        load(model, layout, stage)
        if layout.dtype is not torch.float32:
            model = Float16Module(config, model)
        chunks.append(DistributedDataParallel(config, ddp_config, model, disable_bucketing=stage > 0))
    optimizer = make_optimizer(layout, config, chunks)
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    if layout.overlap:
        syncs = [chunk.no_sync for chunk in chunks]
        config.no_sync_func = syncs if len(syncs) > 1 else syncs[0]
        starts = [chunk.start_grad_sync for chunk in chunks]
        # a pipeline starts every reduction at the same time on all stages; in the first batch once more at its end
        config.grad_sync_func = starts if len(starts) > 1 else starts[0]
    return chunks, optimizer


def known_to(config_class, **options):
    """Return a configuration of the options that this version of Megatron has."""
    names = {field.name for field in dataclasses.fields(config_class)}
    return config_class(**{name: value for name, value in options.items() if name in names})


OFFLOAD = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5, "pin_cpu_grads": False}


def make_optimizer(layout, config, chunks):
    deferred = layout.layer_wise and config.bf16  # main copies are made after the parameters are dealt out
    options = known_to(
        OptimizerConfig,
        optimizer="adam",
        lr=LEARNING_RATE,
        adam_eps=EPSILON,
        use_distributed_optimizer=layout.distributed_optimizer,
        overlap_param_gather=layout.overlap_gather,
        clip_grad=layout.clip,
        bf16=config.bf16 and not deferred,
        fp16=config.fp16,
        params_dtype=layout.dtype,
        loss_scale=layout.loss_scale,
        **(OFFLOAD if layout.offload else {}),
    )
    with host_memory.told_apart() if layout.offload else contextlib.nullcontext():
        optimizer = get_megatron_optimizer(options, chunks)
    if layout.layer_wise:
        from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
        from megatron.core.process_groups_config import ProcessGroupCollection

        options.bf16 = config.bf16
        groups = ProcessGroupCollection.use_mpu_process_groups()
        optimizer = LayerWiseDistributedOptimizer(optimizer.chained_optimizers, options, groups)
        optimizer.allgather_params = optimizer.broadcast_params  # gloo gathers equal sizes only
    return optimizer


def other_wrappers():
    """Return the classes beside DistributedDataParallel that this version of Megatron can wrap a model in."""
    names = ("FullyShardedDataParallel", "TorchFullyShardedDataParallel")
    return [wrapper for name in names if (wrapper := getattr(megatron.core.distributed, name, None)) is not None]


# ---------------------------------------------------------------------- weights that every layout agrees on

SPLIT_ROWS = (
    *("word_embeddings.weight", "output_layer.weight", "linear_qkv.weight", "linear_qkv.bias"),
    *("linear_fc1.weight", "linear_fc1.bias"),
)
SPLIT_COLUMNS = ("linear_proj.weight", "linear_fc2.weight")


def whole_name(path, layout, stage):
    """Return the name that the parameter has in a model that is not spread over ranks."""
    if path == "output_layer.weight" and layout.tied:
        return "embedding.word_embeddings.weight"
    parts = path.split(".")
    if "layers" in parts:
        at = parts.index("layers") + 1
        per_chunk = layout.layers // (layout.pp * layout.vpp)
        rank = parallel_state.get_pipeline_model_parallel_rank()
        parts[at] = str(int(parts[at]) + stage * (layout.layers // layout.vpp) + rank * per_chunk)
    if "local_experts" in parts:
        at = parts.index("local_experts") + 1
        per_rank = layout.experts // layout.ep
        parts[at] = str(int(parts[at]) + parallel_state.get_expert_model_parallel_rank() * per_rank)
    return ".".join(parts)


def part_of(whole, name, layout):
    """Return this rank's part of a tensor that has the shape of the whole parameter."""
    size, rank = layout.tp, parallel_state.get_tensor_model_parallel_rank()
    if "local_experts" in name:
        size = layout.etp or layout.tp
        rank = parallel_state.get_expert_tensor_parallel_rank()
    if layout.gated and "linear_fc1" in name:  # each half is split for itself
        return torch.cat([half.chunk(size, 0)[rank] for half in whole.chunk(2, 0)])
    if name.endswith(SPLIT_ROWS):
        return whole.chunk(size, 0)[rank]
    return whole.chunk(size, 1)[rank] if name.endswith(SPLIT_COLUMNS) else whole


def full_weight(name, layout):
    """Return the whole parameter in float64, exactly representable in the layout's dtype."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    values = torch.randn(shape_of(name, layout), generator=generator, dtype=torch.float64) * 0.2
    values += "layernorm.weight" in name
    return values.to(layout.dtype).double()


def shape_of(name, layout):
    if "embeddings" in name or name == "output_layer.weight":
        return (SEQUENCE, HIDDEN) if "position" in name else (VOCAB, HIDDEN)
    layer = name.rpartition(".")[0]
    if layer.endswith("layernorm"):
        return (HIDDEN,)
    if layer.endswith("router"):
        return (4, HIDDEN)
    outputs, inputs = {
        "linear_qkv": (3 * HIDDEN, HIDDEN),
        "linear_proj": (HIDDEN, HIDDEN),
        "linear_fc1": (FFN * (2 if layout.gated else 1), HIDDEN),
        "linear_fc2": (HIDDEN, FFN),
    }[layer.rpartition(".")[2]]
    return (outputs,) if name.endswith("bias") else (outputs, inputs)


def all_names(layout):
    """Return the names of all parameters of the whole model."""
    names = ["embedding.word_embeddings.weight", "embedding.position_embeddings.weight"]
    names += [] if layout.tied else ["output_layer.weight"]
    names += ["decoder.final_layernorm.weight", "decoder.final_layernorm.bias"]
    kinds = ["weight"] if layout.experts else ["weight", "bias"]
    for i in range(layout.layers):
        layer = f"decoder.layers.{i}"
        names += [f"{layer}.{x}.{k}" for x in ("input_layernorm", "pre_mlp_layernorm") for k in ("weight", "bias")]
        names += [f"{layer}.self_attention.{x}.{k}" for x in ("linear_qkv", "linear_proj") for k in kinds]
        places = [f"experts.local_experts.{e}." for e in range(layout.experts)] or [""]
        names += [f"{layer}.mlp.{p}{x}.{k}" for p in places for x in ("linear_fc1", "linear_fc2") for k in kinds]
        names += [f"{layer}.mlp.router.weight"] if layout.experts else []
    return names


def load(model, layout, stage):
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            name = whole_name(path, layout, stage)
            parameter.copy_(part_of(full_weight(name, layout), name, layout))


# ---------------------------------------------------------------------- data and steps


def tokens_of(step, replica, micro_batch):
    """Return tokens and labels of one micro batch of one data parallel replica, the whole sequence."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * replica + micro_batch)
    drawn = torch.randint(0, VOCAB, (BATCH, SEQUENCE + 1), generator=generator)
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


def loss_mask_of(step, replica, micro_batch):
    """Return which tokens count under per-token loss; a different number in each micro batch."""
    generator = torch.Generator().manual_seed(77 + 1000 * step + 10 * replica + micro_batch)
    return (torch.rand((BATCH, SEQUENCE), generator=generator) < 0.7).float()


def micro_batches(layout, step):
    replica, cp_rank = parallel_state.get_data_parallel_rank(), parallel_state.get_context_parallel_rank()
    for i in range(MICRO_BATCHES):
        tokens, labels = tokens_of(step, replica, i)
        mine = slice(cp_rank * SEQUENCE // layout.cp, (cp_rank + 1) * SEQUENCE // layout.cp)
        positions = torch.arange(SEQUENCE)[None].expand(BATCH, -1)
        mask = loss_mask_of(step, replica, i)
        yield tokens[:, mine], positions[:, mine], labels[:, mine], mask[:, mine]


CAUSAL = torch.triu(torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool), 1)


def train_step(layout, chunks, optimizer, step, damage=1.0):
    """Take one step; return what optimizer.step returned and the losses of this rank's micro batches."""

    def loss_of(mask, losses):
        if layout.per_token_loss:
            counted = (losses * mask * damage).sum()
            return counted, mask.sum().to(torch.int), {"loss": counted.detach()}
        share = losses.sum() * damage / (BATCH * SEQUENCE)  # Megatron multiplies by the context parallel size
        return share, {"loss": share.detach().clone()}

    def forward_step(data, model):
        tokens, positions, labels, mask = next(data)
        return model(tokens, positions, CAUSAL, labels=labels), lambda losses: loss_of(mask, losses)

    for chunk in chunks:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    batches = [iter(list(micro_batches(layout, step))) for _ in chunks]
    losses = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=batches if len(chunks) > 1 else batches[0],
        model=chunks if len(chunks) > 1 else chunks[0],
        num_microbatches=MICRO_BATCHES,
        seq_length=SEQUENCE,
        micro_batch_size=BATCH,
        forward_only=False,
    )
    return optimizer.step(), [float(found["loss"]) for found in losses]
