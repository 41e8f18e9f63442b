"""The list of drawn random numbers: it changes none of them, and shows where two runs part."""

import csv
import random

import numpy as np
import torch
from torch.nn import functional

from trainermon.dump import random_save, seed_all


def listed(path):
    with open(path, encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_draws_are_listed_with_what_was_drawn(tmp_path):
    def run(extra):
        with seed_all(7), random_save(tmp_path / str(extra)) as path:
            torch.randn(3)
            for _ in range(extra):
                torch.rand(1)
            torch.empty(2).normal_()
        return listed(path)

    short, long = run(0), run(1)

    assert [row["api_name"] for row in long] == [
        "torch_random.randn.0",
        "torch_random.rand.0",
        "tensor_random.normal_.0",
    ]
    assert short[0]["crc32"] == long[0]["crc32"]
    assert short[1]["crc32"] != long[2]["crc32"]
    assert "in run" in long[0]["stack"]


def test_it_begins_with_the_call_and_knows_every_library(tmp_path):
    """The names are those of msprobe's file for these calls."""
    log = random_save(tmp_path)
    random.random()
    random.shuffle([1, 2])
    np.random.rand(2)
    np.random.rand(2)
    functional.dropout(torch.ones(2))
    log.close()
    torch.rand(1)
    random.random()

    assert [row["api_name"] for row in listed(tmp_path / "random_rank0.csv")] == [
        "python_random.random.0",
        "python_random.shuffle.0",
        "numpy_random.rand.0",
        "numpy_random.rand.1",
        "torch_random.dropout.0",
    ]


def test_what_is_drawn_and_who_draws_stay_as_they_were(tmp_path):
    functions = {name: getattr(random, name) for name in ("random", "shuffle")} | {"rand": np.random.rand}

    def draw():
        return [random.random(), float(np.random.rand()), *torch.rand(2).tolist(), *torch.empty(2).normal_().tolist()]

    with seed_all(7):
        expected = draw()
    with seed_all(7), random_save(tmp_path):
        found = draw()

    assert found == expected
    assert functions == {name: getattr(random, name) for name in ("random", "shuffle")} | {"rand": np.random.rand}
