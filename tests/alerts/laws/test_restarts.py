"""Restarts: what a job goes on with that is not what it had is told; a sound restart is not."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.alerts.laws.test_relations import places, step_of
from tests.alerts.laws.test_settings import alerts_of
from tests.alerts.laws.test_trainings import written
from tests.journal_rows import only_spool
from trainermon import TrainerMon
from trainermon.agent.lifecycle.summary import read_alerts
from trainermon.alerts.laws.law import LawStep
from trainermon.alerts.laws.restarts import WeightsGoOn
from trainermon.core.values import Coordinates, Kind

CONFIG = {
    **dict.fromkeys(("param_distribution", "wg_distribution", "mv_distribution", "xy_distribution"), True),
    "agent": {"start": False},
    "run_id": "run",
}
SAVED, LAST = 20, 26
RULES = {"weights-not-resumed", "moments-not-resumed", "buffers-not-resumed", "data-not-resumed"}
Checkpoint = dict[str, Any]


class Job:
    """A small model, its optimizer and the data of each step."""

    def __init__(self, optimizer: str, batches: int, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        layers = nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)
        self.model = nn.Sequential(*layers).to(dtype)
        make = {"AdamW": torch.optim.AdamW, "SGD": torch.optim.SGD, "Adamax": torch.optim.Adamax}[optimizer]
        self.optimizer = make(self.model.parameters(), lr=1e-2)
        self.data = torch.randn(batches, 16, 8).to(dtype)
        self.drawn = 0
        self.after_step: Callable[[nn.Module], object] = lambda _model: None

    def next_batch(self) -> torch.Tensor:
        self.drawn += 1
        return self.data[(self.drawn - 1) % len(self.data)]

    def state(self) -> Checkpoint:
        return copy.deepcopy(
            {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "drawn": self.drawn}
        )

    def load(self, saved: Checkpoint) -> None:
        self.model.load_state_dict(saved["model"], strict=False)
        if "optimizer" in saved:
            self.optimizer.load_state_dict(saved["optimizer"])
        self.drawn = saved["drawn"]

    def train(self, folder: Path, first: int, last: int, saves: int = -1, **config: object) -> Checkpoint:
        """Train steps `first` to `last`; return what a checkpoint before step `saves` holds."""
        saved: Checkpoint = {}
        with TrainerMon(CONFIG | {"output_dir": str(folder), "spool_dir": str(folder)} | config) as monitor:
            monitor.set_monitor(self.model, self.optimizer, **({"start_iteration": first} if first else {}))
            for step in range(first, last):
                if step == saves:
                    saved = self.state()
                self.optimizer.zero_grad()
                loss = self.model(self.next_batch()).float().square().mean()
                monitor.record(loss=loss)
                loss.backward()
                self.optimizer.step()
                self.after_step(self.model)
        return saved or self.state()


def restarted(
    folder: Path,
    change: Callable[[Checkpoint], object] = lambda _: None,
    *,
    optimizer: str = "AdamW",
    batches: int = 100,
    dtype: torch.dtype = torch.float32,
    ended: int = LAST,
) -> set[str]:
    """Return the alerts of a job that is started again from a checkpoint that `change` has changed."""
    saved = Job(optimizer, batches, dtype).train(folder, 0, ended, SAVED)
    change(saved)
    again = Job(optimizer, batches, dtype)
    again.load(saved)
    again.train(folder, SAVED, LAST + 6)
    return set(alerts_of(written(only_spool(folder), 0))) & RULES


def without_state(saved: Checkpoint) -> None:
    del saved["optimizer"]


def moments_of_another(saved: Checkpoint) -> None:
    """Give the first layer's bias the moments of a parameter whose gradients are a hundred times larger."""
    state = saved["optimizer"]["state"][1]
    state["exp_avg_sq"] = state["exp_avg_sq"] * 1e4


def layers_exchanged(saved: Checkpoint) -> None:
    saved["model"]["2.bias"] = saved["model"]["0.bias"]


def one_is_missing(saved: Checkpoint) -> None:
    saved["model"]["4.weight"] = torch.randn_like(saved["model"]["4.weight"])


def rounded(saved: Checkpoint) -> None:
    saved["model"] = {name: value.bfloat16().float() for name, value in saved["model"].items()}


def without_buffers(saved: Checkpoint) -> None:
    saved["model"] = {name: value for name, value in saved["model"].items() if "running" not in name}


