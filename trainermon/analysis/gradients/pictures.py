"""The line of a parameter's similarity over the steps, as SVG: in the page, and as a file of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from trainermon.analysis.diagnosis.page.markup import text
from trainermon.core.private_files import make_private_folder, replace_file

FOLDER = "similarities_picture"
_WIDTH, _HEIGHT, _TOP, _LEFT, _RIGHT = 900, 120, 12, 40, 20
_TITLE = 30
_STYLE = (
    "svg{background:#fff;font:13px sans-serif}text{fill:#333}.grid{stroke:#ddd}"
    ".line{fill:none;stroke:#2a6fb0;stroke-width:1.5}.dot{fill:#2a6fb0}"
)
Point = tuple[int, float]
"""A step, and the share of elements that are alike in it."""


def curve(points: Sequence[Point], steps: Sequence[int]) -> str:
    """Return the line of one parameter as an SVG element; `steps` are those of the axis, in order, at least one."""
    return f'<svg viewBox="0 0 {_WIDTH} {_TOP + _HEIGHT + 24}">{"".join(_drawn(points, steps))}</svg>'


def write_pictures(folder: Path, named: Sequence[tuple[str, Sequence[Point]]], steps: Sequence[int]) -> None:
    """Write `<folder>/similarities_picture/<name>_similarities.svg` for each name and its points.

    Raises:
        OSError: One cannot be written.
    """
    place = folder / FOLDER
    make_private_folder(place)
    for name, points in named:
        height = _TOP + _HEIGHT + 24
        content = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 -{_TITLE} {_WIDTH} {height + _TITLE}">'
            f'<style>{_STYLE}</style><text x="{_LEFT}" y="-8">{text(name)}</text>'
            f"{''.join(_drawn(points, steps))}</svg>\n"
        )
        replace_file(place / f"{name.replace('/', '_')}_similarities.svg", content.encode())


def _drawn(points: Sequence[Point], steps: Sequence[int]) -> Iterator[str]:
    low = min([0.5, *(share for _, share in points)])
    span = max(1, steps[-1] - steps[0])

    def height(share: float) -> float:
        return _TOP + _HEIGHT * (1 - share) / (1 - low)

    for share in (1.0, 0.75, 0.5):
        y = height(share)
        yield f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield f'<text x="4" y="{y + 4:.1f}">{share:.0%}</text>'
    places = [(_LEFT + (_WIDTH - _LEFT - _RIGHT) * (step - steps[0]) / span, height(share)) for step, share in points]
    if places:
        yield f'<path class="line" d="M{" L".join(f"{x:.1f} {y:.1f}" for x, y in places)}"/>'
    for (x, y), (step, share) in zip(places, points, strict=True):
        yield f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="2.5"><title>step {step}: {share:.3%}</title></circle>'
    yield f'<text x="{_LEFT}" y="{_TOP + _HEIGHT + 18}">step {steps[0]}</text>'
    yield f'<text x="{_WIDTH - _RIGHT}" y="{_TOP + _HEIGHT + 18}" text-anchor="end">{steps[-1]}</text>'
