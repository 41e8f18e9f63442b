"""Silent errors of Megatron-Core: stages of a pipeline, their parts, and what first and last stage share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor

from benchmarks.silent.case import Mechanism, silent
from benchmarks.silent.loop import Loop
from benchmarks.silent.megatron_core.layout import Layout, core, replace, training
from benchmarks.silent.megatron_core.tensor import CLIP, FORWARD, UNREDUCED

STAGES = Layout(pp=2)
REDUCED = ("backward", "before_step", "optimizer")
TIED = ("word_embeddings", "embedding", "output_layer")


def stage() -> int:
    """Return this process's place in the pipeline."""
    return int(core("parallel_state").get_pipeline_model_parallel_rank())


@silent(
    "megatron",
    "TTrace 5; Megatron-LM 844",
    "first and last stage add up gradients of the tied embedding, but each has reduced other shards of them",
    Mechanism.UNREDUCED,
    phrases=(*UNREDUCED, "tied", "shared"),
    modules=TIED,
    phases=REDUCED,
    visible=True,  # the two copies of the embedding differ
    ranks=4,
)
def pp_tied_embedding_shards(*, broken: bool) -> Loop:
    def made(prepared: Callable[..., None]) -> Callable[..., None]:
        def in_one_bucket(buffer: Any, *arguments: Any) -> None:
            for parameter in arguments[3]:
                parameter.shared_embedding = False
            prepared(buffer, *arguments)

        return in_one_bucket

    if broken:
        replace(core("distributed.param_and_grad_buffer")._ParamAndGradBuffer, "__init__", made)
    return training(Layout(pp=2, sharded=True))


@silent(
    "megatron",
    "Megatron-LM 656, 835, kin of TTrace 5",
    "first and last stage do not add up the gradients of the tied embedding",
    Mechanism.UNREDUCED,
    phrases=(*UNREDUCED, "tied", "shared"),
    modules=TIED,
    phases=REDUCED,
    visible=True,  # the two copies of the embedding differ
    ranks=2,
)
def pp_tied_embedding_unreduced(*, broken: bool) -> Loop:
    if broken:
        finalize = core("distributed.finalize_model_grads")
        replace(finalize, "_allreduce_word_embedding_grads", lambda _: lambda *_arguments: None)
    return training(STAGES)


@silent(
    "megatron",
    "Megatron-LM PR 7227",
    "the clip norm counts the embedding that first and last stage share twice",
    Mechanism.SCALE,
    phrases=(*CLIP, "tied", "shared", "twice"),
    modules=TIED,
    phases=("optimizer", "before_step"),
    visible=True,  # the norm is not that of the gradients
    ranks=2,
)
def pp_shared_weight_counted_twice(*, broken: bool) -> Loop:
    loop = training(Layout(pp=2, clip=0.3))
    if broken and stage() == 1:
        loop.model[0].module.shared_embedding_or_output_weight().shared = False
    return loop


@silent(
    "megatron",
    "TTrace 10; Megatron-LM 1304",
    "layers that the stages do not divide are rounded down, so that one is missing",
    Mechanism.LAYOUT,
    phrases=("number of layers", "missing layer", "layers are missing", "fewer layers", "no such module"),
    modules=("layers.2", "layers.1", "layers"),
    phases=FORWARD,  # not visible: any number of layers may be meant
    ranks=2,
)
def pp_stage_division(*, broken: bool) -> Loop:
    return training(Layout(pp=2, layers=5, stages=(2, 2) if broken else (3, 2)))


@silent(
    "megatron",
    "TTrace 10; Megatron-LM 1778",
    "the last stage runs its first layer twice, and its second one never",
    Mechanism.LAYOUT,
    phrases=("twice", "no gradient", "zero gradient", "never used", "does not move", "without gradient"),
    modules=("layers.0", "layers.1"),
    phases=FORWARD,
    visible=True,  # a layer has no gradients, and its weights do not move
    ranks=2,
)
def pp_layer_doubled(*, broken: bool) -> Loop:
    loop = training(Layout(pp=2, layers=4))
    first, second = loop.model[0].module.decoder.layers
    if broken and stage() == 1:
        second.forward = first.forward
    return loop


@silent(
    "megatron",
    "VERDICT 6; Megatron-LM PR 7177",
    "what the first stage sends meets the last stage's labels of the other micro batch",
    Mechanism.DATA,
    phrases=("label", "target", "other micro batch", "out of order", "wrong order"),
    modules=("output_layer", "(loss)", "final_layernorm"),
    phases=FORWARD,
    visible=True,  # the labels of the last stage are those of another micro batch than the first one's tokens
    ranks=2,
)
def pp_other_micro_batch(*, broken: bool) -> Loop:
    loop = training(STAGES)
    in_order = loop.batch
    if broken and stage() == 1:
        loop.batch = lambda step, micro: in_order(step, 1 - micro)
    return loop


