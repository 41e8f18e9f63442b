"""Names that trainermon shows to the outside: kinds, statistics, and the well-known series.

Metrics have a list of their own, `core/metrics.py`. Names are public API: one is added freely, changed or removed
with an entry in the changelog.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from trainermon.core.values import Kind

LOSS_SERIES = "loss"
"""Name of the `Kind.LOSS` series, the training loss that the script records."""

STEP_TIME_SERIES = "duration_seconds"
"""Name of the `Kind.STEP` series of the wall time of a step in seconds."""

GLOBAL_NORM_SERIES = "global_grad_norm"
"""`Kind.STEP`: L2 norm of all gradients over the job before clipping, as the framework itself returned it."""

CLIP_RATIO_SERIES = "clip_ratio"
"""`Kind.STEP`: what clipping multiplied the gradients by, 0 to 1."""

LOSS_SCALE_SERIES = "loss_scale"
"""`Kind.STEP`: what the loss was multiplied by."""

SKIPPED_SERIES = "skipped"
"""`Kind.STEP`: 1 if the framework skipped the optimizer step, else 0."""

TOKENS_SERIES = "tokens"
"""`Kind.STEP`: tokens of this rank's share of the step, as the script records them."""

TOKENS_PER_SECOND_SERIES = "tokens_per_second"
"""`Kind.STEP`: the recorded tokens of this rank over the duration of the step."""

SAMPLES_SERIES = "samples"
"""`Kind.STEP`: samples of this rank's share of the step, as the script records them."""

LEARNING_RATE_SERIES = "learning_rate"
"""`Kind.STEP`: learning rate of a parameter group; the slot is the group's number."""

WEIGHT_DECAY_SERIES = "weight_decay"
"""`Kind.STEP`: weight decay of a parameter group; see `GROUP_SETTINGS`."""

GROUP_SETTINGS: Mapping[str, tuple[str, int | None]] = MappingProxyType(
    {
        WEIGHT_DECAY_SERIES: ("weight_decay", None),
        "beta1": ("betas", 0),
        "beta2": ("betas", 1),
        "epsilon": ("eps", None),
        "momentum": ("momentum", None),
    }
)
"""`Kind.STEP`, a row on the first step and whenever it changes: what is set for a parameter group, whose number is the
slot; by series the key in `param_groups`, and the place in it."""

GRADIENT_AT_STEP = "gradient_at_step"
"""`Kind.STATE`, a slot: a gradient as the step finds it, of the few that the script wrote to after the backward."""

GRADIENT_KEPT = "gradient_kept"
"""`Kind.STATE`, a slot: a gradient as a step's first backward finds it, where nothing has cleared it since the last."""

GRADIENT_LOST = "gradient_lost"
"""`Kind.STATE`, a slot: for how many collected steps a parameter whose module runs has had no gradient any more."""

FROZEN_LATER = "frozen_later"
"""`Kind.STATE`, a slot: for how many collected steps a parameter that was trained has required no gradient; once."""

NOT_HELD = "not_held"
"""`Kind.STATE`, a slot: 1 for a trainable parameter that the optimizer does not hold, while it holds another in its
place, else 0; rows where one is found, and when that changes."""

NOT_STEPPED = "not_stepped"
"""`Kind.STATE`, a slot: on how many collected steps a parameter of no group had a gradient, while nothing wrote to it;
rows where there is one, 0 of the others."""

SHARES_MEMORY = "shares_memory"
"""`Kind.STATE`, a slot: 1 for a trainable parameter that begins where another one does, else 0; in the first step,
where there are some."""

FROZEN_MOVED = "frozen_moved"
"""`Kind.STATE`, a slot: on how many looks in a row a parameter that requires no gradient was stepped or shrunk all the
same; rows of some of them, on the step behind those on which checksums are due."""

