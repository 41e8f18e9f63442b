"""Trains each case of a grid with and without the monitor, and compares all that it sees with the truth."""

import json
import math
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad, safe_get_full_optimizer_state

from tests.frameworks.deepspeed.engines import (
    CLIP,
    DTYPES,
    Case,
    global_batches,
    loss_of,
    make_engine,
    make_model,
    start,
    step_engine,
    tokens_of,
    true_gradients,
    whole_weights,
)
from tests.frameworks.deepspeed.watch import Watch
from tests.reference import assert_equal
from tests.sign_truth import assert_signs_are_of, gathered
from tests.weight_truth import assert_weights_add_up
from trainermon.monitor.environment.weights import recorded_weights

STEPS = 2
# Difference of a gradient from the float64 one, as a share of the norm of all gradients.
TOLERANCE = {"fp32": 2e-6, "bf16": 3e-2, "fp16": 4e-3}


def train_step(engine, case, step, oracle=None, factor=1.0):
    """Run one accumulated step by the engine's interface; `oracle` is called at the boundary before the step."""
    for micro_step in range(case.gas):
        loss = loss_of(engine, tokens_of(step, micro_step, dist.get_rank())) * factor
        engine.backward(loss)
        if oracle is not None and micro_step == case.gas - 1:
            oracle()
        step_engine(engine)


def whole_gradients(engine):
    """Return the reduced gradients, whole, by DeepSpeed's own accessors; a collective per parameter."""
    found = {}
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad:
            accumulated = getattr(parameter, "_hp_grad", None)
            whole = safe_get_full_grad(parameter) if accumulated is None else accumulated
            found[name] = whole.detach().clone().reshape(-1).float()
    return found


