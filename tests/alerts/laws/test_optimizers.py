"""What the optimizer holds: a parameter that nobody steps is told, and one that another optimizer steps is not."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.alerts.laws.test_settings import alerts_of
from tests.alerts.laws.test_trainings import written
from tests.journal_rows import only_spool
from trainermon import TrainerMon
from trainermon.core.values import Severity

CONFIG = {"wg_distribution": True, "agent": {"start": False}}
STEPS, CHANGED = 40, 30
SECOND = {"2.weight", "2.bias"}
Step = Callable[[], object]


@dataclasses.dataclass
class Set:
    """A model of three layers; the watched optimizer steps at least the first and the last."""

    model: nn.Sequential
    optimizer: torch.optim.Optimizer
    others: list[torch.optim.Optimizer]

    def replace(self) -> None:
        """Put a new layer in, without telling the optimizer."""
        self.model[2] = nn.Linear(16, 16)

    def replace_by_assignment(self) -> None:
        state = {name: torch.ones_like(tensor) for name, tensor in self.model[2].state_dict().items()}
        self.model[2].load_state_dict(state, assign=True)

    def replace_and_say_so(self) -> None:
        old = {*map(id, self.model[2].parameters())}
        self.replace()
        kept = [p for p in self.optimizer.param_groups[0]["params"] if id(p) not in old]
        self.optimizer.param_groups[0]["params"] = [*kept, *self.model[2].parameters()]

    def replace_for_another(self) -> None:
        self.replace()
        self.others.append(torch.optim.SGD(self.model[2].parameters(), lr=1e-3))


def made(*, without_second: bool = False, replaced: bool = False, freezes: bool = False) -> Set:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    model[2].requires_grad_(not freezes)
    held = [p for name, p in model.named_parameters() if not (without_second and name in SECOND)]
    found = Set(model, torch.optim.AdamW(held, lr=1e-3), [])
    if replaced:
        found.replace()
    return found


def train(
    folder: Path, training: Set, *, before: Step | None = None, others: Callable[[int], object] | None = None
) -> Path:
    """Train; `before` is called once, in the middle, `others` with each step's number after its backward."""
    monitor = TrainerMon(CONFIG | {"output_dir": str(folder), "spool_dir": str(folder)})
    monitor.set_monitor(training.model, training.optimizer)
    for step in range(STEPS):
        if before is not None and step == CHANGED:
            before()
        training.model.zero_grad()
        loss = training.model(torch.randn(16, 8)).square().mean()
        monitor.record(loss=loss)
        loss.backward()
        if others is not None:
            others(step)
        for other in training.others:
            other.step()
        training.optimizer.step()
    monitor.close()
    return only_spool(folder)


def told(folder: Path, rule: str, first_step: int, spool: Path) -> None:
    found = alerts_of(written(spool, 0))
    assert set(found) == {rule}
    alert = found[rule]
    assert alert.severity is Severity.WARNING
    assert alert.first_step == first_step
    assert {finding.series.name for finding in alert.findings} == SECOND
    assert "2 of 6 trainable parameters are in no group" in alert.message


def test_parameters_that_no_optimizer_steps_are_told_since_the_first_step(tmp_path: Path) -> None:
    training = made(without_second=True)

    told(tmp_path, "parameters-not-stepped", 0, train(tmp_path, training))


def test_an_optimizer_that_is_never_stepped_is_none(tmp_path: Path) -> None:
    training = made(without_second=True)
    idle = torch.optim.SGD(training.model[2].parameters(), lr=1e-3)

    told(tmp_path, "parameters-not-stepped", 0, train(tmp_path, training))
    assert idle.param_groups


def test_a_layer_that_was_replaced_before_the_first_step_is_told_on_it(tmp_path: Path) -> None:
    told(tmp_path, "parameters-not-held", 0, train(tmp_path, made(replaced=True)))


@pytest.mark.parametrize("how", [Set.replace, Set.replace_by_assignment])
def test_a_layer_that_is_replaced_later_is_told_on_the_next_step(tmp_path: Path, how: Callable[[Set], None]) -> None:
    training = made()

    told(tmp_path, "parameters-not-held", CHANGED + 1, train(tmp_path, training, before=lambda: how(training)))


