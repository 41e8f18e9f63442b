"""Asks for the set-up of engines in ways that cannot be answered, on one rank, and prints what it is told."""

import os
import sys

import deepspeed
import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedOptimizerWrapper
from deepspeed.utils import set_z3_leaf_modules

from tests.frameworks.deepspeed.engines import Case, Model, loss_of, make_engine, start, step_engine, tokens_of
from tests.frameworks.deepspeed.watch import Watch
from trainermon.core.errors import AttachError
from trainermon.core.values import Coordinates
from trainermon.monitor.frameworks import detect


def ask(what, model, optimizer):
    try:
        print(f"{what}: {detect([model], optimizer, Coordinates()).framework}")
    except AttachError as error:
        print(f"{what}: {error}")


def show_muon():
    """Print which gradients there are where DeepSpeed puts Muon's update into the place of some."""
    model = Model()
    for parameter in model.parameters():
        vars(parameter)["use_muon"] = parameter.dim() > 1
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 1, "reduce_bucket_size": 4096},
        "bf16": {"enabled": True},
        "optimizer": {"type": "Muon", "params": {"lr": 1e-3, "torch_adam": True}},
    }
    trained = [p for p in model.parameters() if p.requires_grad]
    engine = deepspeed.initialize(model=model, model_parameters=trained, config=config)[0]
    watch = Watch(engine)
    engine.backward(loss_of(engine, tokens_of(0, 0, 0)))
    step_engine(engine)
    parameters = watch.training.parameters
    there = [p.name for p, taken in zip(parameters, watch.reduced, strict=True) if taken is not None]
    print(f"muon: {' '.join(there)}, norm {watch.outcomes[0].grad_norm}")


def show_leaves():
    """Print whether a step can be replayed at stage 3, without and with a module that DeepSpeed treats as one leaf."""
    for leaves in ([], [torch.nn.Embedding]):
        engine = make_engine(Case(3))
        if leaves:
            set_z3_leaf_modules(engine.module, leaves)
        replayable = detect([engine], engine.optimizer, Coordinates()).replayable()
        print(f"replay with {len(leaves)} leaves: {replayable.refusal or 'possible'}")


def main():
    start()
    show_muon()
    engine = make_engine(Case(2))
    ask("engine", engine, None)
    ask("engine and optimizer", engine, engine.optimizer)
    ask("engine and client optimizer", engine, engine.basic_optimizer)
    Accelerator(cpu=True)
    ask("engine and accelerate's optimizer", engine, DeepSpeedOptimizerWrapper(engine.optimizer))
    ask("compiled engine", torch.compile(engine), engine.optimizer)
    ask("inner module", engine.module, engine.optimizer)
    ask("inner module alone", engine.module, None)
    ask("foreign optimizer", engine, torch.optim.SGD(Model().parameters(), lr=1.0))
    whole = make_engine(Case(0))
    ask("inner module at stage 0", whole.module, whole.optimizer)
    show_leaves()
    empty = deepspeed.initialize(model=Model(), config={"train_micro_batch_size_per_gpu": 1})[0]
    ask("no optimizer", empty, None)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
