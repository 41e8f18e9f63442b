"""Silent errors of one process: batches, labels and losses."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.silent import tasks
from benchmarks.silent.case import Mechanism, silent
from benchmarks.silent.loop import Loop
from benchmarks.silent.models import CLASSES, LENGTH, ConvNet, MixerNet, TinyLstm, TinyMlp, TinyTransformer
from benchmarks.silent.plain_optimizer import classifier, graph, language, sgd

INPUT = ("(input)",)
FORWARD = ("forward",)


@silent(
    "plain",
    "stackoverflow 67180955",
    "four workers of a loader share a seed of numpy, so they augment their parts of a batch alike",
    Mechanism.DATA,
    phrases=("batch", "input", "same data", "repeated", "augment"),
    modules=INPUT,
    phases=FORWARD,
    visible=True,
)
def shared_worker_seed(*, broken: bool) -> Loop:
    def batch(step: int, micro: int) -> tuple[Tensor, Tensor]:
        rows, labels = tasks.table(step, micro)
        seeds = [0 if broken else worker for worker in range(4)]
        noise = [torch.randn(rows.shape[0] // 4, rows.shape[1], generator=tasks.drawn(step, 50 + s)) for s in seeds]
        return rows + torch.cat(noise), labels

    loop = classifier(TinyMlp())
    loop.batch = batch
    return loop


@silent(
    "plain",
    "pytorch 31771, transformers 4398: set_epoch is not called",
    "every epoch brings the same batches in the same order",
    Mechanism.DATA,
    phrases=("same order", "repeat", "same batch", "epoch", "shuffl"),
    first_wrong=5,
    modules=INPUT,
    phases=FORWARD,
    visible=True,
)
def same_order(*, broken: bool) -> Loop:
    pool = [tasks.words(i, 0) for i in range(5)]
    inputs, targets = (torch.cat([batch[side] for batch in pool]) for side in range(2))

    def batch(step: int, _micro: int) -> tuple[Tensor, Tensor]:
        epoch = 0 if broken else step // 5
        order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(epoch))
        rows = order.view(5, -1)[step % 5]
        return inputs[rows], targets[rows]

    loop = language(TinyLstm())
    loop.batch = batch
    return loop


@silent(
    "plain",
    "transformers 34204",
    "a processor joins a field of all samples, so the mask of the first sample is used for all",
    Mechanism.DATA,
    phrases=("shape", "batch", "mask"),
    phases=("forward", "backward"),
    modules=(*INPUT, "(loss)", "head"),
)
def joined_field(*, broken: bool) -> Loop:
    def batch(step: int, micro: int) -> tuple[Tensor, Tensor, Tensor]:
        inputs, targets = tasks.words(step, micro)
        lengths = torch.randint(3, LENGTH + 1, (len(inputs), 1), generator=tasks.drawn(step, 60))
        mask = (torch.arange(LENGTH) < lengths).float()
        return inputs * mask.long(), targets, mask[:1] if broken else mask

    def loss_of(model: Any, given: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        losses = functional.cross_entropy(model(given[0]).mT, given[1], reduction="none")
        mask = given[2].expand_as(losses)
        return (losses * mask).sum() / mask.sum()

    loop = language(TinyTransformer())
    loop.batch, loop.loss_of = batch, loss_of
    return loop


@silent(
    "plain",
    "pytorch 84803, 96600, baichuan2 86: copies between devices lose data",
    "now and then, part of a batch is zeros after its copy to the device",
    Mechanism.DATA,
    phrases=("zero", "input", "batch"),
    first_wrong=4,
    modules=INPUT,
    phases=FORWARD,
    visible=True,
)
def lossy_copy(*, broken: bool) -> Loop:
    def batch(step: int, micro: int) -> tuple[Tensor, Tensor]:
        images, labels = tasks.images(step, micro)
        if broken and step % 9 == 4:
            images[: len(images) // 2] = 0
        return images, labels

    loop = classifier(ConvNet())
    loop.batch = batch
    return loop


@silent(
    "plain",
    "accelerate skip_first_batches, transformers ignore_data_skip",
    "after a restart the data begin anew, so the first batches are seen twice",
    Mechanism.RESTART,
    phrases=("restart", "resume", "same batch", "repeat", "seen before"),
    first_wrong=20,
    modules=INPUT,
    phases=FORWARD,
    restart=20,
    visible=True,
)
def data_begin_anew(*, broken: bool) -> Loop:
    loop = language(TinyLstm())
    began: list[int] = []

    def batch(step: int, micro: int) -> tuple[Tensor, Tensor]:
        began.append(step)
        return tasks.words(step - began[0] if broken else step, micro)

    loop.batch = batch
    return loop


@silent(
    "plain",
    "imaddabbura.github.io: why not softmax",
    "probabilities are given to a loss that applies softmax itself",
    Mechanism.LOSS,
    phrases=("softmax", "logits", "probability", "probabilities"),
    phases=("forward", "backward"),
    modules=("out",),
    visible=True,
)
def softmax_twice(*, broken: bool) -> Loop:
    model = TinyMlp()
    loop = classifier(model, sgd(model, 0.3))

    def loss_of(model: Any, given: tuple[Tensor, Tensor]) -> Tensor:
        logits = model(given[0])
        return functional.cross_entropy(logits.softmax(-1) if broken else logits, given[1])

    loop.loss_of = loss_of
    return loop


@silent(
    "plain",
    "pytorch: the warning of mse_loss about a target size that differs",
    "targets `[N]` are broadcast against predictions `[N, 1]`, every graph against every other",
    Mechanism.LOSS,
    phrases=("broadcast", "shape"),
    phases=("forward", "backward"),
    modules=("readout",),
)
def broadcast_loss(*, broken: bool) -> Loop:
    loop = graph()

    def loss_of(model: Any, given: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        target = given[2].squeeze(1) if broken else given[2]
        return (model(given[0], given[1]) - target).square().mean()

    loop.loss_of = loss_of
    return loop


@silent(
    "plain",
    "transformers 47394, 46784, 37830: labels are shifted twice",
    "the model learns the token after the next one, and the last one of a row from the row below",
    Mechanism.LOSS,
    phrases=("shift", "label"),
    phases=("forward", "backward"),
    modules=("head",),
)
def double_shift(*, broken: bool) -> Loop:
    loop = language(TinyTransformer())

    def loss_of(model: Any, given: tuple[Tensor, Tensor]) -> Tensor:
        labels = given[1].flatten()
        return functional.cross_entropy(model(given[0]).flatten(0, 1), labels.roll(-1) if broken else labels)

    loop.loss_of = loss_of
    return loop


@silent(
    "plain",
    "transformers: padded labels that are not -100 count in the loss",
    "padding counts as a class to be learned, two thirds of all tokens",
    Mechanism.LOSS,
    phrases=("pad", "ignore_index", "mask"),
    phases=("forward", "backward"),
    modules=("head",),
)
def padding_counted(*, broken: bool) -> Loop:
    def batch(step: int, micro: int) -> tuple[Tensor, Tensor]:
        inputs, targets = tasks.words(step, micro)
        lengths = torch.randint(2, LENGTH // 2, (len(inputs), 1), generator=tasks.drawn(step, 61))
        is_padding = torch.arange(LENGTH) >= lengths
        return inputs.masked_fill(is_padding, 0), targets.masked_fill(is_padding, 0 if broken else -100)

    loop = language(TinyLstm())
    loop.batch = batch
    return loop


@silent(
    "plain",
    "transformers 33844: dropout that stays on in eval mode",
    "the teacher of a distillation is in train mode, so its answers are noisy",
    Mechanism.SETTINGS,
    phrases=("dropout", "train mode", "eval"),
    phases=("forward", "backward"),
    modules=("fc", "(loss)"),
)
def noisy_teacher(*, broken: bool) -> Loop:
    teacher = ConvNet(dropout=0.5)
    with torch.no_grad():
        teacher.fc.weight.mul_(8)
    teacher.train(broken)
    loop = classifier(ConvNet())

    def loss_of(model: Any, given: tuple[Tensor, Tensor]) -> Tensor:
        with torch.no_grad():
            wanted = teacher(given[0]).softmax(-1)
        return functional.cross_entropy(model(given[0]), wanted)

    loop.loss_of = loss_of
    return loop


@silent(
    "plain",
    "cleanlab: labels of other samples in published data sets",
    "every eighth label belongs to another sample of the batch",
    Mechanism.DATA,
    phrases=("label", "target"),
    phases=("forward", "backward"),
    modules=("head", "(loss)"),
)
def shuffled_labels(*, broken: bool) -> Loop:
    def batch(step: int, micro: int) -> tuple[Tensor, Tensor]:
        images, labels = tasks.images(step, micro)
        if broken:
            labels[::8] = labels[::8].add(1).remainder(CLASSES)
        return images, labels

    loop = classifier(MixerNet())
    loop.batch = batch
    return loop


@silent(
    "plain",
    "pytorch 31771 and its kin: `next(iter(loader))` in every step of a loader that does not shuffle",
    "every step sees the first batch of the data again",
    Mechanism.DATA,
    phrases=("same batch", "repeat"),
    first_wrong=1,
    modules=INPUT,
    phases=FORWARD,
    visible=True,
)
def first_batch_only(*, broken: bool) -> Loop:
    loop = graph()
    pool = [copy.deepcopy(tasks.graphs(i, 0)) for i in range(loop.steps)]
    loop.batch = lambda step, _micro: pool[0 if broken else step]
    return loop
