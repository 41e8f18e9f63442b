"""What must hold of what the monitor reads in one layout, against the float64 model and Megatron's own account."""

import dataclasses
import math
from typing import Any

import torch
import torch.distributed as dist

from tests.frameworks.megatron import gpt
from tests.frameworks.megatron.float64_gpt import token_losses
from tests.reference import reference
from tests.sign_truth import assert_signs_are_of, gathered
from tests.weight_truth import assert_weights_add_up
from trainermon.core.values import NO_ELEMENTS, Coordinates, Kind
from trainermon.hooks.guard import FaultGuard
from trainermon.monitor.environment.weights import recorded_weights
from trainermon.monitor.frameworks.megatron import describe
from trainermon.monitor.gradient_probe.readings import GradientReader

STEPS = 2
# How far a norm may be from the float64 model's: what the dtype of forward and backward leaves.
TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 0.12, torch.float16: 0.02}


@dataclasses.dataclass
class Step:
    """What was seen of one step on this rank; tensors are copies."""

    rows: list = dataclasses.field(default_factory=list)  # (kind, name, placement, moments)
    unreduced: dict = dataclasses.field(default_factory=dict)
    reduced: list = dataclasses.field(default_factory=list)
    decisions: list = dataclasses.field(default_factory=list)
    reached: set = dataclasses.field(default_factory=set)
    micro: dict = dataclasses.field(default_factory=dict)
    outcome: Any = None
    result: object = None
    signs: list = dataclasses.field(default_factory=list)


class Watch:
    """Attaches to a training as the session does, and keeps copies of all it is told."""

    def __init__(self, training, *, micro=True):
        self.training = training
        self.reader = GradientReader(training, training.coordinates)
        self.faults = []
        self.step = Step()
        guard = FaultGuard(self.faults.append)
        self.handles = [
            *training.watch_step(guard, entry=self._entry, exit=self._exit),
            *training.watch_unreduced(guard, self._unreduced),
            *training.watch_decision(guard, lambda nonfinite: self.step.decisions.append(nonfinite)),
            *training.watch_accumulation(guard, lambda stage: self.step.reached.add(stage)),
        ]
        if micro:
            self.handles += training.watch_micro_gradients(guard, self._micro)

    def detach(self):
        for handle in self.handles:
            handle.remove()
        assert not self.faults, self.faults

    def _unreduced(self, index, gradient):
        assert index not in self.step.unreduced, "a gradient was reported twice"
        self.step.unreduced[index] = gradient.clone()
        self._row(Kind.GRAD_UNREDUCED, index, gradient)

    def _micro(self, index, gradient):
        total = self.step.micro.setdefault(index, torch.zeros(gradient.shape, dtype=torch.float64))
        total += gradient.double()

    def _entry(self):
        self.step.signs = self.reader.read()
        self.step.reduced = [None if g is None else g.clone() for g in self.training.reduced_gradients()]
        for index, gradient in enumerate(self.step.reduced):
            if gradient is not None:
                self._row(Kind.GRAD_REDUCED, index, gradient)

    def _exit(self, outcome):
        self.step.outcome = outcome
        for index, (value, state) in enumerate(zip(self.training.values(), self.training.states(), strict=True)):
            if value is not None:
                self._row(Kind.PARAM_UPDATED, index, value)
            if state is not None:
                assert state.value.numel() == self.step.reduced[index].numel()
                for kind in (Kind.EXP_AVG, Kind.EXP_AVG_SQ):
                    self._row(kind, index, state.state[kind.value])

    def _row(self, kind, index, tensor):
        parameter = self.training.parameters[index]
        placement = parameter.placement if kind is Kind.GRAD_UNREDUCED else parameter.owned
        moments = reference(tensor)
        expected = placement.length if placement.length is not None else parameter.tensor.numel()
        assert moments.count == expected, (parameter.name, kind, moments.count, expected)
        self.step.rows.append((kind, parameter.name, placement, moments))


def check_layout(layout):
    """Train the layout for a few steps and check all that is read; return the largest error of each kind."""
    gpt.initialise(layout)
    chunks, optimizer = gpt.build(layout)
    training = describe(chunks, optimizer, Coordinates())
    check_names(layout, training)
    check_weights(layout, chunks, training)
    check_against_oracles(training)
    watch, model = Watch(training, micro=not layout.fused), WholeModel(layout)
    errors = {}
    for number in range(STEPS):
        watch.step = step = Step()
        step.result, _ = gpt.train_step(layout, chunks, optimizer, number)
        assert not watch.faults, watch.faults
        truth = model.step(number)
        check_on_this_rank(layout, training, step)
        assert_signs_are_of(gathered(step.signs), truth[Kind.GRAD_REDUCED], floor=TOLERANCE[layout.dtype])
        found = check_unreduced(layout, training, step, truth) | check_merged(layout, step, truth)
        errors = {kind: max(error, errors.get(kind, 0.0)) for kind, error in found.items()}
    watch.detach()
    return errors


