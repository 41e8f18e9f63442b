"""Laws that the rank judges by itself, as only it sees the loop: a row of its own tells how far one is broken."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np

from trainermon.alerts.laws.law import Law, LawRelation, LawStep, LawVerdict
from trainermon.core.catalogue import (
    CLIPPED_LATE,
    FROZEN_LATER,
    FROZEN_MOVED,
    GRADIENT_LOST,
    GRADIENTS_DROPPED,
    NOT_HELD,
    NOT_STEPPED,
    SHARES_MEMORY,
    STEP_REPEATED,
    TORCH_WARNED_SERIES,
)
from trainermon.core.derived import SUM
from trainermon.core.values import Kind


class Told(LawRelation):
    """What the rank tells of under this name is 0, or at most what the law's `steps` allows.

    Args:
        settings: `steps`, if the law has it.
        name: One of those in `core/catalogue.py`: a slot of `Kind.STATE`, or the name of a number of the step.
        kind: Of the rows.
    """

    def __init__(self, settings: Mapping[str, float], *, name: str, kind: Kind = Kind.STATE) -> None:
        super().__init__(settings)
        self._name, self._kind = name, kind

    def judge(self, step: LawStep) -> LawVerdict | None:  # noqa: D102 - as in LawRelation
        size = step.rows[self._kind][:, SUM]
        is_meant = np.array([self._name in (tensor.slot, tensor.name) for tensor in step.tensors], np.bool_)
        return LawVerdict(size, np.full(size.shape, self.settings.get("steps", 0.0)), is_meant & ~np.isnan(size))


TOLD: tuple[Law, ...] = (
    Law(
        name="still-reached",
        sentence="A parameter that gets a gradient on every step goes on getting one, as long as its module runs.",
        broken="Parameters that had a gradient on every step lost it, although their modules run",
        rows=(Kind.STATE,),
        phase="backward",
        names=(f"*.{GRADIENT_LOST}",),
        relation=partial(Told, name=GRADIENT_LOST),
        counts_steps=True,
        tolerance="none: 20 steps in a row with a gradient, then 10 without any",
        exceptions=(
            "parameters that no longer require a gradient, or are in no group of the optimizer any more",
            "modules that do not run: dropped layers, experts without tokens, heads of other tasks and languages",
            "parameters that take turns with others, or have been without a gradient before",
            "gradients that are there and zero: see `gradient-dead`",
        ),
        causes=(
            "the graph is cut from this step on: detach(), .data, no_grad(), or a numpy detour",
            "a term of the loss is left out from this step on",
        ),
        look_at="what the script does from this step on: the last module that lost its gradients, and what follows it",
    ),
    Law(
        name="stays-trained",
        sentence="A parameter that gets a gradient on every step goes on requiring one.",
        broken="Parameters that were trained were frozen later",
        rows=(Kind.STATE,),
        phase="backward",
        names=(f"*.{FROZEN_LATER}",),
        relation=partial(Told, name=FROZEN_LATER),
        counts_steps=True,
        tolerance="none: 20 steps in a row with a gradient, then 10 without any",
        exceptions=("what is frozen on purpose, as one layer after the other: the rule only notes it",),
        causes=(
            "requires_grad_(False) reached more of the model than was meant, by a name or a loop over modules",
            "a callback that freezes for an evaluation, or for another loss, does not undo it",
        ),
        look_at="who calls requires_grad_(False) on this step, and whether these parameters were meant",
    ),
    Law(
        name="held",
        sentence="What an optimizer steps in the place of a parameter is the one that the model computes with.",
        broken="The optimizer steps other tensors than the model computes with",
        rows=(Kind.STATE,),
        phase="optimizer",
        names=(f"*.{NOT_HELD}",),
        relation=partial(Told, name=NOT_HELD),
        tolerance="none: either it is the same tensor, or another one",
        exceptions=(
            "parameters that another optimizer of the process holds",
            "optimizers that hold copies of their own, or tensors of another model, that get gradients",
        ),
        causes=(
            "a module was replaced after the optimizer was made: a new head, layers with adapters",
            "load_state_dict(assign=True), or a model that was moved or wrapped, after the optimizer was made",
        ),
        look_at="the order in which the model is changed and the optimizer is made",
    ),
    Law(
        name="apart-in-memory",
        sentence="Trainable parameters lie in memory of their own, unless they are one parameter.",
        broken="Parameters lie in the same memory, and are stepped once for each",
        rows=(Kind.STATE,),
        phase="optimizer",
        names=(f"*.{SHARES_MEMORY}",),
        relation=partial(Told, name=SHARES_MEMORY),
        tolerance="none: they begin at the same address",
        exceptions=("frozen parameters", "parameters of which this rank holds nothing, and tensors without an address"),
        causes=(
            "weights were tied by `.data`: `head.weight.data = embedding.weight.data`",
            "a module was made of another one's tensors: `nn.Parameter(other.weight)`, a view, set_()",
        ),
        look_at="how the weights are tied: assign the parameter itself, `head.weight = embedding.weight`",
    ),
    Law(
        name="stepped",
        sentence="Every trainable parameter is stepped by an optimizer.",
        broken="Trainable parameters are stepped by no optimizer",
        rows=(Kind.STATE,),
        phase="optimizer",
        names=(f"*.{NOT_STEPPED}",),
        relation=partial(Told, name=NOT_STEPPED),
        settings={"steps": 0},
        tolerance="none: torch counts the writes to a parameter, and its sum tells of others",
        exceptions=(
            "parameters without a gradient",
            "parameters that another optimizer steps, or anything else writes to",
            "parameters of another optimizer that begins later",
            "optimizers that hold copies of their own",
            "what is left out on purpose, and requires gradients that nobody uses: nothing tells it from what was "
            "forgotten",
        ),
        causes=(
            "the optimizer was given the parameters of a part of the model, as of a new head: the rest rests",
            "a module was added, or replaced, after the optimizer was made",
        ),
        look_at="optimizer.param_groups against model.named_parameters()",
    ),
    Law(
        name="frozen-rests",
        sentence="A parameter that requires no gradient is not stepped, nor shrunk.",
        broken="Frozen parameters go on changing",
        rows=(Kind.STATE,),
        phase="optimizer",
        names=(f"*.{FROZEN_MOVED}",),
        relation=partial(Told, name=FROZEN_MOVED),
        settings={"steps": 1},
        tolerance="none for what the optimizer steps; a unit in the last place of the type for a common factor",
        exceptions=(
            "what is written to them otherwise: averages of other weights, target networks, statistics, code books",
            "16 of them are looked at, on the steps on which checksums are due",
            "sharded parameters, and those of Megatron and DeepSpeed",
        ),
        causes=(
            "they were frozen with a gradient left in them, if only zeros, as of zero_grad(set_to_none=False): the "
            "optimizer's momentum and weight decay go on",
            "the script decays all parameters by hand, the frozen ones, too",
        ),
        look_at="`.grad` of these parameters: set it to None, or take them out of the optimizer's groups",
    ),
    Law(
        name="once",
        sentence="The optimizer steps once with the gradients of a backward.",
        broken="The optimizer stepped more than once with the same gradients",
        is_of_the_whole=True,
        rows=(Kind.STEP,),
        phase="optimizer",
        names=(STEP_REPEATED,),
        relation=partial(Told, name=STEP_REPEATED, kind=Kind.STEP),
        tolerance="none: the gradients are the same tensors, and nothing has written to them",
        exceptions=(
            "gradients in buffers of a framework, as Megatron's and DeepSpeed's",
            "trainings in which no backward is seen, as in a CUDA graph",
        ),
        causes=(
            "optimizer.step() is called by the loop, and again by a trainer, a scaler or a callback",
            "the step stands in two branches of the loop, as at the end of an accumulation and after it",
        ),
        look_at="who calls optimizer.step(): each step is as long as two, and counted twice by schedulers and by Adam",
    ),
    Law(
        name="accumulates",
        sentence="An optimizer's step uses the gradients of all its micro steps.",
        broken="Gradients of micro steps were cleared before the optimizer could use them",
        is_of_the_whole=True,
        rows=(Kind.STEP,),
        phase="before_step",
        names=(GRADIENTS_DROPPED,),
        relation=partial(Told, name=GRADIENTS_DROPPED, kind=Kind.STEP),
        tolerance="none: a gradient is there, or it is not",
        exceptions=(
            "fewer than `grad_acc_steps` micro steps, as at the end of an epoch, or as many since they were cleared",
            "parameters that are moved between micro steps, and gradients that the script puts together by itself",
            "gradients that are cleared in place (`set_to_none=False`) or lie in buffers of a framework",
        ),
        causes=(
            "optimizer.zero_grad() stands in the loop over micro steps, or in both loops",
            "a validation, a probe of the gradient or another optimizer's loop clears gradients of the model",
        ),
        look_at="where the loop calls zero_grad: after the step, or before the first micro step, and nowhere else",
    ),
    Law(
        name="clipped-in-time",
        sentence="Gradients are clipped before the optimizer uses them.",
        broken="Gradients were clipped after the optimizer had used them, which has no effect",
        is_of_the_whole=True,
        rows=(Kind.STEP,),
        phase="optimizer",
        names=(CLIPPED_LATE,),
        relation=partial(Told, name=CLIPPED_LATE, kind=Kind.STEP),
        settings={"steps": 2},
        tolerance="a thousandth of the norm of a few small gradients",
        exceptions=(
            "limits that are not reached, or infinite, as to have the norm told",
            "gradients that are kept for the next backward, or are cleared in place before the next forward",
            "steps with a loss scaler in the script, gradients in buffers of a framework, sharded ones, and trainings "
            "of which not every step is collected",
        ),
        causes=(
            "clip_grad_norm_ or clip_grad_value_ stands behind optimizer.step()",
            "a trainer or a callback steps before the loop clips",
        ),
        look_at="the order of backward, clipping and step: the step has used gradients that were not clipped",
    ),
    Law(
        name="not-warned",
        sentence="torch has nothing to say against the script.",
        broken="torch has warned of what makes a training silently wrong",
        is_of_the_whole=True,
        rows=(Kind.STEP,),
        phase="before_step",
        names=(f"{TORCH_WARNED_SERIES}.*",),
        relation=partial(Told, name=TORCH_WARNED_SERIES, kind=Kind.STEP),
        tolerance="none: five kinds of warnings that never come in a training that does what it seems to",
        exceptions=(
            "the shapes of a loss that is computed without gradients, as in a validation",
            "a schedule that is before the optimizer where a loss scaler skips steps",
            "what the script's filters leave out, or what came before the monitor was there",
        ),
        causes=(
            "target_of_another_shape: a loss of [n, 1] and [n] compares each with each",
            "nothing_is_clipped: clip_grad_norm_ was given a generator of parameters that was read before",
            "samples_of_each_worker: each worker of an IterableDataset yields all samples",
            "zero_grad_of_a_copy: a module that DataParallel has copied clears nothing",
            "schedule_before_step: scheduler.step() comes before optimizer.step(), which loses the first rate",
        ),
        look_at="the warning in the rank's output: it names the line",
    ),
)
