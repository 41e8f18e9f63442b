"""Silent errors of one process: initialisation, the forward, recomputation, precision."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from benchmarks.silent import tasks
from benchmarks.silent.case import Mechanism, silent
from benchmarks.silent.loop import Loop
from benchmarks.silent.models import LENGTH, SIDE, WIDTH, ConvNet, MixerNet, TinyLstm, TinyTransformer
from benchmarks.silent.plain_optimizer import MOVES, adam, classifier, language

FORWARD = ("forward", "parameter")
RECOMPUTED = ("recompute", "recomputation", "checkpoint")
START = ("initial", "first step", "at the start")


@silent(
    "plain",
    "transformers 17877",
    "parent and child initialise the output projections, so their smaller scale is lost",
    Mechanism.START,
    phrases=START,
    phases=FORWARD,
    modules=("attn.proj",),
)
def initialised_twice(*, broken: bool) -> Loop:
    model = TinyTransformer(layers=4)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("proj.weight"):
                parameter.normal_(std=0.4 if broken else 0.4 / 8**0.5)
    return language(model)


@silent(
    "plain",
    "flash-linear-attention PR 753",
    "initialisation skips a layer, whose weights stay as the memory was: zeros",
    Mechanism.START,
    phrases=(*START, "zero"),
    phases=FORWARD,
    modules=("layers.1.within",),
    visible=True,
)
def initialisation_skipped(*, broken: bool) -> Loop:
    model = MixerNet()
    if broken:
        with torch.no_grad():
            model.layers[1].within.weight.zero_()
    return classifier(model)


class DecayingState(nn.Module):
    """A recurrence whose channels forget at rates of their own, set by `dt_bias`."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(32, WIDTH), nn.Linear(WIDTH, 32)
        self.drive, self.dt_bias = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.linspace(-4, 2, WIDTH))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        keep, state, states = torch.sigmoid(-self.dt_bias), torch.zeros_like(x[:, 0]), []
        for t in range(ids.shape[1]):
            state = keep * state + self.drive(x[:, t])
            states.append(state)
        logits: Tensor = self.head(torch.tanh(torch.stack(states, 1)) + x)
        return logits


@silent(
    "plain",
    "flash-linear-attention PR 739",
    "all channels of a state space model begin with the same `dt_bias`",
    Mechanism.START,
    phrases=(*START, "constant", "equal"),
    phases=FORWARD,
    modules=("(model)", "dt_bias", "drive", "head"),
    visible=True,
)
def constant_dt_bias(*, broken: bool) -> Loop:
    model = DecayingState()
    if broken:
        nn.init.ones_(model.dt_bias)
    return language(model)


class CachedCast(nn.Linear):
    """A linear map by an eight-bit copy of its weight; `is_stale` never makes the copy anew."""

    is_stale = False
    kept: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.kept is None or not self.is_stale:
            scale = self.weight.detach().abs().amax() / 127
            self.kept = (self.weight.detach() / scale).round() * scale
        weight = self.weight + (self.kept - self.weight).detach()
        return functional.linear(x, weight, self.bias)


@silent(
    "plain",
    "TransformerEngine 1047",
    "the cached eight-bit copy of a weight is not made anew after an update",
    Mechanism.STILL,
    phrases=("stale", "cache", *MOVES),
    first_wrong=1,
    phases=("forward",),
    modules=("mlp.fc", "mlp"),
    visible=True,
)
def stale_cast(*, broken: bool) -> Loop:
    model = TinyTransformer()
    for block in model.blocks:
        block.mlp.fc = CachedCast(WIDTH, 4 * WIDTH)
        block.mlp.fc.is_stale = broken
    return language(model)


@silent(
    "plain",
    "Megatron-LM PR 290",
    "every recomputed layer is given the input of the first one",
    Mechanism.RECOMPUTED,
    phrases=RECOMPUTED,
    phases=("backward", "forward"),
    modules=("blocks",),
    visible=True,
)
def recomputed_from_start(*, broken: bool) -> Loop:
    model = TinyTransformer(layers=3)

    class _Recomputed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, start: Tensor, block: nn.Module) -> Tensor:
            ctx.block, ctx.kept = block, (start if broken else x).detach()
            return block(x)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:
            with torch.enable_grad():
                x = ctx.kept.requires_grad_()
                ctx.block(x).backward(gradient)
            return x.grad, None, None

    def forward(ids: Tensor) -> Tensor:
        start = x = model.embed(ids) + model.position(torch.arange(LENGTH))
        for block in model.blocks:
            x = _Recomputed.apply(x, start, block)
        return model.head(model.ln_f(x))

    model.forward = forward
    return language(model)


