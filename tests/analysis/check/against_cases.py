"""Calls on two devices, for msprobe when its files are recorded and for ours in the tests."""

import numpy as np
import torch

from tests.accuracy.legacy_cases import faulty
from trainermon.accuracy.judge import Judgement, Status
from trainermon.accuracy.rules import ChosenRules, Rules
from trainermon.analysis.check.checking import CallsCheck, CheckedCall
from trainermon.analysis.check.details import write_details

# key, type, what was done to the target's results, to the golden device's; a result for each
CALLS = (
    ("Functional.softmax.0.forward", torch.bfloat16, ("sound",), ("sound",)),
    ("Functional.softmax.1.forward", torch.float16, ("rough",), ("sound",)),
    ("Functional.softmax.2.forward", torch.float32, ("wrong",), ("rough",)),
    ("Functional.softmax.3.forward", torch.float32, ("nan",), ("sound",)),
    ("Functional.softmax.4.forward", torch.bfloat16, ("both_inf",), ("both_inf",)),
    ("Torch.matmul.0.forward", torch.float16, ("rough",), ("sound",)),
    ("Torch.matmul.1.forward", torch.float32, ("rough",), ("rough",)),
    ("Torch.matmul.1.backward", torch.float32, ("sound", "wrong"), ("sound", "rough")),
    ("Functional.linear.0.forward", torch.float32, ("wrong",), ("sound",)),
    ("Functional.linear.1.forward", torch.bfloat16, ("wrong",), ("wrong",)),
    ("Functional.linear.1.backward", torch.bfloat16, ("zeroed",), ("sound",)),
    ("Functional.embedding.0.forward", torch.float16, ("rough",), ("sound",)),
    ("Tensor.__add__.0.forward", torch.float32, ("sound",), ("sound",)),
    ("Tensor.__add__.1.forward", torch.float16, ("inf",), ("sound",)),
    ("Tensor.add.2.forward", torch.bfloat16, ("tiny",), ("tiny",)),
    ("Functional.conv2d.0.forward", torch.float32, ("sound",), ("wrong",)),
    ("Functional.conv2d.1.forward", torch.float16, ("wrong",), ("sound",)),
    ("Tensor.masked_fill.0.forward", torch.bfloat16, ("sound",), ("sound",)),
    ("Torch.topk.0.forward", torch.float32, ("rough", "sound"), ("sound", "sound")),
    ("Torch.argmax.0.forward", torch.int64, ("sound",), ("sound",)),
    ("Torch.argmax.1.forward", torch.int64, ("wrong",), ("sound",)),
    ("Torch.linalg.svd.0.forward", torch.float64, ("sound",), ("sound",)),
    ("Torch.only_target.0.forward", torch.float32, ("sound",), ()),
    ("Torch.only_golden.0.forward", torch.float32, (), ("sound",)),
    ("Torch.exp.0.forward", torch.float32, ("sound",), ("sound",)),
)
TARGET, GOLDEN = 2, 3


def results(case, side):
    """Return the results of a call on one side with their golden results in float64, as pairs."""
    key, dtype, *_ = case
    seed = CALLS.index(case) * 2 + (side == GOLDEN)
    return [result(dtype, fault, np.random.RandomState(seed + 100 * n), key) for n, fault in enumerate(case[side])]


def result(dtype, fault, random, key):
    if not dtype.is_floating_point:
        exact = torch.arange(48).reshape(8, 6)
        return exact, exact + (fault == "wrong")
    exact = torch.from_numpy(random.standard_normal((24, 16)))
    if "add.2" in key:
        exact *= 1e-3
    given = faulty(exact, dtype, fault, random)
    return exact, given


def check_of(side, rules):
    """Return what our checker says of the calls of one side."""
    return CallsCheck(source="", calls=tuple(checked(case, side, rules) for case in CALLS if case[side]))


def checked(case, side, rules):
    judgements = []
    for exact, given in results(case, side):
        review = ChosenRules(rules).of_call(case[0], [])
        own = Judgement(
            status=Status.PASS, dtype=str(given.dtype).removeprefix("torch."), shape=tuple(given.shape), standard="sum"
        )
        judgements.append(review(own, given, exact))
    return CheckedCall(key=case[0], judgements=tuple(judgements))


def write_ours(folder, rules=Rules.MSPROBE):
    """Write our files of details of both sides, and return their paths."""
    paths = folder / "ours_target.csv", folder / "ours_golden.csv"
    for side, path in zip((TARGET, GOLDEN), paths, strict=True):
        write_details(check_of(side, rules), path)
    return paths