def check_weights(layout, chunks, training):
    """Check that the recorded weights of all ranks add up to the unsharded model, with and without its optimizer."""
    wholes = {name: gpt.full_weight(name, layout).to(layout.dtype) for name in gpt.all_names(layout)}
    for known in (training, None):
        assert_weights_add_up(recorded_weights(chunks, known), wholes)


def check_names(layout, training):
    """Check that parameters are called what they are called in the unsharded model."""
    for parameter in training.parameters:
        path = next(
            path for path, tensor in training.chunks[parameter.stage].named_parameters() if tensor is parameter.tensor
        )
        while path.startswith("module."):
            path = path.removeprefix("module.")
        assert parameter.name == gpt.whole_name(path, layout, parameter.stage)


def check_against_oracles(training):
    """Check what this rank owns against Megatron's own account of it."""
    for parameter, held in zip(training.parameters, training.held, strict=True):
        assert (held is None) == (parameter.owned.length == 0), parameter.name
        if held is None:
            continue
        oracle = getattr(held.optimizer, "_get_model_param_range_map", None)
        if oracle is not None:
            owned = oracle(parameter.tensor)["param"]
            assert (held.start, held.end) == (owned.start, owned.end), parameter.name
        assert held.stepped in {p for g in held.optimizer.optimizer.param_groups for p in g["params"]}


def check_on_this_rank(layout, training, step):
    """Check what needs no other rank: the slice is what Megatron's optimizer used, and each thing was told once."""
    for parameter, held, gradient in zip(training.parameters, training.held, step.reduced, strict=True):
        if held is not None:
            used = held.stepped.grad.view(-1)  # nothing is clipped, so the inner optimizer used just this
            scale = layout.loss_scale or 1.0
            assert torch.equal(used, gradient.view(-1).float() / scale), parameter.name
    assert sorted(step.unreduced) == list(range(len(training.parameters)))
    assert step.decisions == [False]
    assert step.reached == set(range(len(training.chunks)))
    ok, norm, _ = step.result
    assert ok
    assert not step.outcome.skipped
    assert step.outcome.grad_norm == norm
    assert step.outcome.max_norm == layout.clip
    assert (step.outcome.loss_scale is None) == (layout.loss_scale is None and layout.dtype is not torch.float16)
    tolerance = TOLERANCE[layout.dtype]
    for index, total in step.micro.items():
        torch.testing.assert_close(
            total.float(), step.unreduced[index].float(), rtol=tolerance, atol=tolerance * float(total.abs().max())
        )


class WholeModel:
    """The unsharded model and its AdamW, in float64."""

    def __init__(self, layout):
        self.layout = layout
        self.weights = {name: gpt.full_weight(name, layout).requires_grad_() for name in gpt.all_names(layout)}
        self.optimizer = torch.optim.AdamW(
            self.weights.values(), lr=gpt.LEARNING_RATE, eps=gpt.EPSILON, weight_decay=0.01
        )

    def step(self, number):
        """Return whole tensors by kind and name; of unreduced gradients a list, one of each data parallel replica."""
        replicas = dist.get_world_size() // (self.layout.tp * self.layout.pp * self.layout.cp)
        own = [self._gradients(number, replica) for replica in range(replicas)]
        factor = 1.0 / replicas
        if self.layout.per_token_loss:
            pairs = [(r, i) for r in range(replicas) for i in range(gpt.MICRO_BATCHES)]
            factor = 1.0 / sum(float(gpt.loss_mask_of(number, *pair).sum()) for pair in pairs)
        for name, weight in self.weights.items():
            weight.grad = sum(gradients[name] for gradients in own) * factor
        found: dict[Kind, Any] = {Kind.GRAD_UNREDUCED: own}
        found[Kind.GRAD_REDUCED] = {name: weight.grad for name, weight in self.weights.items()}
        self.optimizer.step()
        for kind in (Kind.EXP_AVG, Kind.EXP_AVG_SQ):
            found[kind] = {n: self.optimizer.state[w][kind.value] for n, w in self.weights.items()}
        found[Kind.PARAM_UPDATED] = {n: w.detach() for n, w in self.weights.items()}
        return found

    def _gradients(self, number, replica):
        """Return what the backwards of one replica accumulate, before any reduction."""
        layout = self.layout
        total: Any = 0.0
        for i in range(gpt.MICRO_BATCHES):
            tokens, labels = gpt.tokens_of(number, replica, i)
            losses = token_losses(self.weights, tokens, labels, layout.layers, layout.experts)
            if layout.per_token_loss:
                total = total + (losses * gpt.loss_mask_of(number, replica, i)).sum()
            else:
                total = total + losses.mean() / gpt.MICRO_BATCHES
        gradients = torch.autograd.grad(total, list(self.weights.values()), allow_unused=True)
        pairs = zip(self.weights.items(), gradients, strict=True)
        return {name: torch.zeros_like(w) if g is None else g for (name, w), g in pairs}


