"""Silent errors of data parallelism: what goes around the wrapper, or is done to a model after it was wrapped."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.silent import tasks
from benchmarks.silent.case import Mechanism, silent
from benchmarks.silent.loop import Loop
from benchmarks.silent.models import CLASSES, ConvNet, MixerNet, TinyLstm, TinyMlp, TinyTransformer
from benchmarks.silent.plain_optimizer import adam, classifier, language, sgd

COPIES = (
    "copies",
    "copy of",
    "replica",
    "ranks differ",
    "differ between ranks",
    "differs between ranks",
    "differ across ranks",
    "not the same on",
    "same on all ranks",
)
UNREDUCED = (*COPIES, "not reduced", "unreduced", "reduction", "all-reduce", "averag")
AFTER_BACKWARD = ("reduction", "before_step", "optimizer")
Context = contextlib.AbstractContextManager[Any]


def tables(model: nn.Module, optimizer: Any = None, **options: Any) -> Loop:
    """Return the training of a wrapped perceptron."""
    loop = classifier(model, optimizer, **options)
    loop.batch = tasks.table
    return loop


def quiet_when(model: DistributedDataParallel, is_quiet: Callable[[int, int], bool]) -> Callable[[int, int], Context]:
    """Return a loop's context in which those micro steps are not reduced for which `is_quiet` is true."""
    return lambda step, micro: model.no_sync() if is_quiet(step, micro) else contextlib.nullcontext()


@silent(
    "ddp",
    "x-jxmnop: DDP out of sync (TrainCheck)",
    "in every second step the loss is computed by the wrapped module itself, around the wrapper",
    Mechanism.UNREDUCED,
    phrases=UNREDUCED,
    first_wrong=1,
    phases=AFTER_BACKWARD,
    visible=True,  # the copies of every weight differ from this step on
    ranks=2,
)
def wrapper_bypassed(*, broken: bool) -> Loop:
    loop = language(model := DistributedDataParallel(TinyTransformer()))
    step = 0

    def before(number: int) -> None:
        nonlocal step
        step = number

    def loss_of(_model: Any, batch: Any) -> Tensor:
        return tasks.continued(model.module if broken and step % 2 else model, batch)

    loop.before, loop.loss_of = before, loss_of
    return loop


@silent(
    "ddp",
    "kohya sd-scripts 924, PR 604; trl 5282: the model is unwrapped before its forward",
    "all losses are computed by the unwrapped model, so each rank trains a model of its own",
    Mechanism.UNREDUCED,
    phrases=UNREDUCED,
    phases=AFTER_BACKWARD,
    visible=True,  # reduced gradients are each rank's own, and the copies differ
    ranks=2,
)
def always_unwrapped(*, broken: bool) -> Loop:
    loop = tables(model := DistributedDataParallel(TinyMlp()))
    loop.loss_of = lambda _model, batch: tasks.classified(model.module if broken else model, batch)
    return loop


@silent(
    "ddp",
    "pytorch 104336: ddp.cpu() and back replaces the parameters that the hooks are on (TrainCheck)",
    "all parameters are replaced by copies after the model was wrapped, so no hook reduces their gradients",
    Mechanism.UNREDUCED,
    phrases=UNREDUCED,
    phases=AFTER_BACKWARD,
    visible=True,  # the copies of every weight differ
    ranks=2,
)
def parameters_replaced(*, broken: bool) -> Loop:
    model = TinyLstm()
    if not broken:
        _replace_parameters(model)
    wrapped = DistributedDataParallel(model)
    if broken:
        _replace_parameters(model)
    return language(wrapped)


def _replace_parameters(model: nn.Module) -> None:
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(parameter.detach().clone()))


@silent(
    "ddp",
    "pytorch 12603: a module gets a new parameter after the model was wrapped",
    "a new head is put in after wrapping; its gradients alone are not reduced",
    Mechanism.UNREDUCED,
    phrases=UNREDUCED,
    modules=("fc",),
    phases=AFTER_BACKWARD,
    visible=True,  # the head's copies differ, all others agree
    ranks=2,
)
def head_replaced_after_wrapping(*, broken: bool) -> Loop:
    model = ConvNet()
    head = nn.Linear(model.fc.in_features, CLASSES)
    if not broken:
        model.fc = head
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    model.fc = head
    return classifier(wrapped, sgd(wrapped))


@silent(
    "ddp",
    "Lightning 20340: BackboneFinetuning under DDP",
    "layers that were frozen when the model was wrapped are unfrozen later, and their gradients are not reduced",
    Mechanism.UNREDUCED,
    phrases=UNREDUCED,
    first_wrong=10,
    modules=("patch",),
    phases=AFTER_BACKWARD,
    visible=True,  # their copies differ from this step on
    ranks=2,
)
def unfrozen_after_wrapping(*, broken: bool) -> Loop:
    model = MixerNet()
    model.patch.requires_grad_(not broken)
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    model.patch.requires_grad_(requires_grad=False)
    loop = classifier(wrapped, adam(wrapped))

    def before(step: int) -> None:
        if step == 10:
            model.patch.requires_grad_()

    loop.before = before
    return loop


@silent(
    "ddp",
    "FunASR PR 3472: no_sync is left in the first micro batch",
    "the first micro batch is reduced instead of the last, so what comes after it stays on its rank",
    Mechanism.UNREDUCED,
    phrases=UNREDUCED,
    phases=("backward", *AFTER_BACKWARD),
    visible=True,  # the copies of every weight differ
    ranks=2,
)
def first_micro_step_reduced(*, broken: bool) -> Loop:
    model = DistributedDataParallel(TinyTransformer())
    reduced = 0 if broken else 3
    return language(model, micro_steps=4, context=quiet_when(model, lambda _step, micro: micro != reduced))


@silent(
    "ddp",
    "pytorch no_sync: an index that counts from one never reaches the last micro batch",
    "no micro batch leaves no_sync, so nothing is ever reduced",
    Mechanism.UNREDUCED,
    phrases=UNREDUCED,
    phases=AFTER_BACKWARD,
    visible=True,  # the copies of every weight differ
    ranks=2,
)
def always_in_no_sync(*, broken: bool) -> Loop:
    model = DistributedDataParallel(MixerNet())
    return classifier(
        model, adam(model), micro_steps=2, context=quiet_when(model, lambda _step, micro: broken or micro < 1)
    )


@silent(
    "ddp",
    "accelerate PR 1624, transformers 23935: the end of the data does not synchronise",
    "the update at the end of every epoch is made within no_sync",
    Mechanism.UNREDUCED,
    phrases=UNREDUCED,
    first_wrong=9,
    phases=AFTER_BACKWARD,
    visible=True,  # the copies of every weight differ from this step on
    ranks=2,
)
def epoch_ends_in_no_sync(*, broken: bool) -> Loop:
    model = DistributedDataParallel(TinyLstm())
    is_last = lambda step: step % 10 == 9  # noqa: E731
    return language(
        model, micro_steps=2, context=quiet_when(model, lambda step, micro: micro < 1 or (broken and is_last(step)))
    )
