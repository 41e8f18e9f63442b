"""What optimizers keep, found by name and shape, and what follows from it, against the optimizers' own steps."""

import copy
import dataclasses
import logging
import math
import types
from typing import Any

import pytest
import torch
from torch import nn

from tests.monitor.taps.rows import Rows
from tests.reference import assert_equal
from trainermon.core.values import Coordinates, Kind
from trainermon.monitor.frameworks import plain
from trainermon.monitor.taps import pieces
from trainermon.monitor.taps.adam import UpdateFormulas, adam, why_no_formula
from trainermon.monitor.taps.optimizer import ParameterTaps, StateTaps, lacking
from trainermon.monitor.taps.training import OptimizerState

LR = 0.01
STEPS = 6
NAMES = ("0.weight", "0.bias", "1.weight", "1.bias")


class Run:
    """A small model that is trained and watched for a few steps, and what was there around each step."""

    def __init__(self, make, *, dtype=torch.float32, steps=STEPS):
        torch.manual_seed(0)
        self.model: Any = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3)).to(dtype)
        self.optimizer = make(self.model.parameters())
        self.training = plain.describe([self.model], self.optimizer, Coordinates())
        self.rows = Rows()
        self.states = StateTaps(self.training, range(4), self.rows.collector)
        self.parameters = ParameterTaps(self.training, range(4), self.rows.collector)
        self.kept, self.gradients, self.before, self.after = [], [], [], []
        for step in range(steps):
            self.step(step)

    def step(self, step):
        self.optimizer.zero_grad()
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step)).to(self.model[0].weight.dtype)
        self.model(x).square().sum().backward()
        self.gradients.append([p.grad.clone() for p in self.model.parameters()])
        self.before.append([p.detach().clone() for p in self.model.parameters()])
        self.rows.collector.begin(step)
        self.parameters.at_entry()
        self.states.take_direction()
        self.optimizer.step()
        self.parameters.at_exit()
        self.states.take_states()
        self.states.take_updates()
        self.rows.collector.seal()
        self.after.append([p.detach().clone() for p in self.model.parameters()])
        self.kept.append([copy.deepcopy(self.optimizer.state[p]) for p in self.model.parameters()])


def test_of_complex_parameters_moments_update_and_direction_are_pairs_of_reals():
    torch.manual_seed(0)
    model = nn.Linear(6, 5, dtype=torch.complex64)
    optimizer = torch.optim.Adam(model.parameters(), lr=LR)
    states = StateTaps(plain.describe([model], optimizer, Coordinates()), range(2), (rows := Rows()).collector)
    for step in range(2):
        optimizer.zero_grad()
        model(torch.randn(3, 6, dtype=torch.complex64)).abs().sum().backward()
        rows.collector.begin(step)
        states.take_direction()
        moments = {name: optimizer.state[p].get("exp_avg") for name, p in model.named_parameters()}
        expected = {n: torch.view_as_real(p.grad).sign() for n, p in model.named_parameters()} if step else {}
        expected = {n: (g * torch.view_as_real(moments[n]).sign() + 1) / 2 for n, g in expected.items()}
        optimizer.step()
        states.take_states()
        states.take_updates()
        rows.collector.seal()

    assert expected.keys() == {"weight", "bias"}
    for name, direction in expected.items():
        assert_equal(rows.of(1, Kind.MG_DIRECTION)[name], direction)
    for name, parameter in model.named_parameters():
        state = optimizer.state[parameter]
        first, second = (torch.view_as_real(state[key]).double() for key in ("exp_avg", "exp_avg_sq"))
        assert_equal(rows.of(1, Kind.EXP_AVG)[name], first)
        assert_equal(rows.of(1, Kind.EXP_AVG_SQ)[name], second)
        update = first / (1 - 0.9**2) / ((second / (1 - 0.999**2)).sqrt() + 1e-8)
        row = rows.of(1, Kind.UPDATE)[name]
        assert (row.count, row.nonfinite) == (update.numel(), 0)
        assert row.norm == pytest.approx(float(update.norm()), rel=1e-5)


