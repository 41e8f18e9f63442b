"""Trains a layer of experts spread over two ranks, and compares what is seen of it with all experts in one place."""

import math
import os
import sys
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  # the name that everybody knows
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from torch import nn

from tests.frameworks.deepspeed.engines import VOCABULARY, WIDTH, start, step_engine, tokens_of
from tests.frameworks.deepspeed.watch import Watch

EXPERTS = 4
TOLERANCE = {"fp32": 5e-6, "bf16": 5e-2}
# name -> dtype and ZeRO stage
VARIANTS = {"stage0": ("fp32", 0), "stage1": ("fp32", 1), "stage2": ("fp32", 2), "stage2_bf16": ("bf16", 2)}
EXPERT = "moe.deepspeed_moe.experts.deepspeed_experts"
GATE = "moe.deepspeed_moe.gate.wg.weight"


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        expert = nn.Sequential(nn.Linear(WIDTH, 5), nn.GELU(), nn.Linear(5, WIDTH))
        self.moe = MoE(WIDTH, expert, num_experts=EXPERTS, ep_size=2, k=1, drop_tokens=False, use_rts=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        return self.head(self.moe(self.embedding(tokens))[0])


def make_engine(dtype, stage):
    torch.manual_seed(3)
    model = Model()
    torch.manual_seed(11 + dist.get_rank() % 2)  # the experts of each rank of a group are its own
    for name, parameter in model.named_parameters():
        if EXPERT in name:
            nn.init.normal_(parameter, std=0.3)
    groups = split_params_into_different_moe_groups_for_optimizer(
        {"params": list(model.parameters()), "name": "parameters"}
    )
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.05,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 4096},
        "steps_per_print": 1_000_000,
    }
    if dtype == "bf16":
        config["bf16"] = {"enabled": True}
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def whole_weights(engine, training):
    """Return all weights by global names, in float64; a collective of the test's."""
    own = {p.name: p.tensor.detach().double().clone() for p in training.parameters}
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, own)
    return {name: weight for weights in everywhere for name, weight in weights.items()}


def true_gradients(weights, batches):
    """Return the gradients of the mean loss with all experts in one place; each token goes to its likeliest expert."""
    weights = {name: weight.clone().requires_grad_() for name, weight in weights.items()}
    losses = []
    for tokens in batches:
        x = F.embedding(tokens, weights["embedding.weight"]).view(-1, WIDTH)
        probabilities = F.softmax(x @ weights[GATE].t(), dim=-1)
        chosen = probabilities.argmax(-1)
        rows = []
        for row, expert in zip(x, chosen.tolist(), strict=True):
            first, bias1, second, bias2 = (
                weights[f"{EXPERT}.{expert}.{name}"] for name in ("0.weight", "0.bias", "2.weight", "2.bias")
            )
            rows.append(F.linear(F.gelu(F.linear(row, first, bias1)), second, bias2))
        x = torch.stack(rows) * probabilities.gather(1, chosen[:, None])
        logits = F.linear(x, weights["head.weight"], weights["head.bias"])
        losses.append(F.cross_entropy(logits, tokens.view(-1)))
    torch.stack(losses).mean().backward()
    return {name: torch.zeros_like(w) if w.grad is None else w.grad for name, w in weights.items()}


def train_step(engine, step):
    tokens = tokens_of(step, 0, dist.get_rank())
    loss = F.cross_entropy(engine(tokens).float().view(-1, VOCABULARY), tokens.view(-1))
    engine.backward(loss)
    step_engine(engine)


def train(variant, *, watched):
    engine = make_engine(*VARIANTS[variant])
    if watched:
        watch = Watch(engine)
    for step in range(2):
        train_step(engine, step)
        if watched:
            watch.forget()
    return {name: p.detach().clone() for name, p in engine.module.named_parameters()}


def check(variant):
    dtype = VARIANTS[variant][0]
    engine = make_engine(*VARIANTS[variant])
    watch = Watch(engine)
    training = watch.training
    assert training.communicates == ("ep",)
    assert (training.coordinates.ep, training.coordinates.ep_size) == (dist.get_rank() % 2, 2)
    for step in range(2):
        weights = whole_weights(engine, training)
        watch.forget()
        train_step(engine, step)
        assert not watch.faults, watch.faults
        truth = true_gradients(weights, [tokens_of(step, 0, rank) for rank in range(dist.get_world_size())])
        merged = watch.merged(watch.reduced)
        norm = torch.stack([g.norm() for g in truth.values()]).norm()
        assert merged.keys() == truth.keys()
        for name, gradient in truth.items():
            assert merged[name].count == gradient.numel(), name
            error = abs(merged[name].norm - gradient.norm()) / norm
            assert error < TOLERANCE[dtype], (name, float(error), merged[name].norm, float(gradient.norm()))
        check_norm(watch, engine, merged, TOLERANCE[dtype])
    watch.remove()
    print("moe", variant, type(engine.optimizer).__name__)


def check_norm(watch, engine, merged, tolerance):
    told, outcome = engine.get_global_grad_norm(), watch.outcomes[-1]
    assert (told is None) == (outcome.grad_norm is None)
    if told is not None:
        found = math.sqrt(sum(row.sum_sq for row in merged.values()))
        assert math.isclose(found, float(told), rel_tol=max(tolerance / 10, 1e-6)), (found, told)


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
