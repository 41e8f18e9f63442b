"""What torch warns of, and makes a training wrong, is an alert; what it says to sound scripts is not."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from tests.alerts.laws.test_settings import alerts_of
from tests.alerts.laws.test_steps import Loop, train
from tests.alerts.laws.test_trainings import written
from trainermon.monitor.taps.loop.torch_warnings import WARNED

RULE = "torch-warned"
pytestmark = pytest.mark.filterwarnings("always")


class AnotherShape(Loop):
    def loss(self, step: int) -> Tensor:
        output = self.model(torch.randn(16, 8))[:, :1]
        return nn.functional.mse_loss(output, torch.zeros(16) if step >= 3 else torch.zeros(16, 1))


class ReadBefore(Loop):
    def update(self, step: int) -> None:
        parameters = self.model.parameters()
        list(parameters)
        nn.utils.clip_grad_norm_(parameters, 1.0)
        self.optimizer.step()


class Samples(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.randn(8, 8))

    def __len__(self) -> int:
        return 8


class EachWorker(Loop):
    def loss(self, step: int) -> Tensor:
        if step != 3:
            return super().loss(step)
        loader = DataLoader(Samples(), batch_size=1, num_workers=2)
        assert len(loader) == 8  # only then does torch count what comes, and it counts batches
        return self.loss_of(torch.cat([*loader]))


class ScheduledBefore(Loop):
    def __init__(self) -> None:
        super().__init__()
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 30)

    def update(self, step: int) -> None:
        self.schedule.step()
        self.optimizer.step()


class ScheduledAfter(ScheduledBefore):
    def update(self, step: int) -> None:
        self.optimizer.step()
        self.schedule.step()


class Scaled(ScheduledBefore):
    """The scale is too large at first, so the scaler leaves out the first step, and the schedule does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=1000)
        self.factor = 2.0**40

    def loss_of(self, batch: Tensor) -> Tensor:
        return self.scaler.scale(super().loss_of(batch))

    def update(self, step: int) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.schedule.step()


class Validated(Loop):
    """The shapes of a validation's loss are of no concern to the training."""

    def after(self, step: int) -> None:
        with torch.no_grad():
            nn.functional.mse_loss(self.model(self.batch)[:, :1], torch.zeros(16))


class WarnsOfOthers(Loop):
    def loss(self, step: int) -> Tensor:
        warnings.warn("this is deprecated", UserWarning, stacklevel=1)
        nn.functional.softmax(self.batch)  # without a dimension
        return super().loss(step)


@pytest.mark.parametrize(
    ("made", "what", "first_step"),
    [
        (AnotherShape, "target_of_another_shape", 3),
        (ReadBefore, "nothing_is_clipped", 0),
        (EachWorker, "samples_of_each_worker", 3),
        (ScheduledBefore, "schedule_before_step", 0),
    ],
)
def test_what_torch_warns_of_is_told(tmp_path: Path, made: Callable[[], Loop], what: str, first_step: int) -> None:
    with pytest.warns(UserWarning, match=re.escape(WARNED[what])):
        found = alerts_of(written(train(tmp_path, made), 0))[RULE]

    assert found.first_step == first_step
    assert {finding.series.slot for finding in found.findings} == {what}


@pytest.mark.parametrize("made", [Loop, ScheduledAfter, Scaled, Validated, WarnsOfOthers])
def test_what_torch_says_to_sound_scripts_is_not_told(tmp_path: Path, made: Callable[[], Loop]) -> None:
    with warnings.catch_warnings(record=True):
        assert RULE not in alerts_of(written(train(tmp_path, made), 0))


def test_warnings_are_shown_as_before(tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as shown:
        showwarning = warnings.showwarning
        train(tmp_path, AnotherShape)

        assert warnings.showwarning is showwarning
    assert len([each for each in shown if "different to the input size" in str(each.message)]) == 37
