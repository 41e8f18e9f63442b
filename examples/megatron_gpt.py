"""Train a small GPT with Megatron-Core on Python's own standard library, byte by byte, and watch it.

    torchrun --nproc-per-node 2 examples/megatron_gpt.py                              # data parallel
    torchrun --nproc-per-node 2 examples/megatron_gpt.py --tensor-parallel 2
    torchrun --nproc-per-node 2 examples/megatron_gpt.py --pipeline-parallel 2 --bf16
    torchrun --nproc-per-node 2 examples/megatron_gpt.py --distributed-optimizer --overlap

Runs on GPUs with NCCL, or without any on the CPU with gloo. The three lines that attach the monitor are marked.
"""

from __future__ import annotations

import argparse
import os
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

if not torch.cuda.is_available():
    import megatron_cpu  # beside this file

    megatron_cpu.install()

from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module

from trainermon import TrainerMon  # line 1

VOCABULARY = 256

Batch = tuple[Tensor, Tensor]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--micro-batches", type=int, default=2)
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--pipeline-parallel", type=int, default=1)
    parser.add_argument("--distributed-optimizer", action="store_true")
    parser.add_argument("--overlap", action="store_true")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--config", default=str(Path(__file__).with_name("monitor_config.json")))
    return parser.parse_args()


def make_config(arguments: argparse.Namespace) -> TransformerConfig:
    dtype = torch.bfloat16 if arguments.bf16 else torch.float32
    return TransformerConfig(
        num_layers=arguments.layers,
        hidden_size=arguments.width,
        num_attention_heads=arguments.heads,
        tensor_model_parallel_size=arguments.tensor_parallel,
        pipeline_model_parallel_size=arguments.pipeline_parallel,
        bf16=arguments.bf16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        use_cpu_initialization=not torch.cuda.is_available(),
        masked_softmax_fusion=False,
    )


def make_model(arguments: argparse.Namespace, config: TransformerConfig) -> nn.Module:
    model: nn.Module = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=VOCABULARY,
        max_sequence_length=arguments.context,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=True,
    )
    if torch.cuda.is_available():
        model.cuda()
    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=arguments.distributed_optimizer,
        overlap_grad_reduce=arguments.overlap,
        grad_reduce_in_fp32=arguments.bf16,
    )
    return DistributedDataParallel(config, ddp_config, Float16Module(config, model) if arguments.bf16 else model)


def make_optimizer(arguments: argparse.Namespace, config: TransformerConfig, model: nn.Module) -> Any:
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=1e-3,
            clip_grad=1.0,
            bf16=arguments.bf16,
            params_dtype=config.params_dtype,
            use_distributed_optimizer=arguments.distributed_optimizer,
        ),
        [model],
    )
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    config.no_sync_func = model.no_sync if arguments.overlap else None
    return optimizer


def batches(*, batch: int, context: int, replica: int) -> Iterator[Batch]:
    """Yield (tokens, targets), int64 `[batch, context]` each, different on every data parallel rank."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)[: 4 << 20]), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(1000 + replica)
    while True:
        starts = torch.randint(len(text) - context - 1, (batch,), generator=generator)
        rows = torch.stack([text[start : start + context + 1].long() for start in starts])
        yield rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def forward_step(data: Iterator[Batch], model: nn.Module) -> tuple[Tensor, Any]:
    """Run one micro batch, as Megatron's schedules ask for it: return the output and how to make a loss of it."""
    device = torch.cuda.current_device()
    tokens, targets = (tensor.to(device) for tensor in next(data))
    length = tokens.shape[1]
    positions = torch.arange(length, device=device)[None].expand_as(tokens)
    future = torch.ones(1, 1, length, length, device=device).triu(1).bool()

    def loss_of(losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        loss = losses.float().mean()
        return loss, {"loss": loss.detach().clone()}

    return model(tokens, positions, future, labels=targets), loss_of


def start(arguments: argparse.Namespace) -> None:
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if on_gpu else "gloo")
    parallel_state.initialize_model_parallel(arguments.tensor_parallel, arguments.pipeline_parallel)
    torch.manual_seed(0)
    model_parallel_cuda_manual_seed(0)


def main() -> None:
    arguments = parse_arguments()
    start(arguments)
    config = make_config(arguments)
    model = make_model(arguments, config)
    optimizer = make_optimizer(arguments, config, model)

    monitor = TrainerMon(arguments.config)  # line 2
    monitor.set_monitor(model, optimizer, grad_acc_steps=arguments.micro_batches)  # line 3

    replica = parallel_state.get_data_parallel_rank()
    data = batches(batch=arguments.batch, context=arguments.context, replica=replica)
    run_step = get_forward_backward_func()
    begin = time.perf_counter()
    for step in range(arguments.steps):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        losses = run_step(
            forward_step_func=forward_step,
            data_iterator=data,
            model=model,
            num_microbatches=arguments.micro_batches,
            seq_length=arguments.context,
            micro_batch_size=arguments.batch,
            forward_only=False,
        )
        for found in losses:  # of each micro batch, on the last pipeline stage
            monitor.record(loss=found["loss"])
        _, norm, _ = optimizer.step()
        if losses and replica == 0 and parallel_state.get_tensor_model_parallel_rank() == 0:
            mean = torch.stack([found["loss"] for found in losses]).mean().item()
            pace = (step + 1) / (time.perf_counter() - begin)
            print(f"step {step + 1:3}/{arguments.steps}   loss {mean:7.4f}   norm {norm:.6f}   {pace:.1f} steps/s")
    monitor.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