ROLLOUT_SERIES = (
    *("rl_mean_abs", "rl_p99_abs", "rl_max_abs", "rl_probability_mean_abs", "rl_probability_max_abs", "rl_k1", "rl_k3"),
    *("rl_chi2_token", "rl_ratio", "rl_ratio_z", "rl_ess", "rl_outside_tenth", "rl_outside_half"),
    *("rl_perplexity_rollout", "rl_perplexity_train", "rl_correlation", "rl_slope", "rl_tokens", "rl_floors"),
    *("rl_weights_differ", "rl_version_lag", "rl_not_comparable"),
)
"""`Kind.STEP`: what `trainermon.rl` records of a step's rollouts; docs/rl.md says what each is."""

ROLLOUT_DIFFERENCE_SERIES = "rl_mean_abs"
"""`Kind.STEP`: mean absolute difference of the log-probabilities of rollout and trainer, nats; by `trainermon.rl`."""

ROLLOUT_RATIO_SERIES = "rl_ratio"
"""`Kind.STEP`: mean of the ratios of trainer and rollout over sampled tokens; 1 if what was logged was sampled from."""

ROLLOUT_SAMPLES_SERIES = "rl_ess"
"""`Kind.STEP`: effective share of the sampled tokens under these ratios, 0 to 1."""

ACCELERATOR_UTILIZATION_SERIES = "accelerator_utilization"
"""`Kind.STEP`: share of time in which the rank's accelerator computed at all, 0 to 1, as its driver tells the agent."""

ACCELERATOR_MEMORY_SERIES = "accelerator_memory_bytes"
"""`Kind.STEP`: memory in use on the rank's accelerator, by all processes."""

ACCELERATOR_MEMORY_RATIO_SERIES = "accelerator_memory_ratio"
"""`Kind.STEP`: the share of its memory that is in use, 0 to 1."""

ACCELERATOR_POWER_SERIES = "accelerator_power_watts"
"""`Kind.STEP`: what the rank's accelerator draws."""

ACCELERATOR_TEMPERATURE_SERIES = "accelerator_temperature_celsius"
"""`Kind.STEP`: temperature of its chip."""

ACCELERATOR_CLOCK_SERIES = "accelerator_clock_hertz"
"""`Kind.STEP`: clock of its cores."""

ACCELERATOR_THROTTLED_SERIES = "accelerator_throttled"
"""`Kind.STEP`: 1 while heat or the power supply slows it down, else 0; its own power limit does not count."""

ACCELERATOR_SERIES = (
    *(ACCELERATOR_UTILIZATION_SERIES, ACCELERATOR_MEMORY_SERIES, ACCELERATOR_MEMORY_RATIO_SERIES),
    *(ACCELERATOR_POWER_SERIES, ACCELERATOR_TEMPERATURE_SERIES, ACCELERATOR_CLOCK_SERIES),
    ACCELERATOR_THROTTLED_SERIES,
)
"""`Kind.STEP`: what the agent adds to the steps of a rank; docs/accelerators.md says what each is."""

BATCH_REUSED = "batch_reused"
"""`Kind.STEP`: a row of 1 where every forward of a step was given the very tensors that the forward before was."""

UNEVEN_STEPS = "uneven_steps"
"""`Kind.STEP`: a row of 1 on each step under torch's `Join`, where ranks may take different numbers of steps: from the
first one on they are not compared by step."""

STEP_REPEATED = "step_repeated"
"""`Kind.STEP`: a row where the optimizer steps once more with the gradients of the step before; how often so far."""

GRADIENTS_DROPPED = "gradients_dropped"
"""`Kind.STEP`: a row where gradients were cleared between the micro steps of a step: of how many of them the optimizer
uses nothing."""

CLIPPED_LATE = "clipped_late"
"""`Kind.STEP`: a row where gradients were written to after the optimizer's step had used them, and dropped: on how many
steps so far they were smaller then."""

EVAL_MODE_SERIES = "eval_mode"
"""`Kind.STEP`: 1 where the model was in eval mode when the optimizer stepped; no row before the first such step."""

MODULE_SETTINGS_SERIES = "module_settings"
"""`Kind.STEP`: a digest of how the modules of a class are set, the slot is its name; on the first step."""

