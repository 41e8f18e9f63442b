"""Parameters that share memory without being one are told; tied, frozen and neighbouring ones are not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.alerts.laws.test_settings import alerts_of
from tests.alerts.laws.test_steps import Loop, train
from tests.alerts.laws.test_trainings import written

RULE = "parameters-share-memory"


class Tied(Loop):
    """An embedding and a head of one shape; each subclass ties them in its own way."""

    def __init__(self) -> None:
        super().__init__()
        embedding, head = nn.Embedding(12, 8), nn.Linear(8, 12, bias=False)
        self.model = nn.Sequential(embedding, nn.Tanh(), head)
        self.tie(embedding, head)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def tie(self, embedding: nn.Embedding, head: nn.Linear) -> None:
        head.weight = embedding.weight

    def loss(self, step: int) -> Tensor:
        tokens = torch.randint(12, (16,))
        return nn.functional.cross_entropy(self.model(tokens), (tokens + 1) % 12)


class ByData(Tied):
    def tie(self, embedding: nn.Embedding, head: nn.Linear) -> None:
        head.weight.data = embedding.weight.data


class ByParameter(Tied):
    def tie(self, embedding: nn.Embedding, head: nn.Linear) -> None:
        head.weight = nn.Parameter(embedding.weight)


class Frozen(ByData):
    def tie(self, embedding: nn.Embedding, head: nn.Linear) -> None:
        super().tie(embedding, head)
        head.weight.requires_grad_(False)


class Flat(Tied):
    """Both are parts of one buffer, as frameworks lay them out."""

    def tie(self, embedding: nn.Embedding, head: nn.Linear) -> None:
        buffer = torch.randn(2, 12, 8) * 0.1
        embedding.weight.data, head.weight.data = buffer[0], buffer[1]


@pytest.mark.parametrize("made", [ByData, ByParameter])
def test_parameters_that_share_memory_are_told_in_the_first_step(tmp_path: Path, made: Callable[[], Loop]) -> None:
    found = alerts_of(written(train(tmp_path, made), 0))[RULE]

    assert found.first_step == 0
    assert {finding.series.name for finding in found.findings} == {"0.weight", "2.weight"}


@pytest.mark.parametrize("made", [Loop, Tied, Frozen, Flat])
def test_others_are_not(tmp_path: Path, made: Callable[[], Loop]) -> None:
    assert RULE not in alerts_of(written(train(tmp_path, made), 0))
