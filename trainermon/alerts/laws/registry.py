"""All laws: those that are built in, and those of installed packages.

[project.entry-points."trainermon.laws"]
mine = "package.module:MY_LAW"
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType

from trainermon.alerts.laws.clipping import OneFactor
from trainermon.alerts.laws.experts import OwnExperts
from trainermon.alerts.laws.gradients import BeginEmpty, EveryRankGradient, Reached, SomeGradient
from trainermon.alerts.laws.inputs import DistinctInputs, NewInputs
from trainermon.alerts.laws.law import Law
from trainermon.alerts.laws.precision import NotRoundedAway
from trainermon.alerts.laws.recomputation import RepeatsForward
from trainermon.alerts.laws.reductions import Linear, OwnData, UsualScale
from trainermon.alerts.laws.replicas import EqualCopies
from trainermon.alerts.laws.restarts import RESTART_LAWS
from trainermon.alerts.laws.setting_laws import SETTING_LAWS
from trainermon.alerts.laws.starts import AlikeAtStart, AliveModules, EachLayerOnce
from trainermon.alerts.laws.told import TOLD
from trainermon.alerts.laws.updates import Copied, Moves, NoLeap, NotUndone
from trainermon.core.catalogue import (
    BATCH_REUSED,
    GRADIENT_KEPT,
)
from trainermon.core.errors import RuleError
from trainermon.core.values import Kind

GROUP = "trainermon.laws"

LAWS: tuple[Law, ...] = (
    Law(
        name="moves",
        sentence="A parameter that has a gradient changes when the optimizer steps.",
        broken="Parameters that have a gradient did not change when the optimizer stepped",
        rows=(Kind.PARAM_UPDATED, Kind.PARAM_ORIGIN, Kind.GRAD_REDUCED, Kind.STEP),
        also=(Kind.EXP_AVG_SQ,),
        phase="optimizer",
        relation=Moves,
        tolerance="a step below a unit in the last place of the type is lost by rounding, and breaks nothing",
        exceptions=(
            "steps that the framework skips",
            "learning rates of zero, of any group: no row tells which parameters rest with it",
        ),
        causes=(
            "the optimizer was made before the model was moved, wrapped or sharded, and holds other tensors",
            "a step function that was compiled or replaced no longer steps",
            "the step is undone: weights are loaded, or gathered from an old copy, after it",
        ),
        look_at="whether optimizer.param_groups holds the very tensors of model.parameters()",
    ),
    Law(
        name="not-undone",
        sentence="What a step has made of a parameter is there when the next step begins.",
        broken="Parameters are set back to what they were before a step, again and again",
        rows=(Kind.PARAM_ORIGIN, Kind.PARAM_UPDATED),
        phase="optimizer",
        relation=NotUndone,
        tolerance="none: compared are all moments, bit for bit",
        exceptions=(
            "all parameters at once, as a rollback or a line search does; other weights for a while, as for evaluation",
            "tensors of which each element lies at a bound, as after clamping",
            "what is written over with something new: averages, projections, masks",
        ),
        causes=(
            "an old copy is written back: a cache, an average, or shards that are gathered into the wrong buffer",
            "two modules that should share a weight are kept equal by copying, in the wrong direction",
        ),
        look_at="what writes to these parameters between one step and the next forward",
    ),
    Law(
        name="no-leap",
        sentence="A parameter's largest element is never ten thousand times what it was a step before.",
        broken="Parameters became ten thousand times as large, and more, at once",
        rows=(Kind.PARAM_ORIGIN, Kind.PARAM_UPDATED, Kind.STEP),
        phase="optimizer",
        relation=NoLeap,
        settings={"factor": 1e4},
        tolerance="what was smaller than the learning rate counts as that large",
        exceptions=("parameters that were all zeros",),
        causes=(
            "a bit has flipped in the memory of an accelerator",
            "the script, or a load, wrote something else into the parameter",
            "the step was made with a gradient that is still multiplied by the loss scale, or not clipped",
        ),
        look_at="whether it leapt between two steps, when no optimizer writes; another rank's copy shows what it was",
    ),
    Law(
        name="copied",
        sentence="The parameters that the model computes with are those that the optimizer holds, rounded.",
        broken="Parameters in the model differ from those in its optimizer",
        rows=(Kind.PARAM_USED, Kind.PARAM_ORIGIN),
        phase="optimizer",
        relation=Copied,
        tolerance="a unit in the last place of the model's type",
        exceptions=("types without a fixed precision, such as float8 with scales",),
        causes=(
            "weights were loaded into the model, not into the optimizer's main copy",
            "the gather after the step is missing, or went to another buffer",
            "FSDP2 keeps what it has gathered (reshard_after_backward=False) and gathers nothing anew after the step",
        ),
        look_at="where the model's weights were last written: after the step, or by loading a checkpoint",
    ),
    Law(
        name="linear",
        sentence="What ranks get from a reduction is the scaled sum of what each of them had.",
        broken="Reduced gradients are not the sum, nor the average, of what the ranks had",
        rows=(Kind.GRAD_REDUCED, Kind.GRAD_UNREDUCED),
        phase="reduction",
        holds_for_sums=True,
        relation=Linear,
        tolerance="1e-5 for the order of sums, and 2^-7 of a term, for 16 bits, over the root of their number",
        exceptions=(
            "ranks on several nodes, unless a controller runs: an agent sees its own",
            "experts, whose ranks share data in another way",
            "torch's hooks for DDP that compress with loss, as PowerSGD, if they are registered when the monitor is "
            "attached (one of the script's own that does so breaks the law by design)",
            "what FSDP2 and DDP are told to ignore",
        ),
        causes=(
            "the forward bypassed the wrapper, or no_sync() was left on, so that nothing is reduced",
            "a collective ran in the wrong group, or its result was lost",
            "gradients were read before the reduction had ended",
        ),
        look_at="the collective that reduces these parameters, its group, and who waits for it",
    ),
    Law(
        name="usual-scale",
        sentence="A reduction averages gradients over the ranks, or sums them, and counts no rank twice.",
        broken="Reduced gradients are neither the average over the ranks nor their sum, but a multiple of these",
        is_of_the_whole=True,
        rows=(Kind.GRAD_REDUCED, Kind.GRAD_UNREDUCED),
        phase="reduction",
        relation=UsualScale,
        tolerance="a hundredth, for the factor that most parameters have in common",
        exceptions=(
            "factors that no count of ranks explains, as 1 over the number of tokens",
            "a sum where the loss is a mean: no row tells which of the two is meant",
            "experts, and ranks on several nodes",
        ),
        causes=(
            "the loss or the gradient is divided by the number of ranks although the reduction averages",
            "the average is multiplied by the size of another axis, or taken over it once more",
        ),
        look_at="who divides by the number of ranks: the loss, a hook, the wrapper, the optimizer",
    ),
    Law(
        name="equal-gradients",
        sentence="Ranks that hold copies of a parameter have the same reduced gradient of it.",
        broken="Ranks that hold copies of a parameter got different reduced gradients for it",
        rows=(Kind.GRAD_REDUCED,),
        phase="reduction",
        holds_for_sums=True,
        relation=EqualCopies,
        tolerance=(
            "1e-4 of the norm for the order of sums, two units in the last place of the type over the root of the "
            "number of elements, and 1e-6 of the largest norm of a gradient, as a small one may be nothing but rounding"
        ),
        exceptions=(
            "parts of tensors that no other rank of the node holds",
            "trainings in which ranks step apart on purpose, as local SGD",
        ),
        causes=(
            "the gradients of these parameters are not reduced: over data-parallel ranks as the forward bypassed the "
            "wrapper or no_sync() was left on, over tensor-parallel ones as a norm or router is not marked for it",
            "parameters were unfrozen, or replaced, after DDP had wrapped the model: it reduces what it was given, and "
            "what required a gradient then",
            "a part of the model had no part in the loss of some ranks (a detached branch, a condition on the data), "
            "and DDP, without find_unused_parameters=True, waited for its gradients in vain",
            "a collective lost what it carried on one rank, or ran in the wrong group",
            "copies were computed from other random numbers, as the dropout of tensor-parallel ranks",
        ),
        look_at="whether these parameters got a gradient on every rank, and what reduces it; their weights part in the "
        "step that follows",
    ),
    Law(
        name="own-experts",
        sentence="Experts that lie on different ranks have gradients of their own.",
        broken="Different experts got the same gradients",
        rows=(Kind.GRAD_REDUCED,),
        phase="reduction",
        relation=OwnExperts,
        tolerance="none: compared are all moments, bit for bit",
        exceptions=(
            "gradients that are zero, as of experts without tokens",
            "experts of one rank, and ranks on several nodes",
        ),
        causes=(
            "the gradients of experts are reduced over all data-parallel ranks, as if these held copies of them",
            "the groups of expert parallelism and of expert data parallelism are interchanged",
        ),
        look_at="the process group that reduces the gradients of experts, and what marks a parameter as one",
    ),
    Law(
        name="one-clip-factor",
        sentence="Clipping multiplies the gradients of all ranks by the same factor.",
        broken="Ranks clipped their gradients by different factors",
        is_of_the_whole=True,
        rows=(Kind.STEP, Kind.GRAD_REDUCED),
        phase="before_step",
        relation=OneFactor,
        tolerance="1e-4, and two units in the last place of the gradients' type",
        exceptions=(
            "steps with a loss scaler in the script: what unscales cannot be told from what clips",
            "ranks of different pipeline stages",
            "ranks with different norms that clipping does not make equal: each parameter may be clipped by itself",
        ),
        causes=(
            "each rank clips by the norm of the part that it holds, not by that of all",
            "one rank clips, or to another limit, and others do not",
        ),
        look_at="what is called between backward and step, and whether its norm is that of all ranks that hold parts",
    ),
    Law(
        name="own-gradients",
        sentence="Data-parallel ranks have different gradients before they are reduced.",
        broken="Data-parallel ranks had the same gradients before the reduction, as if they read the same data",
        rows=(Kind.GRAD_UNREDUCED,),
        phase="input",
        holds_for_sums=True,
        relation=OwnData,
        tolerance="none: what is computed from other data differs",
        exceptions=(
            "trainings that give all ranks the same on purpose, as to overfit one batch",
            "models in no wrapper: the script may have reduced their gradients before they are read",
        ),
        causes=("the sampler does not know the rank, so that all ranks read the same data",),
        look_at="the sampler's num_replicas and rank, and its seed",
    ),
    Law(
        name="distinct-inputs",
        sentence="No two data-parallel ranks, and no two micro steps, are given the same input.",
        broken="Data-parallel ranks or micro steps were given the same input",
        rows=(Kind.ACTV,),
        names=("*.input.*",),
        phase="input",
        relation=DistinctInputs,
        tolerance="none: compared are all moments, bit for bit",
        exceptions=("inputs that stay the same from step to step", "ranks on several nodes"),
        causes=(
            "the sampler does not know the rank",
            "the iterator is made anew in each micro step, or a batch is used for all of them",
        ),
        look_at="the sampler, and where the iterator over the data is made",
    ),
    Law(
        name="new-inputs",
        sentence="An input does not come again within a few steps while others come once.",
        broken="The same inputs came again within a few steps, while others came once",
        rows=(Kind.ACTV,),
        names=("*.input.*", BATCH_REUSED),
        also=(Kind.STEP,),
        phase="input",
        relation=NewInputs,
        settings={"share": 0.25, "lag": 4},
        tolerance="none: compared are all moments, bit for bit",
        exceptions=(
            "trainings that go over a few batches again and again, or make five steps and more with each",
            "steps that are given the very tensors of the step before by position, as several epochs over one batch",
        ),
        causes=("the workers of the loader share a seed: each of them draws the same",),
        look_at="worker_init_fn, and which random numbers the data set draws",
    ),
    Law(
        name="reached",
        sentence="Every trainable parameter gets a gradient that is not zero.",
        broken="Trainable parameters have never had a gradient",
        rows=(Kind.GRAD_REDUCED,),
        phase="backward",
        relation=Reached,
        counts_steps=True,
        settings={"steps": 20},
        tolerance="none: zero is exact",
        exceptions=(
            "experts",
            "a bias of one element whose gradient is zero, while that of its weight is not, as of a critic whose loss "
            "is the difference of two of its means",
            "branches that are used rarely, by design: switch the rule off by their names",
        ),
        causes=(
            "a part of the graph is detached, or ends in no loss",
            "layers that no pipeline stage runs",
            "a layer was replaced after it had been given to the optimizer",
        ),
        look_at="whether the module's forward runs, and whether its output requires a gradient",
    ),
    Law(
        name="begin-empty",
        sentence="Gradients are cleared between one step of the optimizer and the next.",
        broken="Gradients were not cleared between steps",
        is_of_the_whole=True,
        rows=(Kind.STATE,),
        phase="backward",
        names=(f"*.{GRADIENT_KEPT}",),
        relation=BeginEmpty,
        seen_after=2,  # looked at from the second step on that begins with what the one before has left
        tolerance="none: zero is exact",
        exceptions=(
            "gradients in buffers of a framework, as Megatron's, DeepSpeed's, FSDP's and DDP's with "
            "`gradient_as_bucket_view`",
            "gradients that something else is written to in between, as a decay of what is kept on purpose",
        ),
        causes=(
            "optimizer.zero_grad() is missing, or not reached",
            "it is called on another optimizer, or on a copy of the model",
        ),
        look_at="where the loop calls zero_grad: each step adds to the gradients of all steps before it",
    ),
    Law(
        name="every-rank-gradient",
        sentence="Every data-parallel rank has a gradient of its own to reduce.",
        broken="A data-parallel rank had no gradient of its own, while others had",
        is_of_the_whole=True,
        rows=(Kind.GRAD_UNREDUCED,),
        phase="backward",
        relation=EveryRankGradient,
        tolerance="none: zero is exact",
        exceptions=(
            "ranks that have run out of data, as under torch's Join",
            "batches without any label that counts",
            "ranks on several nodes",
        ),
        causes=(
            "all labels of this rank's data are masked, as by another tokenizer or template",
            "its loss does not depend on the parameters, or is multiplied by zero",
        ),
        look_at="the labels that count in the batches of this rank",
    ),
    Law(
        name="some-gradient",
        sentence="No step is made without a gradient.",
        broken="The optimizer stepped without any gradient",
        is_of_the_whole=True,
        rows=(Kind.GRAD_REDUCED, Kind.STEP),
        phase="reduction",
        relation=SomeGradient,
        tolerance="none: zero is exact",
        exceptions=("a single batch without any label that counts",),
        causes=(
            "gradients are never synchronised: a flag that was set for accumulation stayed on",
            "a collective lost what it carried",
            "the loss does not depend on the parameters",
        ),
        look_at="loss.requires_grad, and who last called set_requires_gradient_sync or no_sync",
    ),
    Law(
        name="not-rounded-away",
        sentence="Rounding to the type of the parameters leaves something of most steps.",
        broken="Rounding to the type of the parameters took most of the optimizer's steps away",
        rows=(Kind.PARAM_ORIGIN, Kind.GRAD_REDUCED, Kind.STEP),
        phase="optimizer",
        relation=NotRoundedAway,
        settings={"share": 0.25, "steps": 40},
        tolerance="a typical step is larger than half a unit in the last place of a typical element",
        exceptions=(
            "optimizers without betas and momentum",
            "parameters with a main copy in 32 bits",
        ),
        causes=(
            "the model was cast to 16 bits, and the optimizer was made of that",
            "the main copies of a mixed precision optimizer were switched off",
        ),
        look_at="the dtype of what is in optimizer.param_groups, and whether autocast was meant instead",
    ),
    Law(
        name="alike-at-start",
        sentence="Matrices of the same role begin alike in all layers.",
        broken="Matrices begin with another spread than those of the same role in the nearest layers",
        rows=(Kind.PARAM_ORIGIN,),
        phase="forward",
        relation=AlikeAtStart,
        settings={"factor": 4},
        tolerance="a factor of 4 beside the nearest layers, which leaves room for a scale by depth",
        exceptions=("layers that are made to begin otherwise", "starts other than the first one, or not at step 0"),
        causes=(
            "a layer was left out of the initialisation, or initialised twice",
            "weights of a checkpoint were loaded into some of the layers only",
        ),
        look_at="the initialisation of that layer, and the keys that load_state_dict did not find",
    ),
    Law(
        name="each-layer-once",
        sentence="Pipeline stages hold every layer, each of them in one stage.",
        broken="Pipeline stages hold layers twice, or not at all",
        rows=(Kind.GRAD_REDUCED,),
        phase="forward",
        relation=EachLayerOnce,
        tolerance="none: layers are counted",
        exceptions=(
            "stages that count their layers from 0, and ranks on several nodes",
            "layers that stages share, or that are frozen between others",
        ),
        causes=("the division of layers over stages leaves a remainder out, or counts it twice",),
        look_at="the offset of each stage's layers, and the number of layers over that of the stages",
    ),
    Law(
        name="alive",
        sentence="What a module returns is not zero throughout.",
        broken="Modules have returned nothing but zeros since the start",
        rows=(Kind.ACTV,),
        phase="forward",
        names=("*.output.0",),
        relation=AliveModules,
        settings={"steps": 20},
        tolerance="none: zero is exact",
        exceptions=("experts", "branches that a gate of zero, which is not trained, switches off by design"),
        causes=(
            "a layer was initialised with zeros, and its gradient is zero for that",
            "a mask or a scale of zero, or a dropout of all elements",
        ),
        look_at="the module's input, and its weights on the first step",
    ),
    Law(
        name="repeats-forward",
        sentence="What activation checkpointing computes again is what the forward computed.",
        broken="Activation checkpointing computed other values in the backward than the forward had",
        rows=(Kind.ACTV_RECOMPUTED, Kind.ACTV),
        phase="backward",
        names=("*.output.0",),
        relation=RepeatsForward,
        tolerance="4 units in the last place of a typical element, and 2^-10 of it, over the root of their number",
        exceptions=(
            "modules that are called several times in a micro step: which call is repeated first is not known",
            "compiled models, whose recomputation is not seen",
        ),
        causes=(
            "the random state is not put back, so that dropout draws another mask: `preserve_rng_state=False`, a "
            "generator of the script's own",
            "the mode, the autocast context or a global that the forward reads is another one in the backward",
            "the inputs that were kept were written to in between",
            "a module goes on with each call, as the power iteration of spectral_norm",
        ),
        look_at="the first module of the block that is named: what does it read besides its arguments?",
    ),
    *SETTING_LAWS,
    *RESTART_LAWS,
    *TOLD,
)


_BUILT_IN: Mapping[str, Law] = MappingProxyType({law.name: law for law in LAWS})


@lru_cache(maxsize=1)
def _entry_points() -> Mapping[str, importlib.metadata.EntryPoint]:
    return {point.name: point for point in importlib.metadata.entry_points(group=GROUP)}


def law_names() -> tuple[str, ...]:
    """Return the names of all laws: the built-in ones, then those of installed packages."""
    return (*_BUILT_IN, *(name for name in _entry_points() if name not in _BUILT_IN))


@lru_cache(maxsize=256)
def law_of(name: str) -> Law:
    """Return the law of this name, one of `law_names()`.

    Raises:
        RuleError: It is another package's, and cannot be loaded or is no law.
    """
    if name in _BUILT_IN:
        return _BUILT_IN[name]
    point = _entry_points()[name]
    try:
        law = point.load()
    except Exception as error:  # the border: another package's import may do anything
        raise RuleError(f"law {point.name!r} of {point.value} cannot be loaded: {error!r}") from error
    if not isinstance(law, Law):
        raise RuleError(f"law {point.name!r} of {point.value} is {law!r}, expected a trainermon.alerts.laws.law.Law")
    return law
