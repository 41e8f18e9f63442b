"""How a cost is measured here: CPU time of back-to-back pairs, so that a busy machine moves both sides alike."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence


@dataclasses.dataclass(frozen=True, slots=True)
class Ratio:
    """Ratios of pairs: median, smallest and largest, and the median cost of either side in milliseconds."""

    median: float
    low: float
    high: float
    base_ms: float
    extra_ms: float
    pairs: int

    def text(self) -> str:
        return f"{self.median:.3f} x [{self.low:.3f}-{self.high:.3f}]  +{self.extra_ms:.1f} ms on {self.base_ms:.0f} ms"


def cpu_ms(action: Callable[[], object]) -> float:
    """Return the CPU time in milliseconds that all threads of this process spend in `action`."""
    begin = time.process_time_ns()
    action()
    return (time.process_time_ns() - begin) / 1e6


def interleaved(base: Callable[[], object], other: Callable[[], object], *, pairs: int, warm_up: int) -> Ratio:
    """Return what `other` costs against `base`, called in turn, the order swapped from pair to pair."""
    for _ in range(warm_up):
        base(), other()
    measured = []
    for index in range(pairs):
        if index % 2:
            b, o = cpu_ms(base), cpu_ms(other)
        else:
            o, b = cpu_ms(other), cpu_ms(base)
        measured.append((b, o))
    return summarise(measured)


def summarise(measured: Sequence[tuple[float, float]]) -> Ratio:
    """Return the ratio of (base, other) pairs of milliseconds."""
    ratios = sorted(other / base for base, other in measured)
    return Ratio(
        statistics.median(ratios),
        ratios[0],
        ratios[-1],
        statistics.median(base for base, _ in measured),
        statistics.median(other - base for base, other in measured),
        len(ratios),
    )
