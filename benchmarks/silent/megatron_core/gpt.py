"""A small GPT in Megatron-Core on CPU ranks; whoever imports this has a CPU that passes for a GPU."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.silent import tasks
from benchmarks.silent.loop import Loop
from benchmarks.silent.megatron_core.layout import Layout
from benchmarks.silent.models import LENGTH, VOCABULARY
from examples import megatron_cpu

megatron_cpu.install()

from megatron.core import parallel_state  # noqa: E402  # after the CPU took a GPU's place
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402
from megatron.core.transformer.module import Float16Module  # noqa: E402
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules  # noqa: E402

from tests.frameworks.megatron.substitutes import GatheringAttention, SequenceLayerNorm  # noqa: E402

WIDTH, HEADS, FFN, STEPS = 32, 4, 64, 32
CAUSAL = torch.triu(torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool), 1)
Masked = tuple[Tensor, Tensor, Tensor]


def replica() -> int:
    """Return which of the model's copies this rank has a part of."""
    return int(parallel_state.get_data_parallel_rank())


def words(step: int, micro: int) -> Masked:
    """Return tokens, the next tokens, and that all of them count."""
    tokens, labels = tasks.words(step, micro, replica())
    return tokens.contiguous(), labels.contiguous(), torch.ones(labels.shape)


def uneven_words(step: int, micro: int) -> Masked:
    """Return tokens, the next tokens, and which count: all of the first copy's, few and harder ones of the others'."""
    tokens, labels, counts = words(step, micro)
    if replica():
        counts[:, 4:] = 0
        labels = labels.clone()
        labels[:, ::2] = (labels[:, ::2] + 7) % VOCABULARY
    return tokens, labels, counts


