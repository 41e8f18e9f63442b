"""Saves a small model by DeepSpeed at every stage, and by FSDP2, with what the vendors' loaders make of it."""

import argparse
import contextlib
import io
import os
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from deepspeed.checkpoint import ds_to_universal
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.frameworks.deepspeed import engines


def save_by_deepspeed(folder, stage):
    engine = engines.make_engine(engines.Case(stage, "bf16" if stage else "fp32"))
    loss = engines.loss_of(engine, engines.tokens_of(0, 0, dist.get_rank()))
    engine.backward(loss)
    engines.step_engine(engine)
    engine.save_checkpoint(str(folder), client_state={"universal_checkpoint_info": {}})
    engine.save_checkpoint(str(folder.with_name(f"{folder.name}_bare")), exclude_frozen_parameters=True)
    weights = engines.whole_weights(engine)
    if dist.get_rank() == 0:
        torch.save(weights, folder / "weights.truth")
        if stage:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                found = get_fp32_state_dict_from_zero_checkpoint(str(folder))
            torch.save(found, folder / "main.truth")


def convert(folder, output):
    """Have DeepSpeed make a universal checkpoint."""
    options = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False, "strict": True}
    places = {"input_folder": str(next(folder.glob("global_step*"))), "output_folder": str(output)}
    ds_to_universal.main(argparse.Namespace(**places, **options, inject_missing_state=False))


def save_by_fsdp(folder):
    mesh = init_device_mesh("cpu", (2,))
    model = engines.make_model()
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    engines.loss_of(model, engines.tokens_of(0, 0, dist.get_rank())).backward()
    optimizer.step()
    weights, state = get_state_dict(model, optimizer)
    state_dict_saver.save({"model": weights, "optim": state}, checkpoint_id=folder)


def main(output):
    engines.start()
    for stage in range(4):
        save_by_deepspeed(output / f"zero{stage}", stage)
    for stage in (1, 3):
        if dist.get_rank() == 0:
            convert(output / f"zero{stage}", output / f"universal{stage}")
    save_by_fsdp(output / "fsdp")
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(Path(sys.argv[1]))
