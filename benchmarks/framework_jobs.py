"""A GPT of about 20 M parameters in a real framework on two gloo ranks, bare or watched; a job for `lockstep`.

python benchmarks/framework_jobs.py megatron-dp-distributed-bf16 activations trainermon FOLDER

The monitor is one of `none`, `trainermon`, `mindstudio` and `limit`, which only writes what its collectives are.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.bench_step import GPT, LEVELS, VOCABULARY
from benchmarks.bench_step_limit import reading_rate
from benchmarks.lockstep import serve
from trainermon.monitor.taps.operands import METHODS, CollectiveOp, read_by, written_by

COLLECTIVES = {"cc_distribution": {"enable": True, "cc_codeline": [], "cc_pre_hook": True, "cc_log_only": False}}
ALL_LEVELS = LEVELS | {
    "collectives": LEVELS["activations"] | COLLECTIVES,
    "collectives-alone": COLLECTIVES | {"wg_distribution": False},
}
LAYERS, WIDTH, HEADS, LENGTH, BATCH = 8, 384, 6, 128, 2


class Run(NamedTuple):
    """What a monitor is given, and a step."""

    model: Any
    optimizer: Any
    step: Callable[[], object]
    groups: dict[str, Any]


def main() -> None:
    workload, level, monitor, folder = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    early = make_mindstudio(level, Path(folder) / str(rank)) if monitor == "mindstudio" else None
    kind, *options = workload.split("-")
    run = {"megatron": make_megatron, "deepspeed": make_deepspeed}[kind](options)
    for _ in range(3):  # until the heap has its size
        run.step()
    watcher = None
    if early is not None:
        early.set_monitor(run.model, grad_acc_steps=1, optimizer=run.optimizer, **run.groups)
    elif monitor == "trainermon":
        watcher = watch(level, Path(folder), run)
    elif monitor == "limit":
        write_limit(Path(folder) / str(rank), run.step)
    serve(run.step)
    if watcher is not None:
        watcher.close()
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


def watch(level: str, folder: Path, run: Run) -> Any:
    from trainermon import TrainerMon

    config = ALL_LEVELS[level] | {"output_dir": str(folder), "spool_dir": str(folder / "spool")}
    watcher = TrainerMon(config | {"agent": {"start": False}})
    watcher.set_monitor(run.model, run.optimizer, **run.groups)
    return watcher


def write_limit(path: Path, step: Callable[[], object]) -> None:
    """Write to `path` how many calls the collectives of a step are, how many bytes they read and write, and how fast.

    What stays as it was read is not counted twice: the result in a group of one, and at the root of a broadcast.
    """
    counts = {"calls": 0, "bytes": 0}

    def counted(method: Callable[..., Any], op: CollectiveOp) -> Callable[..., Any]:
        def call(group: Any, *arguments: Any, **named: Any) -> Any:
            sides = (side(op, (group, *arguments), named, group.rank()) for side in (read_by, written_by))
            read, written = (sum(tensor.nbytes for tensor in tensors) for tensors in sides)
            is_same = op.reads == op.writes and (group.size() == 1 or op.name == "broadcast")
            counts["calls"] += 1
            counts["bytes"] += max(read, written) if is_same else read + written
            return method(group, *arguments, **named)

        return call

    methods = {name: getattr(dist.ProcessGroup, name) for name in METHODS if hasattr(dist.ProcessGroup, name)}
    for name, method in methods.items():
        setattr(dist.ProcessGroup, name, counted(method, METHODS[name]))
    step()
    for name, method in methods.items():
        setattr(dist.ProcessGroup, name, method)
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(counts | {"bytes_per_ms": reading_rate()}))


def make_mindstudio(level: str, folder: Path) -> Any:
    """Make the other monitor before the framework, which it asks for."""
    folder.mkdir(parents=True)
    os.environ["MONITOR_OUTPUT_DIR"] = str(folder / "output")
    from msprobe.pytorch import TrainerMon

    path = folder / "config.json"
    path.write_text(
        json.dumps(ALL_LEVELS[level] | {"targets": {}, "format": "csv", "ops": ["min", "max", "mean", "norm", "nans"]})
    )
    return TrainerMon(str(path), params_have_main_grad=True)


def make_megatron(options: list[str]) -> Run:
    from examples import megatron_cpu

    megatron_cpu.install()
    from megatron.core import parallel_state
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    tp = 2 if "tp" in options else 1
    half, sharded = "bf16" in options, "distributed" in options
    dtype = torch.bfloat16 if half else torch.float32
    parallel_state.initialize_model_parallel(tp)
    model_parallel_cuda_manual_seed(123)
    model = make_megatron_model(tp, dtype, sharded=sharded)
    settings = {"optimizer": "adam", "lr": 1e-4, "clip_grad": 1.0, "bf16": half, "params_dtype": dtype}
    optimizer = get_megatron_optimizer(OptimizerConfig(use_distributed_optimizer=sharded, **settings), [model])
    tokens = torch.randint(8192, (BATCH, LENGTH + 1))
    positions = torch.arange(LENGTH)[None].expand(BATCH, -1)
    mask = torch.triu(torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool), 1)

    def step() -> None:
        model.zero_grad_buffer()
        optimizer.zero_grad()
        model(tokens[:, :-1].contiguous(), positions, mask, labels=tokens[:, 1:].contiguous()).mean().backward()
        finalize_model_grads([model])
        optimizer.step()

    groups = {
        "tp_group": parallel_state.get_tensor_model_parallel_group(),
        "dp_group": parallel_state.get_data_parallel_group(),
    }
    return Run([model], optimizer, step, groups)


def make_megatron_model(tp: int, dtype: torch.dtype, *, sharded: bool) -> Any:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.module import Float16Module

    torch.manual_seed(1)
    half = dtype is torch.bfloat16
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=WIDTH,
        num_attention_heads=HEADS,
        use_cpu_initialization=True,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=half,
        tensor_model_parallel_size=tp,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        gradient_accumulation_fusion=False,
    )
    model: nn.Module = GPTModel(config, get_gpt_layer_local_spec(), vocab_size=8192, max_sequence_length=LENGTH)
    ddp_config = DistributedDataParallelConfig(use_distributed_optimizer=sharded, grad_reduce_in_fp32=half)
    return DistributedDataParallel(config, ddp_config, Float16Module(config, model) if half else model)


def make_deepspeed(options: list[str]) -> Run:
    import deepspeed
    import deepspeed.comm.torch

    deepspeed.comm.torch.build_shm_op = lambda: None  # gloo for all: its own is compiled when it is first used
    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    engine, _, _, _ = deepspeed.initialize(
        model=GPT(),
        config={
            "train_micro_batch_size_per_gpu": BATCH,
            "gradient_clipping": 1.0,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
            "zero_optimization": {"stage": int(options[0])},
        },
    )
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1))

    def step() -> None:
        logits = engine(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        engine.backward(loss)
        engine.step()

    return Run(engine, engine.optimizer, step, {})


if __name__ == "__main__":
    main()