@dataclasses.dataclass(kw_only=True)
class MegatronLoop(Loop):
    """A training whose micro steps a schedule of Megatron runs; `loss_of` is given losses and what of them counts.

    Attributes:
        layout: How it is spread.
    """

    layout: Layout

    def run(self, monitor: Any, first: int, last: int) -> list[float]:
        """Train steps `first` to before `last`, and return the mean loss of all copies, on every rank."""
        losses = super().run(monitor, first, last)
        is_last = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
        totals = torch.tensor([losses, [float(is_last)] * len(losses)], dtype=torch.float64)
        dist.all_reduce(totals)
        return [float(loss) for loss in totals[0] / totals[1]]

    def _step(self, monitor: Any, step: int) -> float:
        self.before(step)
        for chunk in self.model:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        data = [self._batches(step) for _ in self.model]
        found = get_forward_backward_func()(
            forward_step_func=self._forward,
            data_iterator=data if len(data) > 1 else data[0],
            model=self.model if len(data) > 1 else self.model[0],
            num_microbatches=self.micro_steps,
            seq_length=LENGTH,
            micro_batch_size=tasks.BATCH,
            forward_only=False,
        )
        for each in found:
            monitor.record(loss=each["loss"])
        self.between(step)
        (self.update or self._update)(step)
        self.after(step)
        return sum(float(each["loss"]) for each in found) / self.micro_steps

    def _batches(self, step: int) -> Iterator[tuple[Tensor, ...]]:
        size, rank = self.layout.cp, parallel_state.get_context_parallel_rank()
        mine = slice(rank * LENGTH // size, (rank + 1) * LENGTH // size)
        for micro in range(self.micro_steps):
            tokens, labels, counts = self.batch(step, micro)
            positions = torch.arange(LENGTH)[None].expand_as(tokens)
            yield tuple(part[:, mine].contiguous() for part in (tokens, positions, labels, counts))

    def _forward(self, data: Iterator[tuple[Tensor, ...]], model: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
        tokens, positions, labels, counts = next(data)

        def loss_of(losses: Tensor) -> tuple[Any, ...]:
            total = self.loss_of(losses.float(), counts)
            shown = total.detach().clone()
            if not self.layout.per_token:  # Megatron multiplies by the context parallel size
                return total / self.layout.cp, {"loss": shown}
            number = counts.sum()
            return total * number, number.int(), {"loss": shown}

        return model(tokens, positions, CAUSAL, labels=labels), loss_of


def mean_of_counted(losses: Tensor, counts: Tensor) -> Tensor:
    """Return the mean loss of the tokens that count."""
    return (losses * counts).sum() / counts.sum()


def training(layout: Layout, *, batch: Callable[[int, int], Masked] = words, rate: float = 5e-3) -> MegatronLoop:
    """Return the training of a small GPT, with Adam."""
    logging.disable(logging.WARNING)
    parallel_state.initialize_model_parallel(
        layout.tp,
        layout.pp,
        layout.vpp if layout.vpp > 1 else None,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
    )
    torch.manual_seed(0)
    model_parallel_cuda_manual_seed(0)
    config = configured(layout)
    chunks = [chunk_of(layout, config, number) for number in range(layout.vpp)]
    optimizer = optimizer_of(layout, config, chunks, rate)
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    if layout.overlap:
        config.no_sync_func = chunks[0].no_sync if len(chunks) == 1 else [chunk.no_sync for chunk in chunks]
    return MegatronLoop(
        model=chunks,
        optimizer=optimizer,
        batch=batch,
        loss_of=mean_of_counted,
        steps=STEPS,
        micro_steps=layout.micro_batches,
        layout=layout,
    )


def configured(layout: Layout) -> TransformerConfig:
    """Return Megatron's own description of the model."""
    dtype = torch.bfloat16 if layout.bf16 else torch.float32
    options: dict[str, Any] = {}
    if layout.experts:
        options |= {
            "num_moe_experts": layout.experts,
            "moe_router_topk": 2,
            "moe_ffn_hidden_size": FFN,
            "moe_token_dispatcher_type": "alltoall",
            "moe_aux_loss_coeff": layout.balance,
            "add_bias_linear": False,
        }
    if layout.recompute:
        options |= {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": layout.recompute,
        }
    if layout.stages and len(set(layout.stages)) > 1:
        options["num_layers_in_first_pipeline_stage"] = layout.stages[0]
    if layout.sinks:
        options["softmax_type"] = "learnable"
    return TransformerConfig(
        num_layers=sum(layout.stages) or layout.layers,
        hidden_size=WIDTH,
        num_attention_heads=HEADS,
        ffn_hidden_size=FFN,
        init_method_std=0.1,
        use_cpu_initialization=True,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=layout.bf16,
        attention_softmax_in_fp32=layout.bf16,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        sequence_parallel=layout.sp,
        attention_dropout=0.0,
        hidden_dropout=layout.dropout,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        calculate_per_token_loss=layout.per_token,
        qk_layernorm=layout.qk_norm,
        **options,
    )


def chunk_of(layout: Layout, config: TransformerConfig, number: int) -> DistributedDataParallel:
    """Return one of this stage's parts of the model."""
    spec = get_gpt_layer_local_spec(layout.experts or None, moe_grouped_gemm=False, qk_layernorm=layout.qk_norm)
    parts = spec.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = SequenceLayerNorm
    attention = parts.self_attention.submodules
    if layout.qk_norm:
        attention.q_layernorm = attention.k_layernorm = SequenceLayerNorm
    if layout.cp > 1:
        attention.core_attention = GatheringAttention
    rank = parallel_state.get_pipeline_model_parallel_rank()
    layers = layout.stages[rank] if layout.stages else layout.layers // layout.chunks
    stage: dict[str, Any] = {"vp_stage": number} if layout.vpp > 1 else {}
    model: Any = GPTModel(
        config=config,
        transformer_layer_spec=TransformerBlockSubmodules([spec] * layers, layer_norm=SequenceLayerNorm),
        vocab_size=VOCABULARY,
        max_sequence_length=LENGTH,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, **stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, **stage),
        share_embeddings_and_output_weights=layout.tied,
        position_embedding_type="rope" if layout.rope else "learned_absolute",
        **stage,
    )
    settings = DistributedDataParallelConfig(
        use_distributed_optimizer=layout.sharded,
        overlap_grad_reduce=layout.overlap,
        overlap_param_gather=layout.gather_early,
        bucket_size=layout.bucket,
        grad_reduce_in_fp32=layout.bf16,
    )
    wrapped = Float16Module(config, model) if layout.bf16 else model
    return DistributedDataParallel(config, settings, wrapped, disable_bucketing=number > 0)


def optimizer_of(layout: Layout, config: TransformerConfig, chunks: list[Any], rate: float) -> Any:
    """Return Megatron's Adam of these parts of the model."""
    settings = OptimizerConfig(
        optimizer="adam",
        lr=rate,
        weight_decay=0.01,
        clip_grad=layout.clip,
        bf16=layout.bf16,
        params_dtype=config.params_dtype,
        use_distributed_optimizer=layout.sharded,
        overlap_param_gather=layout.gather_early,
    )
    return get_megatron_optimizer(settings, chunks)