def data_anew(saved: Checkpoint) -> None:
    saved["drawn"] = 0


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (without_state, "moments-not-resumed"),
        (moments_of_another, "moments-not-resumed"),
        (layers_exchanged, "weights-not-resumed"),
        (one_is_missing, "weights-not-resumed"),
        (rounded, "weights-not-resumed"),
        (without_buffers, "buffers-not-resumed"),
        (data_anew, "data-not-resumed"),
    ],
)
def test_what_does_not_go_on_after_a_restart_is_told(
    tmp_path: Path, change: Callable[[Checkpoint], object], rule: str
) -> None:
    assert restarted(tmp_path, change) == {rule}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("optimizer", ["AdamW", "SGD", "Adamax"])
def test_nothing_is_said_of_a_sound_restart(tmp_path: Path, optimizer: str, dtype: torch.dtype) -> None:
    assert restarted(tmp_path, optimizer=optimizer, dtype=dtype) == set()


def test_nothing_is_said_of_an_epoch_that_ended_with_the_job(tmp_path: Path) -> None:
    assert restarted(tmp_path, data_anew, ended=SAVED) == set()


@torch.no_grad()
def normalise(model: nn.Module) -> None:
    """Write to the weights after each step, as lookahead, averaging and clamping do."""
    weight = model.get_parameter("0.weight")
    weight.div_(weight.norm(dim=1, keepdim=True))


@pytest.mark.parametrize("is_lost", [True, False])
def test_weights_that_the_script_writes_after_steps_are_not_judged_and_others_are(
    tmp_path: Path, *, is_lost: bool
) -> None:
    first, again = (Job("AdamW", 100, torch.float32) for _ in range(2))
    first.after_step = again.after_step = normalise
    saved = first.train(tmp_path, 0, LAST, SAVED)
    if is_lost:
        one_is_missing(saved)
    again.load(saved)
    again.train(tmp_path, SAVED, LAST)

    found = set(alerts_of(written(only_spool(tmp_path), 0))) & RULES

    assert found == ({"weights-not-resumed"} if is_lost else set())


def test_nothing_is_said_of_epochs_over_a_few_batches(tmp_path: Path) -> None:
    assert restarted(tmp_path, data_anew, batches=6) == set()


def test_an_agent_that_begins_with_the_restart_knows_what_was_before_it(tmp_path: Path) -> None:
    config: dict[str, Any] = {"agent": {"linger_s": 0, "wait_s": 60}, "spool_dir": str(tmp_path / "spool")}
    saved = Job("AdamW", 100, torch.float32).train(tmp_path, 0, LAST, SAVED, **config)
    layers_exchanged(saved)
    again = Job("AdamW", 100, torch.float32)
    again.load(saved)
    again.train(tmp_path, SAVED, LAST + 6, **config)

    (found,) = read_alerts(tmp_path / "run")

    assert (found.rule, found.attempt, found.first_step) == ("weights-not-resumed", 2, SAVED)
    assert [finding.series.name for finding in found.findings] == ["2.bias"]


def step(number: int, attempt: int, parameters: Sequence[np.ndarray], at: Sequence[Coordinates]) -> LawStep:
    rows = {kind: [[part] for part in parameters] for kind in (Kind.PARAM_ORIGIN, Kind.PARAM_UPDATED, Kind.PARAM_USED)}
    return dataclasses.replace(step_of(rows, number=number, at=at), attempt=attempt)


HALVES, QUARTERS = ([np.arange(n, dtype=float)] * 2 for n in (8, 4))
SPLIT = [Coordinates(rank=n, world_size=2, tp=n, tp_size=2) for n in range(2)]


@pytest.mark.parametrize(
    ("parameters", "at", "num_judged"),
    [(HALVES, places(2), 2), (QUARTERS, places(2), 0), (HALVES, SPLIT, 0)],
    ids=["same", "other sizes", "other axes"],
)
def test_parts_are_compared_where_a_rank_holds_the_same_part(
    parameters: Sequence[np.ndarray], at: Sequence[Coordinates], num_judged: int
) -> None:
    law = WeightsGoOn({})
    law.judge(step(0, 1, HALVES, places(2)))

    verdict = law.judge(step(1, 2, parameters, at))

    assert verdict is not None
    assert (verdict.judged.sum(), verdict.broken.sum()) == (num_judged, 0)


@pytest.mark.parametrize(
    ("saved", "is_known"), [(999, True), (1000, True), (970, False), (1990, True), (20_000, False)]
)
def test_of_steps_long_past_those_beside_round_numbers_are_known(saved: int, is_known: bool) -> None:
    law = WeightsGoOn({})
    for number in range(2000):
        law.judge(step(number, 1, HALVES, places(2)))

    assert (law.judge(step(saved + 1, 2, HALVES, places(2))) is not None) == is_known
