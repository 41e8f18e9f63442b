"""Saves small Megatron GPTs, whose weights are known, in both layouts of files."""

import argparse
import os
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state

from tests.frameworks.megatron import gpt

LAYOUTS = {
    "tp": gpt.Layout(tp=2, tied=False),
    "pp": gpt.Layout(pp=2, layers=4),
    "vpp": gpt.Layout(pp=2, vpp=2, layers=4),
    "ep": gpt.Layout(ep=2, experts=4),
    "bf16": gpt.Layout(pp=2, distributed_optimizer=True, dtype=torch.bfloat16),
    "bf16_dp": gpt.Layout(distributed_optimizer=True, dtype=torch.bfloat16, overlap=True, bucket=1024),
    "bf16_tp": gpt.Layout(tp=2, dtype=torch.bfloat16),
}


def arguments(layout):
    return argparse.Namespace(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        expert_model_parallel_size=layout.ep,
        num_experts=layout.experts or None,
        swiglu=False,
        untie_embeddings_and_output_weights=not layout.tied,
        overlap_grad_reduce=layout.overlap,
        ddp_bucket_size=layout.bucket,
        data_parallel_size=dist.get_world_size() // (layout.tp * layout.pp),
    )


def save_by_rank(folder, layout, chunks, optimizer=None):
    """Save as Megatron-LM's `get_checkpoint_name` says."""
    name = f"mp_rank_{parallel_state.get_tensor_model_parallel_rank():02d}"
    name += f"_{parallel_state.get_pipeline_model_parallel_rank():03d}" if layout.pp > 1 else ""
    name += f"_{parallel_state.get_expert_model_parallel_rank():03d}" if layout.ep > 1 else ""
    keys = [f"model{number}" for number in range(len(chunks))] if len(chunks) > 1 else ["model"]
    models = {key: chunk.module.state_dict_for_save_checkpoint() for key, chunk in zip(keys, chunks, strict=True)}
    place = folder / "iter_0000005" / name
    place.mkdir(parents=True, exist_ok=True)
    (folder / "latest_checkpointed_iteration.txt").write_text("5")
    state = {"args": arguments(layout), "iteration": 5, **models}
    if optimizer is not None:
        state["optimizer"] = optimizer.state_dict()
        if layout.distributed_optimizer:
            optimizer.save_parameter_state(str(place / "distrib_optim.pt"))
    if parallel_state.get_data_parallel_rank() == 0 or layout.ep > 1:
        torch.save(state, place / "model_optim_rng.pt")


def save_distributed(folder, layout, chunks, optimizer, sharding):
    folder.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    model = chunks[0].module.sharded_state_dict()
    state = {"model": model, "iteration": 3, "args": arguments(layout)}
    if sharding:
        metadata = {"distrib_optim_sharding_type": sharding} if sharding != "plain" else {}
        state["optimizer"] = optimizer.sharded_state_dict(model, metadata=metadata)
    dist_checkpointing.save(state, str(folder))


def main(output):
    dist.init_process_group("gloo")
    for name, layout in LAYOUTS.items():
        gpt.initialise(layout)
        chunks, optimizer = gpt.build(layout)
        if name.startswith("bf16"):
            gpt.train_step(layout, chunks, optimizer, 0)
            save_by_rank(output / f"{name}_ranks", layout, chunks, optimizer)
            for sharding in ("fully_reshardable", "dp_reshardable") if layout.distributed_optimizer else ("plain",):
                save_distributed(output / f"{name}_{sharding}", layout, chunks, optimizer, sharding)
            continue
        save_by_rank(output / f"{name}_ranks", layout, chunks)
        if layout.vpp == 1:
            save_distributed(output / f"{name}_dist", layout, chunks, optimizer, "")
        if dist.get_rank() == 0:
            truth = {name: gpt.full_weight(name, layout).to(layout.dtype) for name in gpt.all_names(layout)}
            torch.save(truth, output / f"{name}_truth.pt")
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(Path(sys.argv[1]))