def test_parameters_are_those_before_and_after_the_step():
    run = Run(lambda p: torch.optim.SGD(p, lr=LR))

    for step in range(STEPS):
        for kind, expected in ((Kind.PARAM_ORIGIN, run.before), (Kind.PARAM_UPDATED, run.after)):
            found = run.rows.of(step, kind)
            assert tuple(found) == NAMES
            for row, tensor in zip(found.values(), expected[step], strict=True):
                assert_equal(row, tensor)


def test_a_parameter_that_is_written_to_between_steps_is_read_again():
    run = Run(lambda p: torch.optim.SGD(p, lr=LR), steps=2)
    with torch.no_grad():
        run.model[0].weight.fill_(3.0)

    run.step(2)

    assert run.rows.of(2, Kind.PARAM_ORIGIN)["0.weight"].max == 3.0


def test_a_write_through_data_between_steps_is_seen():
    """No version counter tells of it."""
    run = Run(lambda p: torch.optim.SGD(p, lr=LR), steps=2)
    run.model[0].weight.data.fill_(3.0)

    run.step(2)

    assert run.rows.of(2, Kind.PARAM_ORIGIN)["0.weight"].max == 3.0


def test_weights_that_the_optimizer_steps_are_not_taken_twice():
    assert not Run(lambda p: torch.optim.SGD(p, lr=LR), steps=1).rows.of(0, Kind.PARAM_USED)


def test_where_the_optimizer_steps_a_copy_or_a_part_the_models_own_weights_are_taken_too(monkeypatch):
    def values(training):
        """The first parameter has a copy, the second is stepped itself, of the third half is stepped, the last not."""
        own = [parameter.tensor.detach() for parameter in training.parameters]
        return [own[0].clone(), own[1], own[2].view(-1)[:7], None]

    monkeypatch.setattr(plain.PlainTraining, "values", values)
    run = Run(lambda p: torch.optim.SGD(p, lr=LR), steps=1)

    taken = run.rows.of(0, Kind.PARAM_USED)
    assert tuple(taken) == ("0.weight", "1.weight", "1.bias")
    for name, row in taken.items():
        assert_equal(row, run.before[0][NAMES.index(name)])


ELEMENT_WISE = {
    "sgd": (lambda p: torch.optim.SGD(p, lr=LR, momentum=0.9), {"momentum_buffer"}),
    "adam": (lambda p: torch.optim.Adam(p, lr=LR), {"exp_avg", "exp_avg_sq"}),
    "amsgrad": (lambda p: torch.optim.AdamW(p, lr=LR, amsgrad=True), {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}),
    "fused": (lambda p: torch.optim.AdamW(p, lr=LR, fused=True), {"exp_avg", "exp_avg_sq"}),
    "nadam": (lambda p: torch.optim.NAdam(p, lr=LR), {"exp_avg", "exp_avg_sq"}),
    "adamax": (lambda p: torch.optim.Adamax(p, lr=LR), {"exp_avg", "exp_inf"}),
    "adagrad": (lambda p: torch.optim.Adagrad(p, lr=LR), {"sum"}),
    "rmsprop": (lambda p: torch.optim.RMSprop(p, lr=LR, momentum=0.5), {"square_avg", "momentum_buffer"}),
    "adadelta": (lambda p: torch.optim.Adadelta(p, lr=LR), {"square_avg", "acc_delta"}),
    "rprop": (lambda p: torch.optim.Rprop(p, lr=LR), {"prev", "step_size"}),
}
if hasattr(torch.optim, "Muon"):  # from torch 2.9 on; it takes matrices only
    ELEMENT_WISE["muon"] = (
        lambda p: torch.optim.Muon([q for q in p if q.dim() == 2], lr=LR),
        {"momentum_buffer"},
    )


