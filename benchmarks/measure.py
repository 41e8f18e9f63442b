"""How a cost is measured here: CPU time of back-to-back pairs, so that a busy machine moves both sides alike."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Sequence


@dataclasses.dataclass(frozen=True, slots=True)
class Ratio:
    """Ratios of pairs: median, smallest and largest, and the median cost of either side in milliseconds.

    `extra_low_ms` and `extra_high_ms` are a 95 % interval of `extra_ms`.
    """

    median: float
    low: float
    high: float
    base_ms: float
    extra_ms: float
    pairs: int
    extra_low_ms: float
    extra_high_ms: float

    @property
    def uncertainty(self) -> float:
        """Half the width of the interval of the extra cost, as a share of the base's cost."""
        return (self.extra_high_ms - self.extra_low_ms) / 2 / self.base_ms

    def text(self) -> str:
        extra = f"{self.extra_ms:+.2f} ms [{self.extra_low_ms:+.2f}, {self.extra_high_ms:+.2f}]"
        return f"{self.median:.3f} x [{self.low:.3f}-{self.high:.3f}]  {extra} on {self.base_ms:.1f} ms"


def cpu_ms(action: Callable[[], object]) -> float:
    """Return the CPU time in milliseconds that all threads of this process spend in `action`."""
    begin = time.process_time_ns()
    action()
    return (time.process_time_ns() - begin) / 1e6


def interleaved(
    base: Callable[[], object],
    other: Callable[[], object],
    *,
    pairs: int,
    warm_up: int,
    uncertainty: float = float("inf"),
    max_pairs: int = 0,
) -> Ratio:
    """Return what `other` costs against `base`, called in turn, the order swapped from pair to pair.

    After `pairs` it goes on until the extra cost is known to `uncertainty`, a share of the base's cost, or there are
    `max_pairs`.
    """
    for _ in range(warm_up):
        base(), other()
    measured: list[tuple[float, float]] = []
    while len(measured) < pairs or (len(measured) < max_pairs and summarise(measured).uncertainty > uncertainty):
        if len(measured) % 2:
            b, o = cpu_ms(base), cpu_ms(other)
        else:
            o, b = cpu_ms(other), cpu_ms(base)
        measured.append((b, o))
    return summarise(measured)


def summarise(measured: Sequence[tuple[float, float]]) -> Ratio:
    """Return the ratio of (base, other) pairs of milliseconds."""
    ratios = sorted(other / base for base, other in measured)
    extras = sorted(other - base for base, other in measured)
    outside = max(0, math.floor(len(extras) / 2 - 0.98 * math.sqrt(len(extras))))
    return Ratio(
        statistics.median(ratios),
        ratios[0],
        ratios[-1],
        statistics.median(base for base, _ in measured),
        statistics.median(extras),
        len(ratios),
        # A binomial number of values lies below the median, whatever their distribution: Conover, Practical
        # Nonparametric Statistics, 3.2.
        extras[outside],
        extras[-1 - outside],
    )