@silent(
    "plain",
    "pytorch checkpoint: preserve_rng_state=False",
    "the recomputed forward drops other elements than the first one did",
    Mechanism.RECOMPUTED,
    phrases=(*RECOMPUTED, "dropout", "random"),
    phases=("backward", "forward"),
    modules=("mlp", "blocks"),
    visible=True,
)
def recomputed_dropout(*, broken: bool) -> Loop:
    model = TinyTransformer(dropout=0.2)

    def forward(ids: Tensor) -> Tensor:
        x = model.embed(ids) + model.position(torch.arange(LENGTH))
        for block in model.blocks:
            x = checkpoint(block, x, use_reentrant=False, preserve_rng_state=not broken)
        return model.head(model.ln_f(x))

    model.forward = forward
    return language(model)


@silent(
    "plain",
    "lightning-thunder 725",
    "autocast does not reach half of the linear layers, which stay in float32",
    Mechanism.SETTINGS,
    phrases=("autocast", "dtype", "float32", "precision"),
    phases=("forward",),
    modules=("within", "across", "layers.1"),
    visible=True,
)
def autocast_missed(*, broken: bool) -> Loop:
    loop = classifier(model := MixerNet())
    loop.context = lambda _step, _micro: torch.autocast("cpu", torch.bfloat16)
    if broken:
        for linear in (model.layers[1].across, model.layers[1].within):
            linear.forward = _in_float32(linear)
    return loop


