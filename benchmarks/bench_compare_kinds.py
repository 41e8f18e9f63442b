"""How often `trainermon compare` says what two models that are built alike differ by: a layer, a function, a name.

python -m benchmarks.bench_compare_kinds             # the family that it was mended on
python -m benchmarks.bench_compare_kinds --held-out  # the other one, too
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.dump_pairs.alike import BATCHES, BUILDERS, DIFFERENCES, HELD_OUT, Difference
from trainermon import PrecisionDebugger
from trainermon.analysis.compare import CompareOptions, Mode, compare
from trainermon.analysis.compare.answer.summary import causes_of, headline

LEVELS = ("L0", "mix")
FUNCTIONS = "L1"
_A_LAYER = ("alone, like the ",)  # what is said of the last of functions that one side alone calls
MODES = (Mode.STATISTICS, Mode.TENSOR)


class JudgedKind(NamedTuple):
    """What was said of one pair: whether it is right, and how many places were named."""

    family: str
    what: str
    is_clean: bool
    is_right: bool
    num_named: int
    said: str


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--held-out", action="store_true", help="judge the held-out family, too")
    arguments = parser.parse_args()
    families = [name for name in BUILDERS if arguments.held_out or name not in HELD_OUT]
    with tempfile.TemporaryDirectory() as folder:
        judged = [one for family in families for one in _judge(family, Path(folder))]
    print("\n".join(_report(judged, families)))


def _judge(family: str, folder: Path) -> Iterator[JudgedKind]:
    for number, difference in enumerate(DIFFERENCES):
        levels = LEVELS[1:] if difference.by_functions else LEVELS
        for level in (*levels, FUNCTIONS) if difference.is_layer else levels:
            place = folder / family / f"{number}-{level}"
            _record(family, difference, level, place)
            for mode in MODES:
                (comparison,) = compare(place / "target", place / "golden", options=CompareOptions(mode=mode))
                said, named = headline(comparison), len(causes_of(comparison))
                names = _A_LAYER if level == FUNCTIONS else difference.named
                is_right = named == bool(names) if difference.is_layer else bool(names) or not named
                is_right = is_right and (not names or any(text in said for text in names))
                yield JudgedKind(family, difference.what, not difference.named, is_right, named, said)


def _record(family: str, difference: Difference, level: str, place: Path) -> None:
    for side in ("target", "golden"):
        is_changed = (side == "golden") == difference.swapped
        build, make_layer = BUILDERS[family]
        model = build(difference.feeding if is_changed else "feed")
        model.recompute = difference.recompute
        if is_changed:
            torch.manual_seed(11)
            difference.change(model, make_layer)
        debugger = PrecisionDebugger(dump_path=str(place / side), level=level, task="tensor", step=[0])
        debugger.start(model)
        model(BATCHES[family]()).backward()
        debugger.stop()
        debugger.step()
        debugger.close()


def _report(judged: list[JudgedKind], families: list[str]) -> Iterator[str]:
    rows: dict[str, list[JudgedKind]] = {}
    for one in judged:
        rows.setdefault(one.what, []).append(one)
    rows |= {"all that differ": [one for one in judged if not one.is_clean]}
    rows |= {"all that are clean": [one for one in judged if one.is_clean]}
    names = [f"{name} (held out)" if name in HELD_OUT else name for name in families]
    yield f"| | {' | '.join(names)} |"
    yield f"|---|{'---|' * len(families)}"
    for title, found in rows.items():
        shares = (_share([one for one in found if one.family == name]) for name in families)
        yield f"| {title} | {' | '.join(shares)} |"
    yield from (f"wrong: {one}" for one in judged if not one.is_right)


def _share(judged: list[JudgedKind]) -> str:
    right = sum(one.is_right for one in judged)
    return f"{right} of {len(judged)}, {right / len(judged):.1%}"


if __name__ == "__main__":
    main()
