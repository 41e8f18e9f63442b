"""What a client's order without a first step becomes: a step that no rank has done when it reads the order."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from trainermon.agent.orders.commands import CommandBook
from trainermon.agent.orders.desk import OrderDesk
from trainermon.agent.watch import RankWatch
from trainermon.core.control import ControlPage, Phase
from trainermon.core.spool import RankLock, open_spool

MARGIN_STEPS = 4


class Rank:
    """One rank of a node, as its page and lock show it; it is looked at once in a second."""

    def __init__(self, folder):
        self.spool = open_spool(folder / "run")
        self._lock, self._page = RankLock(self.spool, 0), ControlPage(self.spool, 0)
        self.watch = RankWatch(self.spool)
        self._now_s = 0.0

    def beat(self, step, phase=Phase.STEP):
        self._page.beat(step, phase, 0.0)
        self._now_s += 1.0
        self.watch.look(self._now_s)

    def ordered(self):
        """Return the first step of an order that names none."""
        reactions: Any = SimpleNamespace(attempt=1)
        book = CommandBook(self.spool, lambda *_: None)
        desk = OrderDesk(book, self.watch, reactions, margin_steps=MARGIN_STEPS)
        return desk.order({"id": "a", "action": "dump"}).command.first_step

    def close(self):
        self.watch.close()
        self._page.close()
        self._lock.close()


@pytest.fixture
def rank(tmp_path):
    rank = Rank(tmp_path)
    yield rank
    rank.close()


@pytest.mark.parametrize(("steps_per_s", "margin"), [(2, MARGIN_STEPS), (1000, 501)])
def test_the_next_step_is_ahead_by_the_time_that_an_order_takes(rank, steps_per_s, margin):
    for second in range(5):
        rank.beat(second * steps_per_s)

    assert rank.ordered() == 4 * steps_per_s + margin


def test_a_resumed_run_has_not_made_the_steps_before_it(rank):
    rank.beat(-1, Phase.SETUP)
    rank.beat(3_000_000)
    rank.beat(3_000_002)

    assert rank.ordered() == 3_000_002 + MARGIN_STEPS