class Check:
    """The checks of one case."""

    def __init__(self, case):
        self.case = case
        self.engine = make_engine(case)
        self.watch = Watch(self.engine)
        self.parameters = self.watch.training.parameters
        self.half = type(self.engine.optimizer).__name__ in ("FP16_Optimizer", "FP16_UnfusedOptimizer")
        # with fp16 at stage 0, 0.19 never multiplies the loss although it divides by the scale
        # with round_robin_gradients DeepSpeed's accessors read other parameters' parts, or raise; without ZeRO: nothing
        self.is_accessor_wrong = dict(case.zero).get("round_robin_gradients", False) or (case.stage > 0 and self.half)
        self.multiplies = not (self.half and not hasattr(type(self.engine), "_do_optimizer_backward"))

    def run(self):
        for step in range(STEPS):
            weights = whole_weights(self.engine)
            self.check_weights(weights)
            self.watch.forget()
            held = {}
            train_step(self.engine, self.case, step, oracle=lambda held=held: held.update(self.oracle_gradients()))
            held = held or self.assembled(self.watch.reduced)
            assert not self.watch.faults, self.watch.faults
            assert len(self.watch.outcomes) == step + 1, "one step per accumulation boundary"
            self.check_gradients(held)
            self.check_truth(weights, step, held)
            self.check_norm(held)
            self.check_values()
            self.check_own_backward(weights, step)
            if step == 0:
                self.check_first_moment(held)
        self.check_nothing_is_left()

    def check_weights(self, weights):
        """What the modules of all ranks have adds up to the whole weights."""
        assert_weights_add_up(recorded_weights([self.engine], self.watch.training), weights)

    def oracle_gradients(self):
        return {} if self.is_accessor_wrong else whole_gradients(self.engine)

    def assembled(self, taken):
        """Return what the pieces of all ranks make: stands in for accessors that are wrong."""
        everywhere: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, list(self.pieces(taken)))
        wholes = {p.name: torch.full((math.prod(p.owned.shape),), math.nan) for p in self.parameters}
        for name, part, piece in (entry for rank in everywhere for entry in rank):
            wholes[name][part] = piece
        return wholes

    def pieces(self, taken):
        """Return name, place in the flattened parameter and copy of all that was taken on this rank."""
        for parameter, found in zip(self.parameters, taken, strict=True):
            at = parameter.owned
            length = math.prod(at.shape) if at.length is None else at.length
            assert (found is None) == (length == 0), (parameter.name, at)
            if found is not None:
                assert found[0].numel() == length, (parameter.name, found[0].shape, at)
                yield parameter.name, slice(at.offset, at.offset + length), found[0].reshape(-1).float()

    def check_whole(self, taken, wholes):
        """Each piece is bit for bit its part of the whole, and the merged statistics are those of the whole."""
        for name, part, piece in self.pieces(taken):
            assert torch.equal(piece, wholes[name][part]), (name, part, piece, wholes[name][part])
        merged = self.watch.merged(taken)
        assert merged.keys() == wholes.keys()
        for name, whole in wholes.items():
            assert merged[name].count == whole.numel(), name
            assert_equal(merged[name], whole)

    def check_gradients(self, held):
        self.check_whole(self.watch.reduced, held)
        shapes = {p.name: p.owned.shape for p in self.parameters}
        assert_signs_are_of(gathered(self.watch.signs), {n: held[n].reshape(shapes[n]) for n in held})

    def check_truth(self, weights, step, held):
        truth = true_gradients(weights, global_batches(step, self.case.gas))
        scale = self.scale
        norm = torch.stack([g.norm() for g in truth.values()]).norm()
        for name, gradient in held.items():
            error = (gradient.double() / scale - truth[name].reshape(-1)).norm() / norm
            assert error < TOLERANCE[self.case.dtype], (name, float(error))

    @property
    def scale(self):
        found = self.watch.outcomes[-1].loss_scale
        is_scaled = self.case.dtype == "fp16" or (self.case.dtype == "bf16" and self.half and self.multiplies)
        assert (found is None) != is_scaled
        return found if found and self.multiplies else 1.0

    def check_norm(self, held):
        outcome = self.watch.outcomes[-1]
        assert not outcome.skipped
        assert outcome.max_norm == CLIP
        merged = self.watch.merged(self.watch.reduced)
        norm = math.sqrt(sum(found.sum_sq for found in merged.values())) / (outcome.loss_scale or 1.0)
        told = self.engine.get_global_grad_norm()
        if type(self.engine.optimizer).__module__.startswith("torch."):
            assert told is None
            assert outcome.grad_norm is None
            return
        tolerance = {"fp32": 1e-6, "bf16": 2e-3, "fp16": 1e-3}[self.case.dtype]  # DeepSpeed sums some norms in 16 bits
        assert math.isclose(norm, float(outcome.grad_norm), rel_tol=tolerance), (norm, outcome)
        if type(self.engine.optimizer).__name__ == "FP16_UnfusedOptimizer":
            told /= outcome.loss_scale or 1.0
        assert math.isclose(float(outcome.grad_norm), float(told), rel_tol=1e-6), (outcome, told)
        finite = [False] if self.watch.decisions else []
        assert self.watch.decisions == finite * len(self.watch.outcomes)
        assert self.watch.decisions
        assert_nothing_written(self.watch)

    def check_values(self):
        """Main copies and moments equal DeepSpeed's accessors, and rounded they are the weights that the model has."""
        weights = whole_weights(self.engine)
        for name, part, piece in self.pieces(self.watch.after):
            assert torch.equal(piece.to(DTYPES[self.case.dtype]), weights[name].reshape(-1)[part]), name
        named = {n: p for n, p in self.engine.module.named_parameters() if p.requires_grad}
        if self.case.stage == 0 or self.is_accessor_wrong:
            for taken in (self.watch.after, *self.watch.states.values()):
                self.check_whole(taken, self.assembled(taken))
            return
        self.check_whole(self.watch.after, {n: safe_get_full_fp32_param(p).reshape(-1) for n, p in named.items()})
        self.link_states()
        for state, taken in self.watch.states.items():
            wholes = {n: safe_get_full_optimizer_state(p, state).reshape(-1) for n, p in named.items()}
            self.check_whole(taken, wholes)

    def link_states(self):
        """Repair the oracle: with several parameter groups, stages 1 and 2 link only the first one's states."""
        link = getattr(self.engine.optimizer, "_lazy_init_hp_params_optimizer_state", None)
        if link is not None:
            self.engine.optimizer._hp_optimizer_states_linked = False
            link()

    def check_first_moment(self, held):
        """After the first step the first moment is 0.1 of the clipped, unscaled gradient."""
        divisor = self.watch.outcomes[-1].loss_scale or 1.0
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in held.values())) / divisor
        factor = 0.1 / divisor / max(1.0, (norm + 1e-6) / CLIP)
        for name, part, piece in self.pieces(self.watch.states["exp_avg"]):
            torch.testing.assert_close(piece, held[name][part] * factor, rtol=1e-2, atol=1e-9)

    def check_own_backward(self, weights, step):
        """Unreduced gradients are those of this rank's own batches."""
        case, rank = self.case, dist.get_rank()
        batches = [tokens_of(step, micro, rank) for micro in range(case.gas)]
        own = [true_gradients(weights, [batch]) for batch in batches]
        exists = case.stage <= 1 and (dist.get_world_size() > 1 or True)
        assert len(self.watch.unreduced) == (len(self.parameters) if exists else 0)
        assert len(self.watch.reached) >= case.gas
        for index, parameter in enumerate(self.parameters):
            assert parameter.placement.scale == 1 / case.gas
            factor = parameter.placement.scale * self.scale
            micro = self.watch.micro[index]
            assert len(micro) == case.gas
            for seen, truth in zip(micro, own, strict=True):
                self.is_near(seen, truth[parameter.name] * factor, truth)
            if exists:
                whole = torch.stack([truth[parameter.name] for truth in own]).sum(0) * factor
                self.is_near(self.watch.unreduced[index], whole, own[0])

    def is_near(self, seen, expected, all_of_them):
        norm = torch.stack([g.norm() for g in all_of_them.values()]).norm() * self.scale
        error = (seen.double().reshape(expected.shape) - expected).norm() / norm
        assert error < TOLERANCE[self.case.dtype], float(error)

    def check_nothing_is_left(self):
        self.watch.remove()
        for owner in (self.engine, self.engine.optimizer):
            left = [name for name, value in vars(owner).items() if getattr(value, "__name__", "") == "around"]
            assert not left, left
        assert "_take_model_step" not in vars(self.engine)
        assert all(not p.tensor._backward_hooks for p in self.parameters)


