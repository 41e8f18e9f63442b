"""The agent's watch over an edited configuration file, without ranks: what is ordered, when, and by which node."""

import json
from concurrent.futures import Future
from typing import Any

import pytest

from trainermon.agent.orders.reconfigure import LOOK_S, ConfigFile, ConfigWatch, StepPlan
from trainermon.agent.watch import RankWatch
from trainermon.core.values import Action


class Immediately:
    """An executor whose jobs are done when they are handed over."""

    def submit(self, function, *arguments):
        done = Future()
        done.set_result(function(*arguments))
        return done


class Ranks:
    """The ranks of a node, all on one step."""

    def __init__(self, ranks, step=100, margin=7):
        self.ranks = dict.fromkeys(ranks)
        self.steps = dict.fromkeys(ranks, step)
        self.reach_s = None
        self._margin = margin

    def margin(self, reach_s, *, at_least):
        self.reach_s = reach_s
        return max(self._margin, at_least)


class Node:
    """A `ConfigWatch` and what it has ordered."""

    def __init__(self, path, run_dir, ranks, world_size=2):
        executor: Any = Immediately()
        self.orders, self.problems = [], []
        self.now_s = 0.0
        self.watch = ConfigWatch(
            ConfigFile(path=path, mtime_ns=path.stat().st_mtime_ns, run_dir=run_dir),
            StepPlan(watch=ranks, world_size=world_size, margin_steps=2),
            executor=executor,
            submit=self.orders.append,
            count_problem=lambda: self.problems.append(1),
        )

    def look(self, attempt=1):
        for _ in range(2):
            self.now_s += LOOK_S
            self.watch.poll(self.now_s, attempt)


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "config.json"
    path.write_text("{}")
    return path


def edit(path, content):
    before = path.stat().st_mtime_ns
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    if path.stat().st_mtime_ns == before:  # a coarse clock of the file system
        path.touch()


def test_an_edit_is_ordered_once_ahead_of_the_newest_step(path, tmp_path):
    node = Node(path, tmp_path, Ranks([0, 1]))
    node.look()
    assert node.orders == []
    edit(path, {"mv_distribution": True})
    node.look()
    node.look()

    (order,) = node.orders
    assert (order.action, order.first_step) == (Action.CONFIGURE, 107)
    assert json.loads(order.config) == {"mv_distribution": True}


@pytest.mark.parametrize("content", ['{"mv_dis', {"mv_distribtion": True}, {"step_interval": 0}, "[]"])
def test_an_invalid_edit_orders_nothing_and_is_counted_once(path, tmp_path, content):
    node = Node(path, tmp_path, Ranks([0, 1]))
    edit(path, content)
    node.look()
    node.look()

    assert (node.orders, node.problems) == ([], [1])


def test_other_nodes_find_the_order_of_rank_0_and_its_step(path, tmp_path):
    first, second = (Node(path, tmp_path, Ranks(ranks), world_size=4) for ranks in ([0, 1], [2, 3]))
    edit(path, {"mv_distribution": True})
    second.look()
    assert second.orders == []  # only the node of rank 0 decides
    first.look()
    second.look()
    second.look()

    assert second.orders == first.orders
    assert len(first.orders) == 1


def test_orders_of_an_earlier_attempt_are_not_given_again(path, tmp_path):
    first, second = (Node(path, tmp_path, Ranks(ranks), world_size=4) for ranks in ([0, 1], [2, 3]))
    edit(path, {"mv_distribution": True})
    first.look()
    second.look(attempt=2)

    assert second.orders == []


def test_a_file_that_is_gone_for_a_moment_changes_nothing(path, tmp_path):
    node = Node(path, tmp_path, Ranks([0, 1]))
    path.unlink()
    node.look()
    path.write_text(json.dumps({"xy_distribution": True}))
    node.look()

    assert [json.loads(order.config) for order in node.orders] == [{"xy_distribution": True}]


@pytest.mark.parametrize(("steps_per_s", "expected"), [(0.1, 2), (100, 51)])
def test_the_margin_follows_the_pace(tmp_path, steps_per_s, expected):
    watch = RankWatch(tmp_path)
    watch._pace.extend((second, round(second * steps_per_s)) for second in range(10, 20))

    assert watch.margin(0.5, at_least=2) == expected