def check_merged(layout, step, truth):
    """Check the rows of all ranks, merged by their placements, against the unsharded tensors."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, step.rows)
    rows = [row for rank_rows in gathered for row in rank_rows]
    tolerance, errors = TOLERANCE[layout.dtype], {}
    scale = layout.loss_scale or 1.0
    for kind in (Kind.GRAD_REDUCED, Kind.EXP_AVG, Kind.EXP_AVG_SQ, Kind.PARAM_UPDATED):
        merged = merge([row[1:] for row in rows if row[0] is kind])
        assert set(merged) == set(truth[kind]), set(merged) ^ set(truth[kind])
        for name, moments in merged.items():
            expected = truth[kind][name] * (scale if kind is Kind.GRAD_REDUCED else 1.0)
            assert (moments.count, moments.nans, moments.infs) == (expected.numel(), 0, 0), (kind, name, moments)
            if layout.dtype is torch.float32 and not name.endswith("qkv.bias"):  # of keys: zero up to rounding
                assert moments.zeros == reference(expected).zeros, (kind, name)
            error = error_of(moments, reference(expected), expected)
            assert error <= tolerance, (layout.name, kind, name, error)
            errors[kind.value] = max(error, errors.get(kind.value, 0.0))
    merged = merge([row[1:] for row in rows if row[0] is Kind.GRAD_REDUCED])
    norm = math.sqrt(sum(moments.sum_sq for moments in merged.values())) / scale
    errors["global norm"] = abs(norm / step.result[1] - 1.0)
    assert errors["global norm"] <= 1e-6, (layout.name, norm, step.result[1])
    return errors


def merge(rows):
    """Return the moments of each whole parameter; every row that does not count must be a copy of some that does."""
    merged, shapes, counted = {}, {}, {}
    for name, placement, moments in rows:
        assert shapes.setdefault(name, placement.shape) == placement.shape, name
        if placement.in_global_norm:
            merged[name] = merged.get(name, NO_ELEMENTS).merge(moments)
            counted.setdefault(name, []).append(moments)
    for name, placement, moments in rows:
        if not placement.in_global_norm:
            assert moments in counted[name], (name, placement)
    for name, moments in merged.items():
        assert moments.count == math.prod(shapes[name]), (name, shapes[name], moments.count)
    return merged


def error_of(moments, expected, tensor):
    """Return the largest of: relative error of the norm, of extrema to the largest magnitude, of sum to magnitudes."""
    largest, magnitude = float(tensor.abs().max()), float(tensor.abs().sum())
    return max(
        abs(moments.norm - expected.norm) / max(expected.norm, 1e-30),
        abs(moments.min - expected.min) / max(largest, 1e-30),
        abs(moments.max - expected.max) / max(largest, 1e-30),
        abs(moments.sum - expected.sum) / max(magnitude, 1e-30),
    )


def check_unreduced(layout, training, step, truth):
    """Check what each rank accumulated against the float64 backward on its own data.

    Where a rank has only a part of its replica's gradient (of a part of the sequence, of the tokens of its experts, of
    one end of a tied embedding) the sum over the ranks is checked instead.
    """
    own, worst = truth[Kind.GRAD_UNREDUCED], 0.0
    replica = gpt.parallel_state.get_data_parallel_rank()
    totals = {name: torch.zeros_like(whole) for name, whole in own[0].items()}
    summed = torch.zeros(len(totals))
    for index, parameter in enumerate(training.parameters):
        found = (
            step.unreduced[index].double() / (layout.loss_scale or 1.0) / (1 if layout.per_token_loss else layout.cp)
        )
        if is_part_of_replica(layout, parameter):
            gpt.part_of(totals[parameter.name], parameter.name, layout).add_(found / num_copies(layout, parameter))
            summed[list(totals).index(parameter.name)] = 1
        else:
            expected = gpt.part_of(own[replica][parameter.name], parameter.name, layout)
            worst = max(worst, float((found - expected).norm() / own[replica][parameter.name].norm()))
    dist.all_reduce(summed)
    for is_summed, (name, total) in zip(summed, totals.items(), strict=True):
        if is_summed:
            dist.all_reduce(total)
            expected = sum(gradients[name] for gradients in own)
            worst = max(worst, float((total - expected).norm() / expected.norm()))
    assert worst <= TOLERANCE[layout.dtype], (layout.name, worst)
    return {Kind.GRAD_UNREDUCED.value: worst}


def is_part_of_replica(layout, parameter):
    is_tied = layout.tied and layout.pp > 1 and parameter.name.endswith("word_embeddings.weight")
    is_expert = layout.ep > 1 and "local_experts" in parameter.name
    is_sequence = layout.sp and getattr(parameter.tensor, "sequence_parallel", False)
    return layout.cp > 1 or is_tied or is_expert or is_sequence


def num_copies(layout, parameter):
    """Return how many tensor parallel ranks have computed the very same gradient."""
    is_expert = "local_experts" in parameter.name
    is_sequence = layout.sp and getattr(parameter.tensor, "sequence_parallel", False)
    is_split = parameter.name.endswith(gpt.SPLIT_ROWS + gpt.SPLIT_COLUMNS)
    return 1 if is_split or is_expert or is_sequence else layout.tp
