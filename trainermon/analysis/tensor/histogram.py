"""How the elements of a tensor are distributed, for a terminal and as svg: linear bins, or one for each power of two.

Powers of two show what a dtype's range cuts off: what is below its least normal number, or above its largest.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trainermon.analysis.tensor.dtypes import magnitudes
from trainermon.analysis.tensor.files import StoredTensor
from trainermon.analysis.tensor.screen import line, number
from trainermon.core.terminal.escapes import printable

WIDTH = 48
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_LEAST_EXPONENT, _LARGEST_EXPONENT = -1074, 1024  # of float64
RANGES = {"float16": (-14, 65504.0), "bfloat16": (-126, 3.3895313892515355e38), "float8_e4m3fn": (-6, 448.0)}
"""Exponent of the least normal number, and the largest number, of the dtypes that values are most often cut off by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorHistogram:
    """How many elements of a tensor lie in which range.

    Attributes:
        label: The tensor's name.
        dtype: Its type.
        count: Number of elements.
        edges: Limits of the bins; one more than `counts`. The last bin holds its upper edge.
        counts: Number of elements in each bin; of complex numbers the magnitudes count.
        by_power: Bins are powers of two of the magnitude.
        nans: NaNs, which are in no bin.
        infs: Infinities, likewise.
        zeros: Zeros with `by_power`, where they are in no bin; else 0.
    """

    label: str
    dtype: str
    count: int
    edges: tuple[float, ...]
    counts: tuple[int, ...]
    by_power: bool
    nans: int
    infs: int
    zeros: int


def histogram(tensor: StoredTensor, *, bins: int = 20, by_power: bool = False) -> TensorHistogram:
    """Return how the finite elements of `tensor` are distributed over `bins` bins, or over powers of two."""
    counter = _by_power if by_power else _linear
    with np.errstate(over="ignore", invalid="ignore"):
        edges, counts, zeros = counter(tensor, bins)
        nans = infs = 0
        for chunk in tensor.chunks():
            values = magnitudes(chunk)
            nans += int(np.count_nonzero(np.isnan(values)))
            infs += int(np.count_nonzero(np.isinf(values)))
    return TensorHistogram(
        label=tensor.label,
        dtype=tensor.kind,
        count=tensor.raw.size,
        edges=tuple(edges),
        counts=tuple(counts),
        by_power=by_power,
        nans=nans,
        infs=infs,
        zeros=zeros,
    )


def _finite(tensor: StoredTensor) -> Iterator[npt.NDArray[np.float64]]:
    for chunk in tensor.chunks():
        values = magnitudes(chunk)
        yield values[np.isfinite(values)]


def _linear(tensor: StoredTensor, bins: int) -> tuple[list[float], list[int], int]:
    low, high = math.inf, -math.inf
    for values in _finite(tensor):
        if values.size:
            low, high = min(low, float(values.min())), max(high, float(values.max()))
    if low > high:
        return [], [], 0
    if low == high:
        return [low, high], [sum(values.size for values in _finite(tensor))], 0
    # scaled, so that the width of a range near the limits of float64 is finite too
    scale = max(abs(low), abs(high))
    edges = np.linspace(low / scale, high / scale, bins + 1)
    counts = np.zeros(bins, np.int64)
    for values in _finite(tensor):
        counts += np.histogram(np.clip(values / scale, edges[0], edges[-1]), edges)[0]
    return (edges * scale).tolist(), counts.tolist(), 0


def _by_power(tensor: StoredTensor, _: int) -> tuple[list[float], list[int], int]:
    counts = np.zeros(_LARGEST_EXPONENT - _LEAST_EXPONENT, np.int64)
    zeros = 0
    for values in _finite(tensor):
        sizes = np.abs(values[values != 0])
        zeros += values.size - sizes.size
        exponents = np.frexp(sizes)[1].astype(np.int64) - 1 - _LEAST_EXPONENT
        counts += np.bincount(exponents, minlength=len(counts))
    used = np.flatnonzero(counts)
    if not used.size:
        return [], [], zeros
    first, last = int(used[0]), int(used[-1]) + 1
    edges = [math.ldexp(1.0, exponent + _LEAST_EXPONENT) for exponent in range(first, last)]
    top = last + _LEAST_EXPONENT
    edges.append(math.ldexp(1.0, top) if top < _LARGEST_EXPONENT else math.inf)
    return edges, counts[first:last].tolist(), zeros


