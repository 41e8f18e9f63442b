"""Trains a pipeline of two stages, its embedding tied to its head, and compares what is seen of it with the truth."""

import itertools
import math
import os
import sys
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  # the name that everybody knows
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import nn

from tests.frameworks.deepspeed.engines import VOCABULARY, WIDTH, start, tokens_of
from tests.frameworks.deepspeed.watch import Watch

GAS = 2
TOLERANCE = {"fp32": 2e-6, "bf16": 3e-2}
# name -> dtype and ZeRO stage
VARIANTS = {"torch": ("fp32", 0), "zero1": ("fp32", 1), "zero1_bf16": ("bf16", 1), "bf16_optimizer": ("bf16", 0)}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 11), nn.Linear(11, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))


class Embedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(VOCABULARY, WIDTH))

    def forward(self, tokens):
        return F.embedding(tokens, self.weight)


def head(tied, x):
    return x @ tied.weight.t()


def loss_of(logits, tokens):
    return F.cross_entropy(logits.float().view(-1, VOCABULARY), tokens.view(-1))


def make_engine(dtype, stage):
    torch.manual_seed(3)
    layers = [
        TiedLayerSpec("embedding", Embedding),
        *(LayerSpec(Block) for _ in range(3)),
        TiedLayerSpec("embedding", Embedding, forward_fn=head),
    ]
    module = PipelineModule(layers, num_stages=2, loss_fn=loss_of, partition_method="uniform", seed_layers=True)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": GAS,
        "gradient_clipping": 0.05,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 4096},
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
        "steps_per_print": 1_000_000,
    }
    if dtype == "bf16":
        config["bf16"] = {"enabled": True}
    parameters = [p for p in module.parameters() if p.requires_grad]
    return deepspeed.initialize(model=module, model_parameters=parameters, config=config)[0]


def whole_weights(engine):
    """Return all stages' weights by their global names, in float64; a collective of the test's."""
    own = {name: p.detach().double().clone() for name, p in engine.module.named_parameters()}
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, own)
    return {name: weight for weights in everywhere for name, weight in weights.items()}


def true_gradients(weights, batches):
    """Return the gradients of the mean loss, from the plain formula of the model."""
    weights = {name: weight.clone().requires_grad_() for name, weight in weights.items()}
    tied = weights["tied_modules.embedding.weight"]
    losses = []
    for tokens in batches:
        x = F.embedding(tokens, tied)
        for layer in (1, 2, 3):
            up, up_bias, down, down_bias = (
                weights[f"{layer}.{name}"] for name in ("up.weight", "up.bias", "down.weight", "down.bias")
            )
            x = x + F.linear(F.gelu(F.linear(x, up, up_bias)), down, down_bias)
        losses.append(F.cross_entropy((x @ tied.t()).view(-1, VOCABULARY), tokens.view(-1)))
    torch.stack(losses).mean().backward()
    return {name: weight.grad for name, weight in weights.items()}


def train_step(engine, step):
    replica = engine.grid.get_data_parallel_rank()
    batches = ((tokens, tokens) for tokens in (tokens_of(step, micro, replica) for micro in itertools.count()))
    engine.train_batch(data_iter=batches)


def train(variant, *, watched):
    engine = make_engine(*VARIANTS[variant])
    if watched:
        watch = Watch(engine)
    for step in range(2):
        train_step(engine, step)
        if watched:
            watch.forget()
    return whole_weights(engine)


def check(variant):
    dtype = VARIANTS[variant][0]
    engine = make_engine(*VARIANTS[variant])
    watch = Watch(engine)
    replicas, replica = engine.grid.data_parallel_size, engine.grid.get_data_parallel_rank()
    place = watch.training.coordinates
    assert (place.pp, place.pp_size, place.dp, place.dp_size) == (engine.stage_id, 2, replica, replicas)
    for step in range(2):
        weights = whole_weights(engine)
        watch.forget()
        train_step(engine, step)
        assert not watch.faults, watch.faults
        assert len(watch.outcomes) == step + 1
        batches = [tokens_of(step, micro, one) for micro in range(GAS) for one in range(replicas)]
        check_reduced(watch, engine, true_gradients(weights, batches), TOLERANCE[dtype])
        own = [true_gradients(weights, [tokens_of(step, micro, replica)]) for micro in range(GAS)]
        check_own(watch, own, TOLERANCE[dtype])
        check_values(watch, engine)
    watch.remove()
    print("pipeline", variant, type(engine.optimizer).__name__)


def check_reduced(watch, engine, truth, tolerance):
    merged = watch.merged(watch.reduced)
    norm = torch.stack([g.norm() for g in truth.values()]).norm()
    assert merged.keys() == truth.keys()  # every name of the whole model, the tied weight once
    for name, gradient in truth.items():
        assert merged[name].count == gradient.numel(), name
        assert abs(merged[name].norm - gradient.norm()) < tolerance * norm, name
    for parameter, taken in zip(watch.training.parameters, watch.reduced, strict=True):
        if taken is not None:
            at = parameter.owned
            length = taken[0].numel() if at.length is None else at.length
            part = truth[parameter.name].reshape(-1)[at.offset : at.offset + length]
            assert (taken[0].double().reshape(-1) - part).norm() < tolerance * norm, parameter.name
    told, outcome = engine.get_global_grad_norm(), watch.outcomes[-1]
    assert (told is None) == (outcome.grad_norm is None)
    if told is not None:
        found = math.sqrt(sum(row.sum_sq for row in merged.values()))
        assert math.isclose(found, float(told), rel_tol=max(tolerance / 10, 1e-6)), (found, told)


def check_own(watch, own, tolerance):
    """Each micro step's gradient, and their sum before it is averaged; the tied weight has a part on each stage."""
    norm = torch.stack([g.norm() for g in own[0].values()]).norm()
    for index, parameter in enumerate(watch.training.parameters):
        if parameter.name.startswith("tied"):
            continue
        truths = [truth[parameter.name] * parameter.placement.scale for truth in own]
        for seen, truth in zip(watch.micro[index], truths, strict=True):
            assert (seen.double() - truth).norm() < tolerance * norm, parameter.name
        seen = watch.unreduced[index].double().reshape(truths[0].shape)
        assert (seen - sum(truths)).norm() < tolerance * norm, parameter.name


def check_values(watch, engine):
    weights = dict(engine.module.named_parameters())
    for parameter, taken in zip(watch.training.parameters, watch.after, strict=True):
        if taken is not None:
            at, weight = parameter.owned, weights[parameter.name]
            length = taken[0].numel() if at.length is None else at.length
            part = weight.detach().reshape(-1)[at.offset : at.offset + length]
            assert torch.equal(taken[0].reshape(-1).to(weight.dtype), part), parameter.name


def main():
    start()
    for variant in VARIANTS:
        bare, watched = train(variant, watched=False), train(variant, watched=True)
        assert all(torch.equal(bare[name], watched[name]) for name in bare), f"{variant}: the run is not the same"
        check(variant)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
