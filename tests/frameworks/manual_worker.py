"""A Megatron or a DeepSpeed script that watches its training with the calls that msprobe's manual gives for it."""

import os
import sys

import torch.distributed as dist

from trainermon import TrainerMon

STEPS, START = 3, 5


def train_megatron(config):
    from megatron.core import parallel_state

    from tests.frameworks.megatron import gpt

    dist.init_process_group("gloo")
    layout = gpt.Layout(distributed_optimizer=True)
    gpt.initialise(layout)
    chunks, optimizer = gpt.build(layout)
    monitor = TrainerMon(config_file_path=config, params_have_main_grad=True)
    monitor.set_monitor(
        chunks,
        grad_acc_steps=gpt.MICRO_BATCHES,
        optimizer=optimizer,
        dp_group=parallel_state.get_data_parallel_group(),
        tp_group=parallel_state.get_tensor_model_parallel_group(),
        start_iteration=START,
    )
    for step in range(STEPS):
        gpt.train_step(layout, chunks, optimizer, step)
    return monitor


def train_deepspeed(config):
    from tests.frameworks.deepspeed.engines import Case, loss_of, make_engine, start, step_engine, tokens_of

    start()
    engine = make_engine(Case(1, "bf16", gas=2))
    monitor = TrainerMon(config_file_path=config, params_have_main_grad=False)
    monitor.set_monitor(
        engine, grad_acc_steps=2, optimizer=engine.optimizer, dp_group=None, tp_group=None, start_iteration=START
    )
    for step in range(STEPS):
        for micro_step in range(2):
            engine.backward(loss_of(engine, tokens_of(step, micro_step, 0)))
            step_engine(engine)
    return monitor


def main():
    train = {"megatron": train_megatron, "deepspeed": train_deepspeed}[sys.argv[1]]
    train(sys.argv[2]).close()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