@pytest.mark.parametrize("name", ELEMENT_WISE)
def test_element_wise_state_of_any_optimizer_is_taken_after_the_step_under_its_own_name(name):
    make, expected = ELEMENT_WISE[name]
    run = Run(make, steps=2)

    for step, kept in enumerate(run.kept):
        found: dict[Any, Any] = {
            **{(label, "exp_avg"): row for label, row in run.rows.of(step, Kind.EXP_AVG).items()},
            **{(label, "exp_avg_sq"): row for label, row in run.rows.of(step, Kind.EXP_AVG_SQ).items()},
            **{tuple(label.rsplit(".", 1)): row for label, row in run.rows.of(step, Kind.STATE).items()},
        }
        present = [(label, state) for label, state in zip(NAMES, kept, strict=True) if state]
        assert set(found) == {(label, slot) for label, _ in present for slot in expected}
        for label, state in present:
            for slot in expected:
                assert_equal(found[label, slot], state[slot])


def test_factored_state_has_its_own_shape():
    run = Run(lambda p: torch.optim.Adafactor(p, lr=LR), steps=2)

    found = run.rows.of(1, Kind.STATE)

    assert set(found) == {
        *("0.weight.row_var", "0.weight.col_var", "1.weight.row_var", "1.weight.col_var"),
        *("0.bias.variance", "1.bias.variance"),
    }
    assert_equal(found["0.weight.row_var"], run.kept[1][0]["row_var"])
    shapes = {key.label: place.shape for key, place in run.rows.placements.items() if key.kind == Kind.STATE}
    assert shapes["0.weight.row_var"] == run.kept[1][0]["row_var"].shape != (5, 6)


UPDATED = {
    "adam": lambda p: torch.optim.Adam(p, lr=LR),
    "adamw": lambda p: torch.optim.AdamW(p, lr=LR, weight_decay=0.0, eps=1e-3),
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=LR, weight_decay=0.0, amsgrad=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=LR, weight_decay=0.0, fused=True),
    "foreach": lambda p: torch.optim.AdamW(p, lr=LR, weight_decay=0.0, foreach=True),
    "maximize": lambda p: torch.optim.AdamW(p, lr=LR, weight_decay=0.0, maximize=True),
    "radam": lambda p: torch.optim.RAdam(p, lr=LR, betas=(0.9, 0.95)),
}


@pytest.mark.parametrize("name", UPDATED)
def test_update_by_formula_is_what_the_optimizer_subtracts_over_its_learning_rate(name):
    run = Run(UPDATED[name], dtype=torch.float64)

    for step in range(STEPS):
        found = run.rows.of(step, Kind.UPDATE)
        assert tuple(found) == NAMES
        for row, before, after in zip(found.values(), run.before[step], run.after[step], strict=True):
            expected = (before - after) / LR
            assert row.norm == pytest.approx(expected.norm().item(), rel=1e-9)
            assert row.min == pytest.approx(expected.min().item(), rel=1e-9)


def test_a_ratio_is_the_first_over_the_root_of_the_second_moment():
    run = Run(lambda p: torch.optim.Adam(p, lr=LR, betas=(0.9, 0.99), eps=0.5))

    state = run.kept[STEPS - 1][0]
    mean = state["exp_avg"].double() / (1 - 0.9**STEPS)
    expected = mean / (state["exp_avg_sq"].double() / (1 - 0.99**STEPS)).sqrt()
    assert run.rows.of(STEPS - 1, Kind.RATIO)["0.weight"].norm == pytest.approx(expected.norm().item(), rel=1e-6)


@pytest.mark.parametrize("piece", [1, 7, 13, 1 << 22])
def test_pieces_give_what_the_whole_gives(piece, monkeypatch):
    monkeypatch.setattr(pieces, "CPU_PIECE", piece)
    run = Run(lambda p: torch.optim.Adam(p, lr=LR), dtype=torch.float64, steps=2)

    expected = (run.before[1][0] - run.after[1][0]) / LR
    row = run.rows.of(1, Kind.UPDATE)["0.weight"]

    assert row.count == 30
    assert row.norm == pytest.approx(expected.norm().item(), rel=1e-9)


