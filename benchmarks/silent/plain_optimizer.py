"""Silent errors of one process: the optimizer, the learning rate, gradients between backward and step, restarts."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.silent import tasks
from benchmarks.silent.case import Mechanism, silent
from benchmarks.silent.loop import Loop
from benchmarks.silent.models import WIDTH, ConvNet, MessagePassing, MixerNet, TinyLstm, TinyMlp, TinyTransformer

MOVES = (
    "does not move",
    "do not move",
    "not change",
    "unchanged",
    "not updated",
    "stands still",
    "frozen",
    "no update",
)


def sgd(model: nn.Module, rate: float = 0.1) -> torch.optim.Optimizer:
    """Return SGD with momentum."""
    return torch.optim.SGD(model.parameters(), lr=rate, momentum=0.5)


def adam(model: nn.Module, rate: float = 3e-3) -> torch.optim.Optimizer:
    """Return AdamW."""
    return torch.optim.AdamW(model.parameters(), lr=rate)


def clips(model: nn.Module, length: float = 1.0) -> Callable[[int], None]:
    """Return what clips gradients by their norm between backward and step."""

    def between(_step: int) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), length)

    return between


def classifier(model: nn.Module, optimizer: Any = None, **options: Any) -> Loop:
    """Return the training of a classifier: of rows if it is a perceptron, else of images."""
    batch = tasks.table if isinstance(model, TinyMlp) else tasks.images
    return Loop(model=model, optimizer=optimizer or sgd(model), batch=batch, loss_of=tasks.classified, **options)


def language(model: nn.Module, optimizer: Any = None, **options: Any) -> Loop:
    """Return the training of a language model."""
    return Loop(model=model, optimizer=optimizer or adam(model), batch=tasks.words, loss_of=tasks.continued, **options)


def graph(optimizer: Callable[[nn.Module], Any] = adam, **options: Any) -> Loop:
    """Return the training of a graph network."""
    model = MessagePassing()
    return Loop(model=model, optimizer=optimizer(model), batch=tasks.graphs, loss_of=tasks.regressed, **options)


@silent(
    "plain",
    "stackoverflow 60335387",
    "`optimizer.zero_grad()` is missing, so gradients of all steps add up",
    Mechanism.SCALE,
    phrases=("zero_grad", "accumulat", "add up", "not cleared"),
    first_wrong=1,
    phases=("before_step", "backward", "optimizer"),
    visible=True,
)
def zero_grad_missing(*, broken: bool) -> Loop:
    loop = classifier(model := TinyMlp(), sgd(model, 0.01))
    if broken:
        loop.zero = lambda: None
    return loop


@silent(
    "plain",
    "pytorch forum 84911",
    "everything but batch norm is frozen, and the optimizer holds only the frozen head",
    Mechanism.STILL,
    phrases=MOVES,
    modules=("fc", "stem", "body"),
    phases=("optimizer",),
    visible=True,
)
def optimizer_of_frozen(*, broken: bool) -> Loop:
    model = ConvNet()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("bn" in name or (not broken and "fc" in name))
    return classifier(model, torch.optim.SGD(model.fc.parameters(), lr=0.1, momentum=0.5))


@silent(
    "plain",
    "mmpretrain 702",
    "stages are frozen in `train()`, which nobody calls, so the backbone is trained as well",
    Mechanism.FROZEN,
    phrases=("should be frozen", "not frozen"),
    phases=("backward", "before_step", "optimizer"),
    modules=("stem", "bn1"),
)
def freeze_never_called(*, broken: bool) -> Loop:
    model = ConvNet()
    model.stem.requires_grad_(broken)
    model.bn1.requires_grad_(broken)
    return classifier(model)


class _RemembersBranch(torch.optim.AdamW):
    """Where compiled, takes for ever the branch that it took without gradients."""

    is_compiled, is_idle = False, False

    def step(self, closure: Any = None) -> Any:
        has_gradients = any(p.grad is not None for group in self.param_groups for p in group["params"])
        self.is_idle = self.is_compiled and (self.is_idle or not has_gradients)
        return None if self.is_idle else super().step(closure)


@silent(
    "plain",
    "pytorch 115607",
    "after one step without gradients the compiled loop takes that branch for ever",
    Mechanism.STILL,
    phrases=MOVES,
    first_wrong=9,
    phases=("optimizer",),
    visible=True,
)
def stale_guard(*, broken: bool) -> Loop:
    loop = language(model := TinyLstm(), _RemembersBranch(model.parameters(), lr=3e-3))
    loop.optimizer.is_compiled = broken

    def between(step: int) -> None:
        if step == 8:  # a step without gradients, in both
            loop.optimizer.zero_grad()

    loop.between = between
    return loop


class _WritesIntoCopies(torch.optim.AdamW):
    """Writes updates of parameters that are not contiguous into contiguous copies, as `addcmul_` on MPS did."""

    def step(self, closure: Any = None) -> Any:
        strided = [p for group in self.param_groups for p in group["params"] if not p.is_contiguous()]
        kept = [p.detach().clone() for p in strided]
        result = super().step(closure)
        with torch.no_grad():
            for parameter, value in zip(strided, kept, strict=True):
                parameter.copy_(value)
                self.state[parameter]["exp_avg_sq"].zero_()
        return result


@silent(
    "plain",
    "pytorch MPS addcmul_ on a non-contiguous output (elanapearl's report)",
    "weights that are not contiguous never move",
    Mechanism.STILL,
    phrases=MOVES,
    modules=("patch",),
    phases=("optimizer",),
    visible=True,
)
def strided_weight(*, broken: bool) -> Loop:
    model = MixerNet()
    model.patch.weight = nn.Parameter(model.patch.weight.detach().T.contiguous().T)
    kind = _WritesIntoCopies if broken else torch.optim.AdamW
    return classifier(model, kind(model.parameters(), lr=3e-3))


@silent(
    "plain",
    "accelerate 2665, dlrover 584: an optimizer made before the parameters were replaced",
    "the head is replaced after the optimizer was made, which goes on with the old one",
    Mechanism.STILL,
    phrases=(*MOVES, "not hold", "not in the optimizer", "no optimizer"),
    modules=("head",),
    phases=("optimizer",),
    visible=True,
)
def replaced_head(*, broken: bool) -> Loop:
    model = TinyTransformer()
    optimizer = adam(model)
    model.head = nn.Linear(WIDTH, model.head.out_features, bias=False)
    if not broken:
        optimizer = adam(model)
    return language(model, optimizer)


@silent(
    "plain",
    "pytorch AMP examples: gradients are to be unscaled before they are clipped",
    "scaled gradients are clipped, and unscaled to next to nothing afterwards",
    Mechanism.SCALE,
    phrases=("unscal", "loss scale", "clip"),
    phases=("before_step", "optimizer"),
    visible=True,
)
def clip_before_unscale(*, broken: bool) -> Loop:
    loop = classifier(model := ConvNet(), sgd(model, 0.3))
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=1000)
    loop.backward = lambda loss: scaler.scale(loss).backward()

    def update(_step: int) -> None:
        if not broken:
            scaler.unscale_(loop.optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(loop.optimizer)
        scaler.update()

    loop.update = update
    return loop


@silent(
    "plain",
    "pytorch 148259, PixArt-alpha PR 160",
    "the generator of parameters is used up by the optimizer, so nothing is clipped",
    Mechanism.SCALE,
    phrases=("clip",),
    phases=("before_step", "optimizer"),
)
def exhausted_generator(*, broken: bool) -> Loop:
    model = TinyLstm()
    parameters = model.parameters()
    loop = language(model, torch.optim.SGD(parameters, lr=2.0))
    given = (lambda: parameters) if broken else model.parameters

    def between(_step: int) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            nn.utils.clip_grad_norm_(given(), 0.1)

    loop.between = between
    return loop


@silent(
    "plain",
    "transformers 34191, unsloth-zoo 1023",
    "micro batches of different lengths count alike: their means are averaged",
    Mechanism.LOSS,
    phrases=("token", "micro batch", "micro step", "weight of"),
    phases=("backward", "before_step", "forward"),
)
def mean_of_means(*, broken: bool) -> Loop:
    lengths = (2, 11)

    def batch(step: int, micro: int) -> tuple[Tensor, Tensor]:
        return tuple(each[:, : lengths[micro]] for each in tasks.words(step, micro))  # type: ignore[return-value]

    def loss_of(model: Any, given: tuple[Tensor, Tensor]) -> Tensor:
        mean = tasks.continued(model, given)
        return mean if broken else mean * given[0].shape[1] * 2 / sum(lengths)

    loop = language(TinyTransformer(), micro_steps=2)
    loop.batch, loop.loss_of = batch, loss_of
    return loop


@silent(
    "plain",
    "transformers: loss not divided by gradient_accumulation_steps (Trainer with num_items_in_batch)",
    "the loss is not divided by the number of micro batches",
    Mechanism.SCALE,
    phrases=("micro", "accumulation"),
    phases=("backward", "before_step"),
)
def undivided_accumulation(*, broken: bool) -> Loop:
    loop = classifier(model := MixerNet(), sgd(model, 0.02), micro_steps=4)
    if broken:
        loop.backward = lambda loss: (4 * loss).backward()
    return loop


@silent(
    "plain",
    "accelerate: AcceleratedScheduler steps once per process",
    "the schedule advances four times per step, so the learning rate is gone too early",
    Mechanism.SETTINGS,
    phrases=("learning rate",),
    first_wrong=1,
    phases=("optimizer",),
    visible=True,
)
def schedule_too_fast(*, broken: bool) -> Loop:
    loop = language(TinyTransformer())
    schedule = torch.optim.lr_scheduler.LinearLR(loop.optimizer, 1.0, 0.0, total_iters=loop.steps)

    def after(_step: int) -> None:
        for _ in range(4 if broken else 1):
            schedule.step()

    loop.after = after
    return loop


@silent(
    "plain",
    "pytorch 1489: state of a loaded optimizer is matched by position",
    "the optimizer's state is loaded in another order of parameters of equal shape",
    Mechanism.RESTART,
    phrases=("moment", "restart", "resume", "state"),
    first_wrong=20,
    phases=("optimizer",),
    restart=20,
    visible=True,
)
def permuted_state(*, broken: bool) -> Loop:
    loop = language(TinyTransformer(layers=3))

    def restore(saved: dict[str, Any]) -> None:
        loop.model.load_state_dict(saved["model"])
        names = [name for name, _ in loop.model.named_parameters()]
        if broken:  # as if layers had been listed in another order: 1, 2, 0
            turned = {f"blocks.{i}.": f"blocks.{(i + 1) % 3}." for i in range(3)}
            state = saved["optimizer"]["state"]
            other = [name.replace(name[:9], turned.get(name[:9], name[:9])) for name in names]
            saved["optimizer"]["state"] = {i: state[names.index(name)] for i, name in enumerate(other)}
        loop.optimizer.load_state_dict(saved["optimizer"])

    loop.restore = restore
    return loop


@silent(
    "plain",
    "deepspeed 5489, 6771: a checkpoint without the optimizer's state",
    "the optimizer begins anew after a restart, without moments",
    Mechanism.RESTART,
    phrases=("moment", "restart", "resume", "state"),
    first_wrong=20,
    phases=("optimizer",),
    restart=20,
    visible=True,
)
def state_not_restored(*, broken: bool) -> Loop:
    loop = graph()
    if broken:
        loop.restore = lambda saved: loop.model.load_state_dict(saved["model"])
    return loop


@silent(
    "plain",
    "Megatron-LM PR 7177: the learning rate after a restart",
    "the schedule begins anew after a restart, with its warm-up",
    Mechanism.RESTART,
    phrases=("learning rate", "restart", "resume"),
    first_wrong=20,
    phases=("optimizer",),
    restart=20,
    visible=True,
)
def schedule_restarts(*, broken: bool) -> Loop:
    loop = language(TinyLstm())
    schedule = torch.optim.lr_scheduler.LinearLR(loop.optimizer, 0.1, 1.0, total_iters=12)
    loop.after = lambda _step: schedule.step()
    loop.save = lambda: {
        "model": loop.model.state_dict(),
        "optimizer": loop.optimizer.state_dict(),
        "schedule": schedule.state_dict(),
    }

    def restore(saved: dict[str, Any]) -> None:
        loop.model.load_state_dict(saved["model"])
        loop.optimizer.load_state_dict(saved["optimizer"])
        if broken:
            loop.optimizer.param_groups[0]["lr"] *= 0.1
        else:
            schedule.load_state_dict(saved["schedule"])

    loop.restore = restore
    return loop


@silent(
    "plain",
    "timm and lightning trackers: EMA weights are left in the model after an evaluation",
    "the averaged weights, put in for an evaluation, are not taken out again",
    Mechanism.STILL,
    phrases=("between steps", "outside", "written", "not by the optimizer", *MOVES),
    first_wrong=10,
    phases=("parameter", "optimizer", "forward"),
    visible=True,
)
def average_left_in(*, broken: bool) -> Loop:
    loop = classifier(model := ConvNet())
    average = copy.deepcopy(model.state_dict())

    def after(step: int) -> None:
        for name, value in model.state_dict().items():
            average[name] += (0.1 * (value - average[name])).to(value.dtype)
        if step % 10 == 9:
            own = copy.deepcopy(model.state_dict())
            model.load_state_dict(average)
            if not broken:
                model.load_state_dict(own)

    loop.after = after
    return loop