@pytest.mark.parametrize("how", [Set.replace_and_say_so, Set.replace_for_another])
def test_a_layer_that_is_replaced_in_an_optimizer_too_is_not_told(tmp_path: Path, how: Callable[[Set], None]) -> None:
    training = made()

    assert alerts_of(written(train(tmp_path, training, before=lambda: how(training)), 0)) == {}


def by_hand(training: Set, _step: int) -> None:
    with torch.no_grad():
        for parameter in training.model[2].parameters():
            assert parameter.grad is not None
            parameter.sub_(1e-3 * parameter.grad)


def by_data(training: Set, _step: int) -> None:
    for parameter in training.model[2].parameters():
        parameter.data = parameter.data - 1e-3 * parameter.grad


def swap(training: Set, _step: int) -> None:
    """Evaluate another model's weights in the place of the trained ones, and put these back."""
    trained = dict(training.model[2].named_parameters())
    training.model[2].load_state_dict({name: p.detach() * 0.9 for name, p in trained.items()}, assign=True)
    training.model(torch.ones(1, 8))
    for name, p in trained.items():
        setattr(training.model[2], name, p)


@pytest.mark.parametrize(
    ("training", "others"),
    [
        ({"freezes": True}, None),
        ({"without_second": True}, by_hand),
        ({"without_second": True}, by_data),
        ({"without_second": True}, lambda training, step: step % 5 or by_hand(training, step)),
        ({"without_second": True}, lambda training, _step: training.model[2].zero_grad()),  # no gradient: not trained
        ({}, swap),
    ],
)
def test_what_something_else_steps_or_nothing_trains_is_not_told(
    tmp_path: Path, training: dict[str, bool], others: Callable[[Set, int], object] | None
) -> None:
    new = made(**training)
    spool = train(tmp_path, new, others=None if others is None else lambda step: others(new, step))

    assert not {"parameters-not-stepped", "parameters-not-held"} & set(alerts_of(written(spool, 0)))


@pytest.mark.parametrize("made_by", [torch.optim.SGD, functools.partial(torch.optim.AdamW, fused=True)])
def test_what_another_optimizer_steps_is_not_told(
    tmp_path: Path, made_by: Callable[..., torch.optim.Optimizer]
) -> None:
    training = made(without_second=True)
    training.others.append(made_by(training.model[2].parameters(), lr=1e-3))

    assert alerts_of(written(train(tmp_path, training), 0)) == {}


def test_copies_of_a_precision_of_their_own_are_no_other_tensors(tmp_path: Path) -> None:
    training = made(without_second=True)
    copies = [nn.Parameter(p.detach().clone()) for p in training.model[2].parameters()]
    training.optimizer.add_param_group({"params": copies})

    def copy_gradients(_step: int) -> None:
        for copy, p in zip(copies, training.model[2].parameters(), strict=True):
            p.data.copy_(copy.data)
            copy.grad = p.grad

    assert alerts_of(written(train(tmp_path, training, others=copy_gradients), 0)) == {}


@pytest.mark.parametrize("is_replaced", [True, False])
def test_the_note_says_whether_the_optimizer_holds_what_the_model_does_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, is_replaced: bool
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters() if is_replaced else model[0].parameters())
    if is_replaced:
        model[1] = nn.Linear(4, 2)
    with TrainerMon(CONFIG | {"output_dir": str(tmp_path), "spool_dir": str(tmp_path)}) as monitor:
        monitor.set_monitor(model, optimizer)

    assert "2 of 4 parameters that require a gradient are in no group" in caplog.text
    assert ("it holds 2 others" in caplog.text) == is_replaced


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_note_says_that_the_optimizer_steps_what_is_in_no_watched_module(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, *, is_whole: bool
) -> None:
    model = nn.ModuleDict({"body": nn.Linear(4, 4), "head": nn.Linear(4, 2)})
    optimizer = torch.optim.AdamW(model.parameters())
    with TrainerMon(CONFIG | {"output_dir": str(tmp_path), "spool_dir": str(tmp_path)}) as monitor:
        monitor.set_monitor(model if is_whole else model["body"], optimizer)

    assert ("steps 2 parameters that are in no watched module" in caplog.text) == (not is_whole)