def check_overflow(case):
    """A gradient that is not finite is told inside the step, before any parameter is written."""
    engine = make_engine(case)
    watch = Watch(engine)
    train_step(engine, case, 0)
    before = whole_weights(engine)
    watch.forget()
    train_step(engine, case, 1, factor=math.inf)
    assert not watch.faults, watch.faults
    assert watch.decisions == [False, True], (case, watch.decisions)
    assert_nothing_written(watch)
    outcome = watch.outcomes[-1]
    assert outcome.skipped or case.dtype == "bf16"  # without a loss scale, some optimizers step with NaN
    assert not (outcome.skipped and case.unchecked)
    if outcome.skipped:
        assert outcome.grad_norm == math.inf
        after = whole_weights(engine)
        assert all(torch.equal(after[name], before[name]) for name in before)
    else:
        assert math.isnan(float(outcome.grad_norm)), outcome
    watch.remove()


def assert_nothing_written(watch):
    for found, kept in zip(watch.at_decision, watch.before, strict=True):
        assert found is None or torch.equal(found[0], kept[0]), "a parameter was written before the decision"


def main():
    grid = json.loads(sys.argv[1])
    start()
    for entry in grid["truth"]:
        check_case(Case(**{**entry, "zero": tuple(entry.get("zero", {}).items())}))
    for entry in grid["overflow"]:
        check_overflow(Case(**entry))
        print("overflow", entry)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


def train(case, *, watched=False):
    """Return the weights after some steps without any accessor; they communicate, and so are part of the run."""
    engine = make_engine(case)
    watch = Watch(engine) if watched else None
    for step in range(STEPS):
        train_step(engine, case, step)
        if watch is not None:
            watch.forget()
    return whole_weights(engine)


def check_case(case):
    bare, watched = train(case), train(case, watched=True)
    assert all(torch.equal(watched[name], bare[name]) for name in bare), f"{case}: the run is not the same"
    begin = make_model(case.dtype).state_dict()
    assert not all(torch.equal(bare[name].float(), begin[name]) for name in bare)
    check = Check(case)
    check.run()
    print("truth", case, type(check.engine.optimizer).__name__)


if __name__ == "__main__":
    main()
