"""Curves as svg: the range over ranks as a band, the rank in question as a line, and what was not finite as marks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from trainermon.analysis.diagnosis.page.history import CurvePoint, HistoryCurve
from trainermon.analysis.diagnosis.page.markup import text

WIDTH, HEIGHT = 560, 210
LEFT, RIGHT, TOP, BOTTOM = 64, 14, 24, 26
_Scale = Callable[[float], float]


def draw(curve: HistoryCurve, step: int) -> str:
    """Return a curve over the steps as the text of an SVG element for the page of a diagnosis, with `step` marked."""
    shown = (*curve.points, *curve.reference)
    values = [value for point in shown for value in (point.low, point.high, point.own) if value is not None]
    by_power = curve.by_power and bool(values) and min(values) > 0 and max(values) > 20 * min(values)
    low, high, ticks = _power_axis(values) if by_power else _linear_axis(values)
    first, last = curve.points[0].step, curve.points[-1].step
    x = _linear(first, last, LEFT, WIDTH - RIGHT)
    to_height = _linear(low, high, HEIGHT - BOTTOM, TOP)
    y: _Scale = (lambda value: to_height(math.log10(value))) if by_power else to_height
    parts = [*_grid(ticks, y), *_steps(first, last, x), *_reference(curve.reference, x, y)]
    parts += [*_lines(curve.points, x, y), *_marks(curve.points, x)]
    if first <= step <= last:
        parts.append(_marker(step, x(step)))
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{text(curve.title)}">{"".join(parts)}</svg>'


def _linear(low: float, high: float, start: float, end: float) -> _Scale:
    span = high - low or 1.0
    return lambda value: start + (value - low) / span * (end - start)


def _power_axis(values: Sequence[float]) -> tuple[float, float, list[float]]:
    """Return an axis over whole powers of ten, and at most five ticks."""
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    stride = max(1, math.ceil((high - low) / 4))
    return low, high, [10.0**exponent for exponent in range(low, high + 1, stride)]


def _linear_axis(values: Sequence[float]) -> tuple[float, float, list[float]]:
    """Return an axis that begins and ends at a tick; ticks are 1, 2 or 5 times a power of ten."""
    if not values:
        return 0.0, 1.0, []
    low, high = min(values), max(values)
    span = high - low or abs(high) or 1.0
    unit = 10.0 ** math.floor(math.log10(span / 3))
    tick = next(unit * factor for factor in (1, 2, 5, 10) if span / (unit * factor) <= 4)
    first, last = math.floor(low / tick), math.ceil(high / tick)
    last = max(last, first + 1)
    return first * tick, last * tick, [number * tick for number in range(first, last + 1)]


def _grid(ticks: Sequence[float], y: _Scale) -> Iterator[str]:
    for tick in ticks:
        height = y(tick)
        yield f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{height:.1f}" y2="{height:.1f}"/>'
        yield f'<text class="tick" x="{LEFT - 7}" y="{height + 4:.1f}" text-anchor="end">{tick:,.6g}</text>'


def _steps(first: int, last: int, x: _Scale) -> Iterator[str]:
    for step, anchor in ((first, "start"), (last, "end")):
        yield f'<text class="tick" x="{x(step):.1f}" y="{HEIGHT - 8}" text-anchor="{anchor}">{step:,}</text>'


def _lines(points: Sequence[CurvePoint], x: _Scale, y: _Scale) -> Iterator[str]:
    for run in _runs(points, "low"):
        edge = [f"{x(point.step):.1f},{y(point.low):.1f}" for point in run if point.low is not None]
        back = [f"{x(point.step):.1f},{y(point.high):.1f}" for point in reversed(run) if point.high is not None]
        if any(point.low != point.high for point in run):
            yield f'<polygon class="band" points="{" ".join(edge + back)}"/>'
    name = "own" if any(point.own is not None for point in points) else "high"
    for run in _runs(points, name):
        places = " ".join(f"{x(point.step):.1f},{y(getattr(point, name)):.1f}" for point in run)
        if len(run) == 1:
            at = places.split(",")
            yield f'<circle class="dot" cx="{at[0]}" cy="{at[1]}" r="2"/>'
        yield f'<polyline class="line" points="{places}"/>'


def _reference(points: Sequence[CurvePoint], x: _Scale, y: _Scale) -> Iterator[str]:
    name = "own" if any(point.own is not None for point in points) else "high"
    for run in _runs(points, name):
        places = " ".join(f"{x(point.step):.1f},{y(getattr(point, name)):.1f}" for point in run)
        yield f'<polyline class="reference" points="{places}"/>'


def _runs(points: Sequence[CurvePoint], name: str) -> Iterator[list[CurvePoint]]:
    """Yield the stretches in which a number is known."""
    run: list[CurvePoint] = []
    for point in points:
        if getattr(point, name) is not None:
            run.append(point)
        elif run:
            yield run
            run = []
    if run:
        yield run


def _marks(points: Sequence[CurvePoint], x: _Scale) -> Iterator[str]:
    for point in points:
        if point.bad:
            place = f"{x(point.step):.1f}"
            yield f'<g class="bad"><title>step {point.step:,}: not finite</title>'
            yield f'<path d="M{place} {TOP - 4}m-3.5-3.5l7 7m0-7l-7 7"/></g>'


def _marker(step: int, place: float) -> str:
    anchor, shift = ("end", -6) if place > WIDTH * 0.6 else ("start", 6)
    return (
        f'<line class="here" x1="{place:.1f}" x2="{place:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'
        f'<text class="here" x="{place + shift:.1f}" y="{HEIGHT - BOTTOM - 6}" text-anchor="{anchor}">'
        f"step {step:,}</text>"
    )