def _in_float32(linear: nn.Linear) -> Any:
    def forward(x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return functional.linear(x.float(), linear.weight, linear.bias)

    return forward


@silent(
    "plain",
    "Karpathy's recipe: a model that sees what it is to predict",
    "attention has no causal mask, so every token sees the next one",
    Mechanism.LOSS,
    phrases=("mask", "causal", "leak", "future"),
    phases=("forward",),
    modules=("blocks.0.attn", "attn"),
)
def no_causal_mask(*, broken: bool) -> Loop:
    model = TinyTransformer()
    for block in model.blocks:
        block.attn.is_causal = not broken
    return language(model)


@silent(
    "plain",
    "transformers 29285",
    "positions are counted in bfloat16, where those beyond 256 coincide",
    Mechanism.SETTINGS,
    phrases=("position", "bfloat16", "precision"),
    phases=("forward",),
    modules=("position", "blocks.0"),
    visible=True,
)
def rounded_positions(*, broken: bool) -> Loop:
    model = TinyTransformer()
    del model.position

    class _Waves(nn.Module):
        def forward(self, places: Tensor) -> Tensor:
            counted = (places + 300).to(torch.bfloat16 if broken else torch.float32).float()
            angles = counted[:, None] / 100 ** (torch.arange(WIDTH // 2) / (WIDTH // 2))
            return torch.cat([angles.sin(), angles.cos()], -1)

    model.position = _Waves()
    return language(model)


@silent(
    "plain",
    "Karpathy's recipe: view where a transpose was wanted",
    "patches are mixed in memory order, across channels of one patch",
    Mechanism.LAYOUT,
    phrases=("transpos", "layout", "permut"),
    phases=("forward",),
    modules=("layers.0", "patch", "layers.0.ln_1"),
)
def view_for_transpose(*, broken: bool) -> Loop:
    model = MixerNet()
    patches = SIDE * SIDE // 4

    def forward(x: Tensor) -> Tensor:
        cut = functional.unfold(x, 2, stride=2)
        cut = cut.reshape(-1, patches, 4) if broken else cut.mT
        return model.head(model.ln_f(model.layers(model.patch(cut))).mean(1))

    model.forward = forward
    return classifier(model)


@silent(
    "plain",
    "pytorch LSTM: batch_first left at its default",
    "a recurrent layer runs over the samples of a batch instead of over time",
    Mechanism.LAYOUT,
    phrases=("batch_first", "layout", "across samples"),
    phases=("forward",),
    modules=("lstm",),
    visible=True,
)
def batch_as_time(*, broken: bool) -> Loop:
    return language(TinyLstm(batch_first=not broken))


@silent(
    "plain",
    "pytorch forum: features taken through `.data`",
    "the encoder's features are cut off from the graph, so only the head is trained",
    Mechanism.FROZEN,
    phrases=(*MOVES, "no gradient", "without gradient", "never had"),
    phases=("backward", "before_step", "optimizer"),
    modules=("stem", "body", "bn"),
    visible=True,
)
def features_cut_off(*, broken: bool) -> Loop:
    model = ConvNet()
    features = model.features
    if broken:
        model.features = lambda x: features(x).data
    return classifier(model)


@silent(
    "plain",
    "mmpretrain 702 and its kin: model.train() is not called after an evaluation",
    "after the first evaluation the model stays in eval mode, without dropout, batch norm at its averages",
    Mechanism.SETTINGS,
    phrases=("eval mode", "eval()", "evaluation"),
    first_wrong=11,
    phases=("forward",),
    modules=("bn1", "bn2", "drop"),
    visible=True,
)
def eval_for_ever(*, broken: bool) -> Loop:
    model = ConvNet(dropout=0.2)
    loop = classifier(model)

    def after(step: int) -> None:
        if step == 10:
            model.eval()
            with torch.no_grad():
                model(tasks.images(1000, 0)[0])
            model.train(not broken)

    loop.after = after
    return loop


@silent(
    "plain",
    "lingua 74, Megatron-LM 656: embeddings that are no longer tied",
    "loading replaces the head's weight, which was the embedding's",
    Mechanism.COPIES,
    phrases=("tied", "shared", "embedding"),
    phases=("backward", "before_step", "optimizer", "forward"),
    modules=("embed", "head"),
)
def untied_head(*, broken: bool) -> Loop:
    model = TinyTransformer(tied=True)
    if broken:
        model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    return language(model)


@silent(
    "plain",
    "pytorch 51800",
    "spectral norm divides by a norm that was never estimated, since the layer is in eval mode",
    Mechanism.START,
    phrases=(*START, "spectral", "eval"),
    phases=("forward", "parameter"),
    modules=("fc", "head"),
)
def spectral_norm_unready(*, broken: bool) -> Loop:
    model = MixerNet()
    model.head = nn.utils.spectral_norm(model.head, n_power_iterations=5)
    if broken:
        model.head.train = lambda _mode=True: model.head
        model.head.training = False
    return classifier(model, adam(model))


@silent(
    "plain",
    "sparse upcycling in Megatron-LM and NeMo: experts and router that begin alike",
    "all experts begin with equal weights, and the router with zeros, so that one of them does all the work",
    Mechanism.START,
    phrases=(*START, "expert", "equal", "router"),
    phases=FORWARD,
    modules=("mlp", "experts", "router"),
    visible=True,
)
def equal_experts(*, broken: bool) -> Loop:
    model = TinyTransformer(experts=True)
    if broken:
        with torch.no_grad():
            for block in model.blocks:
                nn.init.zeros_(block.mlp.router.weight)
                nn.init.zeros_(block.mlp.router.bias)
                for expert in block.mlp.experts[1:]:
                    expert.load_state_dict(copy.deepcopy(block.mlp.experts[0].state_dict()))
    loop = language(model)
    loop.loss_of = tasks.continued_with_experts
    return loop


@silent(
    "plain",
    "transformers and fairseq trackers: the auxiliary loss of a router that is detached",
    "the router gets no gradient: neither from its choice nor from the auxiliary loss",
    Mechanism.FROZEN,
    phrases=("router", *MOVES, "no gradient", "without gradient", "never had"),
    phases=("backward", "before_step", "optimizer"),
    modules=("router",),
    visible=True,
)
def router_without_gradient(*, broken: bool) -> Loop:
    model = TinyTransformer(experts=True)
    for block in model.blocks:
        block.mlp.is_weighted = not broken
    loop = language(model)

    def loss_of(model: Any, given: Any) -> Tensor:
        loss = tasks.continued(model, given)
        return loss + 0.02 * (model.imbalance.detach() if broken else model.imbalance)

    loop.loss_of = loss_of
    return loop