TORCH_WARNED_SERIES = "torch_warned"
"""`Kind.STEP`: 1 on the step on which torch has warned of what makes a training wrong; the slot tells of what."""

BACKWARDS_MISSING_SERIES = "backwards_missing"
"""`Kind.STEP`: how many backwards fewer than the script has said a step had; no row before the first such step."""


KINDS: Mapping[Kind, str] = MappingProxyType(
    {
        Kind.LOSS: "The training loss that the script records; one element per micro step.",
        Kind.GRAD_UNREDUCED: "Gradients of parameters before they are reduced over ranks.",
        Kind.GRAD_REDUCED: "Gradients of parameters at entry of the optimizer step: reduced, scaled, not yet clipped.",
        Kind.PARAM_ORIGIN: "Parameters before the optimizer step.",
        Kind.PARAM_USED: "The model's own parameters as the forward used them, where the rank's optimizer steps a "
        "copy or a part of them, or nothing.",
        Kind.PARAM_UPDATED: "Parameters after the optimizer step.",
        Kind.EXP_AVG: "Adam's first moment after the optimizer step.",
        Kind.EXP_AVG_SQ: "Adam's second moment after the optimizer step.",
        Kind.STATE: "Other state that the optimizer keeps per element, by its own name, after the optimizer step; and "
        "`gradient_at_step`, a gradient that the script wrote to between backward and step, as the step finds it; "
        "`gradient_kept`, one that nothing has cleared since the step before; `gradient_lost`, for how many steps a "
        "parameter has had none any more whose module runs; `frozen_later`, for how many it has required none; "
        "`not_held` and `not_stepped`, which parameters the optimizer does not step; `frozen_moved`, frozen ones that "
        "it steps.",
        Kind.UPDATE: "Adam's update by formula, before it is multiplied by the learning rate.",
        Kind.RATIO: "Adam's first moment over the root of its second one, both bias-corrected, element by element.",
        Kind.MG_DIRECTION: "Share of elements whose gradient and first moment have the same sign, 0 to 1.",
        Kind.ACTV: "Inputs and outputs of modules in the training forward.",
        Kind.ACTV_GRAD: "Gradients of inputs and outputs of modules.",
        Kind.ACTV_RECOMPUTED: "Outputs of modules where activation checkpointing computes them again in the backward.",
        Kind.COMM: "Collectives: how many, how far, what is in flight; when asked, their operands and waiting times.",
        Kind.CHECKSUM: "Checksums of parameters that several ranks hold copies of, at entry of the optimizer step: the "
        "low 32 bits as `min`, 2^32 plus the high 32 bits as `max`.",
        Kind.BUFFER: "Buffers that are saved with the model, as statistics of a norm, when the first forward of a "
        "step begins.",
        Kind.FEATURE: "Model-specific features, such as attention logits or the load of experts.",
        Kind.STEP: "Numbers of the step: duration, norm, clipping, loss scale, learning rate, what the script records.",
    }
)

STATISTICS: Mapping[str, str] = MappingProxyType(
    {
        "count": "Number of elements, finite or not.",
        "min": "Smallest finite element; +Inf if there is none.",
        "max": "Largest finite element; -Inf if there is none.",
        "sum": "Sum of the finite elements.",
        "sum_sq": "Sum of the squares of the finite elements.",
        "zeros": "Number of zeros, of either sign.",
        "nans": "Number of NaN elements.",
        "infs": "Number of infinite elements, of either sign.",
        "finite": "Number of finite elements: count - nans - infs.",
        "nonfinite": "Number of non-finite elements: nans + infs.",
        "mean": "Mean of the finite elements: sum / finite.",
        "norm": "L2 norm of the finite elements: sqrt(sum_sq).",
        "rms": "Root mean square of the finite elements: sqrt(sum_sq / finite).",
        "std": "Population standard deviation of the finite elements: sqrt(sum_sq / finite - mean²).",
        "zero_ratio": "Share of zeros among all elements, 0 to 1: zeros / count.",
    }
)
"""The eight moments in their stored order, then what is derived from them when it is read."""