def render_histogram(found: TensorHistogram) -> Iterator[str]:
    """Yield the lines of a histogram for a terminal: each bin's range, count and bar."""
    yield printable(found.label)
    apart = ((found.zeros, "zero"), (found.nans, "NaN"), (found.infs, "Inf"))
    besides = "".join(f", {count:,} {name}" for count, name in apart if count)
    yield line("", f"{found.dtype}, {found.count:,} elements{besides}")
    most = max(found.counts, default=0)
    names = [_bin_name(found, index) for index in range(len(found.counts))]
    width = max(map(len, names), default=0)
    for name, count in zip(names, found.counts, strict=True):
        yield f"  {name:>{width}}  {_bar(count, most):<{WIDTH}}  {count:>12,}  {count / found.count:7.2%}"
    yield from (line("", text) for text in limits(found))


def limits(found: TensorHistogram) -> Iterator[str]:
    """Yield a line for each narrower dtype: which share of the elements it would make infinite or zero.

    Only for a histogram by powers of two.
    """
    if not found.by_power or not found.counts:
        return
    for dtype, (least, largest) in RANGES.items():
        pairs = list(zip(found.edges, found.counts, strict=False))
        below = sum(count for edge, count in pairs if edge < math.ldexp(1.0, least))
        above = sum(count for edge, count in pairs if edge > largest)
        if dtype != found.dtype and (below or above):
            shares = f"{below / found.count:.2%} below its least normal number, {above / found.count:.2%}"
            yield f"{dtype}: {shares} above its range"


def _bin_name(found: TensorHistogram, index: int) -> str:
    if found.by_power:
        return f"2^{round(math.log2(found.edges[index]))}"
    return f"{number(found.edges[index])} … {number(found.edges[index + 1])}"


def _bar(count: int, most: int) -> str:
    eighths = max(1, round(count / most * WIDTH * 8)) if count else 0
    return "█" * (eighths // 8) + (_EIGHTHS[eighths % 8] if eighths % 8 else "")


def render_svg(found: TensorHistogram) -> str:
    """Return the histogram as the text of an SVG file, light or dark as the viewer is."""
    most = max(found.counts, default=1) or 1
    step = 640 / max(1, len(found.counts))
    bars = "".join(
        f'<rect x="{60 + index * step:.2f}" y="{270 - count / most * 210:.2f}" width="{max(0.5, step * 0.9):.2f}"'
        f' height="{count / most * 210:.2f}"><title>{html.escape(_bin_name(found, index))}: {count:,}</title></rect>'
        for index, count in enumerate(found.counts)
    )
    stride = max(1, math.ceil(len(found.counts) / 8))
    ticks = "".join(
        f'<text x="{60 + index * step:.1f}" y="288">{html.escape(_edge_name(found, index))}</text>'
        for index in range(0, len(found.counts), stride)
    )
    apart = ((found.zeros, "zero"), (found.nans, "NaN"), (found.infs, "Inf"))
    besides = "".join(f", {count:,} {name}" for count, name in apart if count)
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 300" font-family="sans-serif" font-size="12">'
        "<style>svg{background:#fff;fill:#1c2430}rect{fill:#3b6fb6}line{stroke:#98a2b3}"
        "@media (prefers-color-scheme:dark){svg{background:#12161c;fill:#e4e8ee}rect{fill:#6ea0e0}}</style>"
        f'<text x="60" y="24" font-size="14">{html.escape(printable(found.label))}</text>'
        f'<text x="60" y="42" opacity=".7">{found.dtype}, {found.count:,} elements{besides}</text>'
        f'<text x="54" y="64" text-anchor="end">{most:,}</text><line x1="60" x2="700" y1="270.5" y2="270.5"/>'
        f"{bars}{ticks}</svg>\n"
    )


def _edge_name(found: TensorHistogram, index: int) -> str:
    return _bin_name(found, index) if found.by_power else number(found.edges[index])
