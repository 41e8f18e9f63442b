"""Reinforcement learning: is the rollout engine the policy that is trained?

    from trainermon import rl

    watch = rl.Watch("rl_out", sampling=rl.Sampling(temperature=1.0))
    with watch.step(12):
        watch.rollout(logprobs=…, ids=…, mask=…)
        watch.train(logprobs=…, mask=…)
    print(watch.report(12).sentence)

Neither an RL framework nor torch is imported; tensors and numpy arrays both work.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from trainermon.rl import names
from trainermon.rl.causes import Limits
from trainermon.rl.digest import TensorDigest, WeightDigest, digest_tensors
from trainermon.rl.holding import hold
from trainermon.rl.stages import StageRecorder, stored_stages
from trainermon.rl.values import Cause, Report, Sampling, Verdict, WeightCheck
from trainermon.rl.watch import Watch

if TYPE_CHECKING:
    from trainermon.analysis.rl.align import align

__all__ = [
    "Cause",
    "Limits",
    "Report",
    "Sampling",
    "StageRecorder",
    "TensorDigest",
    "Verdict",
    "Watch",
    "WeightCheck",
    "WeightDigest",
    "align",
    "digest_tensors",
    "hold",
    "names",
    "stored_stages",
]


def __getattr__(name: str) -> Any:
    if name == "align":  # reads dumps, which no training needs: imported when it is asked for
        return importlib.import_module("trainermon.analysis.rl.align").align
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
