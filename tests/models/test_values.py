"""Every row of ordinary trainings is the moments of the tensor that a second, unwatched training holds there."""

import functools
import inspect
from typing import Any

import pytest
import torch

from tests.models import loops
from tests.models.truth import assert_rows_are_the_truth, run_twice
from trainermon.core.values import Kind

LOOPS = [
    loops.plain,
    loops.accumulation,
    loops.clipping_by_value,
    loops.autocast,
    loops.lstm_with_tied_weights,
    loops.complex_weights,
    loops.bfloat16,
    loops.float64,
    loops.gradients_set_to_zero,
    loops.loss_scaler,
    loops.averaged_weights,
    loops.adversaries,
    loops.llama,
    loops.gpt2,
    loops.t5,
    loops.mixtral,
    loops.vit,
]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of libraries that transformers imports
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_every_row_is_the_truth(tmp_path, loop):
    truth, journal = run_twice(loop, tmp_path, {})

    without = () if any(key[1] is Kind.LOSS for key in truth.tensors) else (Kind.LOSS,)
    assert_rows_are_the_truth(truth, journal, without=without)


def test_a_generator_is_told_from_its_discriminator(tmp_path):
    truth, journal = run_twice(functools.partial(loops.adversaries, of_discriminator=False), tmp_path, {})

    assert_rows_are_the_truth(truth, journal)


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "Adadelta": {},
    "Adafactor": {},
    "Adagrad": {"initial_accumulator_value": 0.1},
    "Adam": {"amsgrad": True},
    "AdamW": {},
    "Adamax": {},
    "ASGD": {},
    "Muon": {},
    "NAdam": {"decoupled_weight_decay": True, "weight_decay": 0.1},
    "RAdam": {},
    "RMSprop": {"centered": True, "momentum": 0.9},
    "Rprop": {},
    "SGD": {"momentum": 0.9, "nesterov": True},
    "SparseAdam": {},
}
WAYS = (
    "foreach",
    "fused",
    "maximize",
    "amsgrad",
)  # capturable is for CUDA, differentiable for tensors that are no leaves


def optimized(watch, name, options):
    """Train with an optimizer of torch: matrices alone for one that steps nothing else, or sparse gradients."""
    make = getattr(torch.optim, name)
    model: torch.nn.Module
    if name == "Muon":
        model, batch = torch.nn.Sequential(torch.nn.Linear(4, 6, bias=False), torch.nn.Linear(6, 2, bias=False)), None
    elif name == "SparseAdam":
        model, batch = torch.nn.Embedding(11, 3, sparse=True), None
    else:
        model, batch = loops.Net(), loops.signal
    first = torch.randint(11, (5,)) if name == "SparseAdam" else torch.randn(5, 4)
    loops.train(
        watch, model, batch or (lambda: {"input": first}), make=lambda parameters: make(parameters, lr=0.01, **options)
    )


def test_no_optimizer_of_torch_is_left_out():
    made = {cls.__name__ for cls in vars(torch.optim).values() if isinstance(cls, type)}
    assert made - {"Optimizer", "LBFGS"} == OPTIMIZERS.keys()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_row_is_the_truth_whatever_the_optimizer(tmp_path, name):
    truth, journal = run_twice(functools.partial(optimized, name=name, options=OPTIMIZERS[name]), tmp_path, {})

    assert_rows_are_the_truth(truth, journal)


def variants():
    for name, options in OPTIMIZERS.items():
        known = inspect.signature(getattr(torch.optim, name).__init__).parameters
        for way in WAYS:
            if way in known and not (name == "SparseAdam" and way == "foreach"):
                yield pytest.param(name, options | {way: True}, id=f"{name}-{way}")
    yield pytest.param("SGD", {"momentum": 0.9, "fused": True}, id="SGD-momentum-fused")
    yield pytest.param("Adam", {"weight_decay": 0.1, "amsgrad": True, "fused": True}, id="Adam-amsgrad-fused")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options"), list(variants()))
def test_every_row_is_the_truth_in_every_variant_of_an_optimizer(tmp_path, name, options):
    truth, journal = run_twice(functools.partial(optimized, name=name, options=options), tmp_path, {})

    assert_rows_are_the_truth(truth, journal)


def test_every_row_is_the_truth_of_the_first_evaluation_of_l_bfgs(tmp_path, caplog):
    truth, journal = run_twice(loops.l_bfgs, tmp_path, {})

    assert_rows_are_the_truth(truth, journal, without=(Kind.STATE, Kind.LOSS))
    assert "not one module was seen" not in caplog.text  # there is none below a root that is a single layer


UNSEEN = {"xy_distribution": False}
ENTRIES = {
    "method": (loops.entry_by_a_method, {}),
    "aot_eager": (loops.compiled_later, UNSEEN),
    "in-place": (functools.partial(loops.compiled_later, in_place=True), UNSEEN),
    "inductor": (functools.partial(loops.compiled_later, backend="inductor"), UNSEEN),
}


@pytest.mark.filterwarnings("ignore")  # what a compiler has to say
@pytest.mark.parametrize(
    ("loop", "config"),
    [pytest.param(*e, id=n, marks=[pytest.mark.slow] * (n == "inductor")) for n, e in ENTRIES.items()],
)
def test_every_row_is_the_truth_however_the_model_is_entered(tmp_path, loop, config):
    truth, journal = run_twice(loop, tmp_path, config)

    without = (Kind.LOSS, Kind.ACTV, Kind.ACTV_GRAD) if loop is loops.entry_by_a_method else (Kind.LOSS,)
    assert_rows_are_the_truth(truth, journal, without=without)


def test_a_loop_may_say_that_a_step_has_fewer_micro_steps(tmp_path, caplog):
    def loop(watch):
        model = loops.Net()
        optimizer = loops.adamw(model.parameters())
        watch.start(model, optimizer, 3)
        for micro_steps in (3, 1, 3, 2):
            watch.expect(micro_steps)
            for _ in range(micro_steps):
                watch.backward(model(**loops.signal()).square().mean())
            with watch.step():
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
                optimizer.step()
            optimizer.zero_grad()
        watch.expect("many")

    truth, journal = run_twice(loop, tmp_path, {})

    assert_rows_are_the_truth(truth, journal, without=(Kind.LOSS,))
    assert "read at the optimizer step" not in caplog.text
    assert "expect_micro_steps: found 'many', expected a whole number" in caplog.text
