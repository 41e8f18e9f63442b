"""Weights of a gated layer of Megatron-Core under TP 1 and 2, and of a model before and under ZeRO 3, recorded."""

import os
import sys

import torch
from torch import nn

os.environ["DS_ACCELERATOR"] = "cpu"


def record(model, output, batch):
    """Record the first forward."""
    from trainermon import EnvironmentRecorder

    with EnvironmentRecorder(model, output=output, draws=False):
        model(batch)
    torch.distributed.barrier()


def gated_layer(tp):
    """Return Megatron's gated layer, whose whole weights are the same whatever `tp` is."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.mlp import MLP, MLPSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tp)
    torch.manual_seed(5)
    config = TransformerConfig(
        num_layers=1, hidden_size=8, num_attention_heads=2, ffn_hidden_size=12, gated_linear_unit=True,
        use_cpu_initialization=True, tensor_model_parallel_size=tp, activation_func=nn.functional.silu,
    )  # fmt: skip
    return MLP(config, MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear))


def main(folder):
    """Record all; run by each of two ranks."""
    import deepspeed

    torch.distributed.init_process_group("gloo")
    for tp in (1, 2):
        record(gated_layer(tp), f"{folder}/tp{tp}.zip", torch.ones(2, 1, 8))
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3))
    record(model, f"{folder}/whole.zip", torch.ones(1, 7))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 3},
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    record(engine, f"{folder}/zero3.zip", torch.ones(1, 7))


if __name__ == "__main__":
    main(sys.argv[1])