@pytest.mark.parametrize(
    ("make", "moment", "flip"),
    [
        (lambda p: torch.optim.SGD(p, lr=LR, momentum=0.9), "momentum_buffer", 1),
        (lambda p: torch.optim.Adam(p, lr=LR), "exp_avg", 1),
        (lambda p: torch.optim.Adam(p, lr=LR, maximize=True), "exp_avg", -1),
    ],
)
def test_direction_is_the_share_of_equal_signs_of_gradient_and_moment_of_the_step_before(make, moment, flip):
    run = Run(make)

    assert not run.rows.of(0, Kind.MG_DIRECTION)
    for step in range(1, STEPS):
        found = run.rows.of(step, Kind.MG_DIRECTION)
        assert tuple(found) == NAMES
        for row, gradient, state in zip(found.values(), run.gradients[step], run.kept[step - 1], strict=True):
            product = gradient.sign() * state[moment].sign() * flip
            assert row.mean == pytest.approx(((product.sum() / product.numel() + 1) / 2).item(), abs=1e-7)


class Quantized(torch.optim.Optimizer):
    """Keeps its moments as bytes, block scales beside them, as 8-bit optimizers do."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": LR, "betas": (0.9, 0.99), "eps": 1e-8})

    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state["step"] = 1
            state["exp_avg"] = torch.zeros_like(parameter, dtype=torch.uint8)
            state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=torch.uint8)
            state["absmax1"] = torch.ones(1)


def test_a_quantized_state_is_left_out_and_said_once(caplog):
    with caplog.at_level(logging.WARNING, "trainermon"):
        run = Run(Quantized, steps=2)

    assert {key.kind for key in run.rows.rows[1]} == {Kind.PARAM_ORIGIN, Kind.PARAM_UPDATED}
    messages = [record.getMessage() for record in caplog.records]
    assert messages == [
        "state of Quantized is left out: its exp_avg is a Tensor of torch.uint8, with scales that are kept elsewhere"
    ]


class Clipped(torch.optim.Adam):
    """A subclass with a step of its own: whatever it does, it is not Adam's."""

    @torch.no_grad()
    def step(self, closure=None):
        return super().step(closure)


class Named(torch.optim.Adam):
    """A subclass that only sets defaults."""


@pytest.mark.parametrize("make", [torch.optim.RMSprop, torch.optim.NAdam, Clipped])
def test_an_update_of_an_optimizer_without_known_formula_is_lacking(make):
    run = Run(lambda p: make(p, lr=LR), steps=1)

    assert f"no formula is known for {make.__name__}" in lacking(run.training)["ur_distribution"]
    assert not run.rows.of(0, Kind.UPDATE)


def test_what_is_there_is_not_lacking():
    assert not lacking(Run(lambda p: Named(p, lr=LR), steps=1).training)
    assert set(lacking(Run(lambda p: torch.optim.SGD(p, lr=LR, momentum=0.9), steps=1).training)) == {"ur_distribution"}


def test_states_of_an_optimizer_that_keeps_none_are_lacking():
    found = lacking(Run(lambda p: torch.optim.SGD(p, lr=LR), steps=1).training)

    assert found["mv_distribution"] == found["mg_direction"] == "SGD without momentum keeps no state"


class Kept(torch.optim.Optimizer):
    """Keeps one state of a given dtype beside a float32 parameter."""

    def __init__(self, parameters, dtype):
        super().__init__(parameters, {"lr": LR})
        self.dtype = dtype

    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["exp_avg"] = torch.ones_like(parameter, dtype=self.dtype)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float16, torch.int8])
def test_a_state_that_only_a_scale_makes_readable_is_left_out(dtype):
    assert not Run(lambda p: Kept(p, dtype), steps=1).rows.of(0, Kind.EXP_AVG)


def test_a_state_in_bfloat16_is_taken_as_it_is():
    run = Run(lambda p: Kept(p, torch.bfloat16), steps=1)

    assert run.rows.of(0, Kind.EXP_AVG)["0.weight"].sum == 30
    assert {place.dtype for key, place in run.rows.placements.items() if key.kind == Kind.EXP_AVG} == {"bfloat16"}


