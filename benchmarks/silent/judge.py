"""What the monitor said of a broken training and of its twin, and whether that was right."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.silent.case import SilentCase
from tests.ranks import run_ranks

ROOT = Path(__file__).parents[2]
WORKER = Path(__file__).with_name("worker.py")
LIMIT_S, COMMAND_LIMIT_S = 240, 120
COUNTED = ("warning", "critical", "fatal")
LATER = 1
"""What an update did wrong may show on the step after it."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SilentVerdict:
    """What became of one case.

    Attributes:
        name: Of the case.
        found_by: Rules that fired in the broken run and not in its twin, and the step on which each did.
        is_named: An alert or the diagnosis of the broken run alone names the mechanism.
        is_located: Compared with its twin, step and module or phase are right.
        difference: What that comparison says: verdict, step, module and phase.
        false: Rules that fired in the healthy run.
        refused: The monitor refused the broken training when it was attached, in these words; "": it did not.
        differs: Losses or weights differ from the twin's.
        is_silent: All losses of the broken run are finite and the last ones are not above the first ones.
        losses: Means of the first and last five losses, healthy and broken.
        error: Why nothing could be judged; "" if it could.
    """

    name: str
    found_by: Mapping[str, int]
    is_named: bool = False
    is_located: bool = False
    difference: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    false: Mapping[str, int] = dataclasses.field(default_factory=dict)
    refused: str = ""
    differs: bool = False
    is_silent: bool = False
    losses: Mapping[str, Sequence[float]] = dataclasses.field(default_factory=dict)
    error: str = ""

    @property
    def is_found(self) -> bool:
        """Whether somebody without a reference run would have been warned."""
        return bool(self.found_by or self.refused)


def judge(case: SilentCase, folder: Path, *, keep: bool = False) -> SilentVerdict:
    """Train a case and its twin in `folder`, and return what the monitor made of them."""
    shutil.rmtree(folder, ignore_errors=True)
    try:
        return _judged(case, folder)
    except (AssertionError, OSError, ValueError, subprocess.SubprocessError) as error:
        return SilentVerdict(name=case.name, found_by={}, error=f"{type(error).__name__}: {str(error)[-2000:]}")
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)


def _judged(case: SilentCase, folder: Path) -> SilentVerdict:
    healthy = folder / "healthy"
    train(case, healthy)
    false = {alert["rule"]: _step_of(alert) for alert in _alerts(healthy)}
    facts = {"healthy": _facts(healthy, case)}
    if case.mechanism is None:
        losses = {name: _ends(found["losses"]) for name, found in facts.items()}
        return SilentVerdict(name=case.name, found_by={}, false=false, losses=losses)
    broken = folder / "broken"
    try:
        train(case, broken)
    except AssertionError as error:
        if not (refusal := refusal_in(str(error))):
            raise
        named = any(phrase in refusal.lower() for phrase in case.phrases)
        return SilentVerdict(
            name=case.name, found_by={}, refused=refusal, is_named=named, false=false, is_silent=True, differs=True
        )
    facts["broken"] = _facts(broken, case)
    new = [alert for alert in _alerts(broken) if alert["rule"] not in false and _step_of(alert) >= case.first_wrong]
    said = [_text(alert) for alert in new] + _diagnosed(broken, healthy)
    difference = json.loads(_run_command("diagnose", broken / "run", "--against", healthy / "run", "--json"))
    return SilentVerdict(
        name=case.name,
        found_by={alert["rule"]: _step_of(alert) for alert in sorted(new, key=_step_of, reverse=True)},
        is_named=any(phrase in text.lower() for phrase in case.phrases for text in said),
        is_located=_is_located(case, difference),
        difference={key: difference[key] for key in ("verdict", "step", "module", "phase", "headline")},
        false=false,
        differs=facts["healthy"] != facts["broken"],
        is_silent=_is_silent(facts["broken"]["losses"]),
        losses={name: _ends(found["losses"]) for name, found in facts.items()},
    )


def train(case: SilentCase, folder: Path, *more: str) -> None:
    """Train all ranks, in a new folder that is named `healthy` or `broken`; `more` goes to the worker.

    Raises:
        AssertionError: A rank failed, with what all of them wrote.
    """
    folder.mkdir(parents=True)
    (home := folder / "home").mkdir()
    for first in (0, case.restart) if case.restart else (0,):
        own = [case.name, folder.name, str(folder), str(first), *more]
        run_ranks(WORKER, *own, world_size=case.ranks, timeout_s=LIMIT_S, HOME=str(home))


def refusal_in(text: str) -> str:
    """Return the last error of the monitor that ranks wrote, or ""; torch says the rank before each line."""
    found = re.findall(r"^(?:\[rank\d+\]: )?trainermon\.core\.errors\.(\w+: .*)$", text, re.MULTILINE)
    return str(found[-1]) if found else ""


def _facts(folder: Path, case: SilentCase) -> dict[str, Any]:
    """Return the mean losses over ranks, and the digests of the weights of each."""
    parts = written_by_ranks(folder, case)
    losses = [
        sum(step) / len(step) for ranks in parts for step in zip(*(each["losses"] for each in ranks), strict=True)
    ]
    return {"losses": losses, "digests": [each["digest"] for each in parts[-1]]}


def written_by_ranks(folder: Path, case: SilentCase) -> list[list[dict[str, Any]]]:
    """Return what each rank wrote down, of the first process and of the one after a restart."""
    return [
        [json.loads((folder / f"rank{rank}-{first}.json").read_text(encoding="utf-8")) for rank in range(case.ranks)]
        for first in sorted({0, case.restart})
    ]


def _ends(losses: Sequence[float]) -> list[float]:
    return [round(sum(part) / len(part), 4) for part in (losses[:5], losses[-5:])]


def _is_silent(losses: Sequence[float]) -> bool:
    first, last = _ends(losses)
    return all(map(math.isfinite, losses)) and last <= first


def _alerts(folder: Path) -> list[dict[str, Any]]:
    listed = json.loads(_run_command("alerts", folder / "run", "--json"))
    return [alert for alert in listed if alert["severity"] in COUNTED]


def _step_of(alert: Mapping[str, Any]) -> int:
    """Return the step that the alert was raised on; what it is about may have begun before."""
    return int(alert["step"])


def _text(alert: Mapping[str, Any]) -> str:
    return f"{alert['rule']}: {alert['message']}"


def _diagnosed(broken: Path, healthy: Path) -> list[str]:
    """Return the lines of the broken run's diagnosis that the healthy one's has not."""
    usual = set(_run_command("diagnose", healthy / "run").splitlines())
    return [line for line in _run_command("diagnose", broken / "run").splitlines() if line not in usual]


def _is_located(case: SilentCase, difference: Mapping[str, Any]) -> bool:
    step = difference["step"]
    if difference["verdict"] == "equal" or step is None or not case.first_wrong <= step <= case.first_wrong + LATER:
        return False
    named = [difference["module"], *difference["candidates"]]
    is_module = any(module in name for module in case.modules for name in named)
    return is_module or difference["phase"] in case.phases


def _run_command(*arguments: object) -> str:
    command = [sys.executable, "-W", "ignore", "-m", "trainermon", "--quiet", *map(str, arguments)]
    environment = os.environ | {"NO_COLOR": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=COMMAND_LIMIT_S)
    if done.returncode not in {0, 3, 4}:
        raise ValueError(f"trainermon {arguments}: status {done.returncode}: {done.stderr[-500:]}")
    return done.stdout
