"""Saves the models of `every_way_models` in every way there is, by the frameworks themselves, on 1 to 4 ranks.

The weights of Megatron's models are those of the ones of Hugging Face; that both then compute the same is checked.
Each number of ranks is a job of its own, whose processes are forked from those of the largest: they import once.
"""

import os
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.utils import safe_set_full_optimizer_state
from safetensors.torch import save_file
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

from tests.analysis.checkpoint import every_way_megatron
from tests.analysis.checkpoint.every_way_models import MOMENTS, TOKENS, hugging_face, state_of
from tests.analysis.checkpoint.formats import sharded_worker
from tests.frameworks.deepspeed import engines

KINDS = ("dense", "tied", "experts")
TENSOR_PARALLEL = {4: {"dense": (1, 2, 3)}}
STAGES: dict[int, dict[str, tuple[int, ...]]] = {
    2: {"dense": (0, 2, 1, 3), "tied": (1, 3), "experts": (1, 3)},
    4: {"dense": (1, 3)},
}
MESHES: dict[int, dict[str, tuple[int, ...]]] = {1: {"fsdp2_1": (1,)}, 2: {"fsdp2": (2,)}, 4: {"hsdp": (2, 2)}}


def trained_by_nothing(model):
    """Return an optimizer whose steps leave the weights as they are."""
    return torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)


@torch.no_grad()
def set_moments(kind, model, optimizer):
    states = state_of(kind)
    for name, parameter in model.named_parameters():
        for moment in MOMENTS:
            value = states[moment][name]
            if hasattr(parameter, "placements"):
                value = distribute_tensor(value, parameter.device_mesh, parameter.placements)
            optimizer.state[parameter][moment].copy_(value)


def save_by_one(kind, folder):
    model = hugging_face(kind)
    optimizer = trained_by_nothing(model)
    model(TOKENS, labels=TOKENS).loss.backward()
    optimizer.step()
    set_moments(kind, model, optimizer)
    weights = model.state_dict()
    torch.save({"model": weights, "optimizer": optimizer.state_dict(), "step": 1}, folder / "torch.pt")
    save_file({name: weight.clone() for name, weight in weights.items()}, folder / "plain.safetensors")
    model.save_pretrained(folder / "hf", max_shard_size="8KB")


def save_by_fsdp(kind, folder, sizes):
    model = hugging_face(kind)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicas", "shards")[-len(sizes) :])
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = trained_by_nothing(model)
    model(TOKENS, labels=TOKENS).loss.backward()
    optimizer.step()
    set_moments(kind, model, optimizer)
    weights, state = get_state_dict(model, optimizer)
    state_dict_saver.save({"model": weights, "optim": state}, checkpoint_id=folder)


def save_by_deepspeed(kind, folder, stage, *, tp=1):
    model = hugging_face(kind)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 8},
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 1_000_000,
    }
    if tp > 1:
        config["tensor_parallel"] = {"autotp_size": tp}
    engine = engines.deepspeed.initialize(model=model, optimizer=trained_by_nothing(model), config=config)[0]
    engine.backward(engine(TOKENS, labels=TOKENS).loss)
    engines.step_engine(engine)
    if stage:
        states = state_of(kind)
        for name, parameter in model.named_parameters():
            for moment in MOMENTS:
                safe_set_full_optimizer_state(parameter, own_part(states[moment][name], parameter, tp), moment)
    else:
        set_moments(kind, model, engine.optimizer)
    state = {"universal_checkpoint_info": {"universal_checkpoint_version": 0.2}}
    engine.save_checkpoint(str(folder), tag="global_step1", client_state=state if tp == 1 else {})


def own_part(whole, parameter, tp):
    """Return what this rank holds of a tensor, cut where its parameter is smaller."""
    shape = getattr(parameter, "ds_shape", parameter.shape)
    odd = [dim for dim, size in enumerate(shape) if size != whole.shape[dim]]
    return whole.chunk(tp, odd[0])[dist.get_rank() % tp].contiguous() if odd else whole


def save_without_megatron(kind, folder, world_size):
    folder.mkdir(exist_ok=True)
    if world_size == 1:
        save_by_one(kind, folder)
    for name, sizes in MESHES.get(world_size, {}).items():
        save_by_fsdp(kind, folder / name, sizes)
    end = "" if world_size == 2 else f"_{world_size}"
    stages = STAGES.get(world_size, {}).get(kind, ())
    for stage in stages:
        save_by_deepspeed(kind, folder / f"zero{stage}{end}", stage)
    split = TENSOR_PARALLEL.get(world_size, {}).get(kind, ())
    for stage in split:
        save_by_deepspeed(kind, folder / f"zero{stage}_tp", stage, tp=2)
    if dist.get_rank() == 0:
        for name in [*(f"{stage}{end}" for stage in stages[-2:]), *(f"{stage}_tp" for stage in split if stage != 2)]:
            sharded_worker.convert(folder / f"zero{name}", folder / f"universal{name}")
    dist.barrier()


def save(output, world_size):
    engines.start()
    for one in (save_without_megatron, every_way_megatron.save):  # which lets go of the groups of others
        for kind in KINDS:
            one(kind, output / kind, world_size)
    dist.barrier()


def main(output, ports):
    rank = int(os.environ["RANK"])
    for world_size, port in enumerate(ports, start=1):
        if rank >= world_size:
            continue
        child = os.fork()
        if child:
            if os.waitpid(child, 0)[1]:
                sys.exit(f"no checkpoints of {world_size} ranks")
            continue
        sizes = {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size), "MASTER_PORT": port}
        os.environ.update(sizes)
        status = 1
        try:
            save(output, world_size)
            status = 0
        finally:  # nothing of the process it was forked from is to run here
            if status:
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(Path(sys.argv[1]), sys.argv[2:])