def _saved_by_place(loop: Any, place_of: Callable[[int, int], int]) -> None:
    """Keep a checkpoint by each layer's place in the whole model, and load what is said to be a layer's place."""
    model = loop.model[0].module
    count = len(model.decoder.layers)

    def named(state: Any, place: Callable[[int], int]) -> Iterator[tuple[str, str]]:
        for name in state:
            head, _, tail = name.partition("decoder.layers.")
            number, _, rest = tail.partition(".")
            yield name, f"{head}decoder.layers.{place(int(number))}.{rest}" if tail else name

    def save() -> dict[str, Any]:
        state = model.state_dict()
        own = {whole: state[name] for name, whole in named(state, lambda number: stage() * count + number)}
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, own)
        return {"model": {name: value for part in parts for name, value in part.items()}, **_moments(loop)}

    def restore(saved: dict[str, Any]) -> None:
        state = model.state_dict()
        found = {name: saved["model"][whole] for name, whole in named(state, lambda n: place_of(stage(), n))}
        model.load_state_dict(found)
        loop.optimizer.load_state_dict(saved["optimizer"])

    loop.save, loop.restore = save, restore


def _moments(loop: Any) -> dict[str, Any]:
    return {"optimizer": loop.optimizer.state_dict()}


@silent(
    "megatron",
    "Megatron-LM 7452, finding 12",
    "after a restart the last stage loads the layers of the first one, by the number that they have within a stage",
    Mechanism.RESTART,
    phrases=("restart", "resume", "checkpoint", "jump", "changed between", "loaded"),
    first_wrong=16,
    modules=("layers.0", "layers"),
    phases=("forward", "parameter", "weight"),
    visible=True,  # weights are not those with which the job ended
    ranks=2,
    restart=16,
)
def pp_stage_local_checkpoint(*, broken: bool) -> Loop:
    loop = training(Layout(pp=2, layers=4))
    _saved_by_place(loop, lambda place, number: number if broken else place * 2 + number)
    return loop


@silent(
    "megatron",
    "TTrace 9, on virtual stages",
    "the optimizer is given only the first of a stage's two parts",
    Mechanism.STILL,
    phrases=("does not move", "do not move", "not change", "unchanged", "not updated", "stands still", "no optimizer"),
    modules=("layers.0", "layers"),
    phases=("optimizer",),
    visible=True,  # weights with gradients do not move
    ranks=2,
)
def vpp_part_never_updated(*, broken: bool) -> Loop:
    loop: Any = training(Layout(pp=2, vpp=2, layers=4, tied=False))
    if broken:
        kept = {id(p) for p in loop.model[0].parameters()}
        for optimizer in loop.optimizer.chained_optimizers:
            for group in optimizer.optimizer.param_groups:
                group["params"] = [p for p in group["params"] if id(p) in kept]
    return loop


@silent(
    "megatron",
    "Megatron-LM PR 7177, kin: only one virtual stage",
    "only the first of a stage's two parts has its gradients reduced over data parallel ranks",
    Mechanism.UNREDUCED,
    phrases=UNREDUCED,
    modules=("layers", "output_layer", "final_layernorm"),
    phases=REDUCED,
    visible=True,  # weights that should be copies differ
    ranks=4,
)
def vpp_part_unreduced(*, broken: bool) -> Loop:
    loop = training(Layout(pp=2, vpp=2, layers=4, tied=False))
    if broken:
        loop.model[1].finish_grad_sync = lambda **_: None
    return loop


@silent(
    "megatron",
    "Megatron-LM 1584, kin of TTrace 10",
    "a stage's two parts are run in each other's place",
    Mechanism.LAYOUT,
    phrases=("restart", "resume", "checkpoint", "jump", "exchanged", "swapped", "changed between", "loaded"),
    first_wrong=16,
    modules=("layers.0", "layers"),
    phases=("forward", "parameter", "weight"),
    visible=True,  # weights are not those with which the job ended
    ranks=2,
    restart=16,
)
def vpp_parts_exchanged(*, broken: bool) -> Loop:
    loop: Any = training(Layout(pp=2, vpp=2, layers=4, tied=False))

    def save() -> dict[str, Any]:
        return {"model": [chunk.module.state_dict() for chunk in loop.model], **_moments(loop)}

    def restore(saved: dict[str, Any]) -> None:
        layers = [_layers(part) for part in saved["model"]]
        for chunk, part, own in zip(loop.model, saved["model"], layers[::-1] if broken else layers, strict=True):
            chunk.module.load_state_dict(part | own)
        loop.optimizer.load_state_dict(saved["optimizer"])

    loop.save, loop.restore = save, restore
    return loop


def _layers(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in state.items() if ".layers." in name}


@silent(
    "megatron",
    "Entangle grad_accumulation",
    "the loss is not divided by the number of micro batches",
    Mechanism.SCALE,
    phrases=("accumulat", "scaled", "twice", "too large", "not divided"),
    modules=("(loss)", "output_layer"),
    phases=("backward", "before_step", "forward"),  # not visible: a sum over micro batches may be meant
    ranks=2,
)
def pp_sum_of_micro_batches(*, broken: bool) -> Loop:
    loop = training(Layout(pp=2, clip=0.5))

    def made(calculated: Callable[..., Any]) -> Callable[..., Any]:
        def undivided(*arguments: Any) -> Any:
            return calculated(*(1 if position == 6 else value for position, value in enumerate(arguments)))

        return undivided

    if broken:
        replace(core("pipeline_parallel.schedules"), "forward_step_calc_loss", made)
    return loop
