"""Saves a small model by DeepSpeed's pipeline, with tensor parallelism by hand, and what it consists of."""

import os
import sys
import warnings
import zlib
from pathlib import Path

import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeDataParallelTopology, PipeModelDataParallelTopology
from deepspeed.utils import safe_set_full_optimizer_state
from torch import nn

from tests.analysis.checkpoint.formats import sharded_worker
from tests.frameworks.deepspeed import engines

VOCABULARY, HIDDEN, FFN, BLOCKS = 12, 8, 16, 3
KINDS = ("weight", "exp_avg", "exp_avg_sq")
SHAPES = {"tied_modules.embed.weight": (VOCABULARY, HIDDEN), "4.weight": (HIDDEN,), "4.bias": (HIDDEN,)}
for block in range(1, 1 + BLOCKS):
    SHAPES |= {f"{block}.norm.weight": (HIDDEN,), f"{block}.norm.bias": (HIDDEN,)}
    SHAPES |= {f"{block}.up.weight": (2 * FFN, HIDDEN), f"{block}.up.bias": (2 * FFN,)}
    SHAPES |= {f"{block}.down.weight": (HIDDEN, FFN), f"{block}.down.bias": (HIDDEN,)}
INFO = {  # as Megatron-DeepSpeed describes its models
    "universal_checkpoint_version": 0.2,
    "tp_replicated_parameter_patterns": [r"\d+\.norm\..*", r"\d+\.down\.bias", "tied_modules.*", r"4\..*"],
    "parameter_with_row_parallelism_patterns": [r"\d+\.down\.weight"],
    "parameter_with_2_sub_params_cat_dim_0": [r"\d+\.up\.weight", r"\d+\.up\.bias"],
    "pipeline_replicated_parameter_patterns": [r"tied_modules\.embed\.weight"],
}
CASES = {"pp": (1, 1), "pp_zero0": (1, 0), "pp_tp": (2, 1)}


class Embedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(VOCABULARY, HIDDEN))

    def forward(self, tokens):
        return nn.functional.embedding(tokens, self.weight)


class Block(nn.Module):
    def __init__(self, tp):
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up = nn.Linear(HIDDEN, 2 * FFN // tp)
        self.down = nn.Linear(FFN // tp, HIDDEN)

    def forward(self, values):
        gate, up = self.up(self.norm(values)).chunk(2, -1)
        return values + self.down(torch.relu(gate) * up)


def logits(embedding, values):
    return values @ embedding.weight.t()


def loss_of(found, labels):
    return nn.functional.cross_entropy(found.view(-1, VOCABULARY), labels.view(-1))


def whole(kind, name):
    """Return what a checkpoint should hold."""
    values = torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(zlib.crc32(f"{kind} {name}".encode())))
    return values.square() if kind == "exp_avg_sq" else values


def own_part(kind, name, tp, rank):
    value = whole(kind, name)
    if ".up." in name:
        return torch.cat([half.chunk(tp)[rank] for half in value.chunk(2)])
    return value.chunk(tp, 1)[rank].contiguous() if name.endswith("down.weight") else value


def batches():
    while True:
        tokens = torch.arange(6)[None]
        yield tokens, (tokens + 1) % VOCABULARY


def save(folder, tp, stage):
    blocks = [LayerSpec(Block, tp) for _ in range(BLOCKS)]
    tied = [TiedLayerSpec("embed", Embedding), TiedLayerSpec("embed", Embedding, forward_fn=logits)]
    replicas = dist.get_world_size() // 2 // tp
    topology = PipeModelDataParallelTopology(2, tp, replicas) if tp > 1 else PipeDataParallelTopology(2, replicas)
    layers = [tied[0], *blocks, LayerSpec(nn.LayerNorm, HIDDEN), tied[1]]
    model = PipelineModule(layers, topology=topology, loss_fn=loss_of, partition_method="uniform")
    rank = model.mpu().get_slice_parallel_rank()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(own_part("weight", name, tp, rank))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": stage},
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 1_000_000,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    engine = engines.deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    engine.train_batch(batches())
    for name, parameter in model.named_parameters() if stage else ():
        for kind in KINDS[1:]:
            safe_set_full_optimizer_state(parameter, own_part(kind, name, tp, rank), kind)
    engine.save_checkpoint(str(folder), tag="global_step1", client_state={"universal_checkpoint_info": INFO})
    dist.barrier()


def main(output):
    engines.start()
    for name, (tp, stage) in CASES.items():
        save(output / name, tp, stage)
    if dist.get_rank() == 0:
        torch.save({kind: {name: whole(kind, name) for name in SHAPES} for kind in KINDS}, output / "truth.pt")
        for name in ("pp", "pp_tp"):
            sharded_worker.convert(output / name, output / f"{name}_universal")
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(Path(sys.argv[1]))
