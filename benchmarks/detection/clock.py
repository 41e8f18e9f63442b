"""Simulated time for recorded runs: nobody could repeat the noise of a shared machine."""

from __future__ import annotations

import contextlib
import math
import types
from collections.abc import Iterator

import numpy as np

from benchmarks.detection.cases import Case
from trainermon.core.journal import JournalWriter
from trainermon.monitor.session import script_values
from trainermon.monitor.taps import collective_calls

STEP_S = 0.5


class Clock:
    """Simulated time, and what the monitor reads in the place of `time.perf_counter`.

    Attributes:
        wait_s: How long the next wait takes.
    """

    def __init__(self, case: Case) -> None:
        self.wait_s = 0.0
        self._now_s = 1.0
        self._random = np.random.default_rng(case.number)  # the same on all ranks: each knows how long the others need

    def read(self) -> float:
        """Return the time; the next reading comes `wait_s` later."""
        now_s = self._now_s
        self._now_s, self.wait_s = now_s + self.wait_s, 0.0
        return now_s

    def work(self, num_ranks: int, slow: dict[int, float], rank: int, hiccup: float) -> float:
        """Let this rank work for a step, and return how long it will wait for the slowest one."""
        noise = self._random.standard_t(4, num_ranks) * 0.03
        needed_s = [STEP_S * hiccup * math.exp(noise[r]) * slow.get(r, 1.0) for r in range(num_ranks)]
        self._now_s += needed_s[rank]
        return max(needed_s) - needed_s[rank]

    def pass_by(self, duration_s: float) -> None:
        """Let time pass in which nobody trains."""
        self._now_s += duration_s

    @contextlib.contextmanager
    def shown_to_monitor(self) -> Iterator[None]:
        """Have the monitor read this clock; to its journal time stands still, so that no disk is ever slow."""
        real = script_values.time, collective_calls.perf_counter
        defaults = JournalWriter.__init__.__kwdefaults__
        assert defaults is not None
        clock = defaults["clock"]
        script_values.time = types.SimpleNamespace(perf_counter=self.read)  # type: ignore[assignment]
        collective_calls.perf_counter = self.read
        defaults["clock"] = lambda: 0.0
        try:
            yield
        finally:
            script_values.time, collective_calls.perf_counter = real
            defaults["clock"] = clock