def test_an_update_of_moments_in_bfloat16_is_computed_in_float32():
    run = Run(lambda p: torch.optim.AdamW(p, lr=LR), dtype=torch.bfloat16)

    state = run.kept[-1][0]
    mean = state["exp_avg"].double() / (1 - 0.9**STEPS)
    expected = mean / ((state["exp_avg_sq"].double() / (1 - 0.999**STEPS)).sqrt() + 1e-8)
    assert run.rows.of(STEPS - 1, Kind.UPDATE)["0.weight"].norm == pytest.approx(expected.norm().item(), rel=1e-6)


def test_factored_state_of_transformers_has_its_own_shape():
    from transformers import optimization

    run = Run(lambda p: optimization.Adafactor(p, lr=LR, relative_step=False, beta1=0.9), steps=2)

    factored = run.rows.of(1, Kind.STATE)
    assert set(factored) == {f"{n}.weight.exp_avg_sq_{part}" for n in range(2) for part in ("row", "col")}
    assert_equal(factored["0.weight.exp_avg_sq_col"], run.kept[1][0]["exp_avg_sq_col"])
    assert tuple(run.rows.of(1, Kind.EXP_AVG)) == NAMES
    assert set(run.rows.of(1, Kind.EXP_AVG_SQ)) == {"0.bias", "1.bias"}


def test_states_of_split_parameters_merge_as_the_parameter_does_and_factored_ones_do_not():
    run = Run(lambda p: torch.optim.Adafactor(p, lr=LR), steps=0)
    training = run.training
    training.parameters = tuple(
        dataclasses.replace(p, shard=dataclasses.replace(p.placement, offset=60, length=30, scale=0.5))
        for p in training.parameters
    )
    run.step(0)

    placements = {key.label: place for key, place in run.rows.placements.items()}
    assert placements["0.weight.row_var"] is None
    for label in ("0.bias.variance", "0.weight"):
        assert (placements[label].offset, placements[label].length, placements[label].scale) == (60, 30, 1.0)


def test_of_several_optimizers_each_has_its_own_formula():
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
    known, other = torch.optim.AdamW(model[0].parameters()), torch.optim.RMSprop(model[1].parameters())
    model(torch.ones(2, 6)).sum().backward()
    for one in (known, other):
        one.step()
    wrapped = types.SimpleNamespace(optimizer=types.SimpleNamespace(optim=known))
    chained = types.SimpleNamespace(chained_optimizers=[wrapped, other, types.SimpleNamespace(optimizer=None)])

    def take(optimizer, parameter):
        state = OptimizerState(parameter, optimizer.state[parameter], optimizer.param_groups[0])
        return UpdateFormulas(chained).inputs_of(state)

    assert not why_no_formula(chained)
    assert take(known, model[0].weight)[0] is adam
    assert take(other, model[1].weight) is None
    known.load_state_dict(known.state_dict())  # makes new groups
    assert take(known, model[0].weight)[0] is adam


def test_bias_correction_may_be_off_and_steps_may_be_counted_in_the_group():
    moments = torch.tensor([2.0, 0.0, 1.0]), torch.tensor([4.0, 0.0, 0.0])
    group = {"betas": (0.9, 0.99), "eps": 1.0, "step": 3, "bias_correction": False}
    state = OptimizerState(moments[0], {"exp_avg": moments[0], "exp_avg_sq": moments[1]}, group)
    optimizer = torch.optim.Adam([torch.zeros(3)])

    formula, first, second, step = UpdateFormulas(optimizer).inputs_of(state)
    update, ratio = formula(first, second, group, step)

    assert update.tolist() == pytest.approx([2 / 3, 0.0, 1.0])
    assert ratio.tolist() == [1.0, 0.0, math.inf]
    assert moments[0].tolist() == [2.0, 0.0, 1.0]
