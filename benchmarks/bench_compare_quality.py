"""How often `trainermon compare` names the first difference, and whether it ever blames a healthy call.

    python -m benchmarks.bench_compare_quality          # record and judge the families it is mended on, print
    python -m benchmarks.bench_compare_quality --write  # the held-out ones too, and write docs/compare_quality.md
    python -m benchmarks.bench_compare_quality --family llama --level mix --case autocast --verbose

Dumps are recorded once into `--recordings` and judged as often as one likes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

from benchmarks.dump_pairs.cases import HELD_OUT, LEVELS, MENDED_ON
from benchmarks.dump_pairs.judge import Judged, judge
from benchmarks.dump_pairs.record import record

ROOT = Path(__file__).parents[1]
RECORDINGS = ROOT / "build" / "dump_pairs"
PAGE = ROOT / "docs" / "compare_quality.md"
MARK = "<!-- The rest is written by `make bench-compare-quality`. -->\n"
_MAX_WRONG = 60


def main() -> None:
    arguments = _parse()
    families = arguments.family or (MENDED_ON if not arguments.write else (*MENDED_ON, *HELD_OUT))
    work = partial(_of_family, folder=arguments.recordings, levels=arguments.level or LEVELS, what=arguments.case)
    with ProcessPoolExecutor(arguments.jobs) as pool:
        judged = [each for found in pool.map(work, families) for each in found]
    lines = list(report(judged))
    print("\n".join(lines))
    if arguments.verbose:
        print("\n".join(f"{each}" for each in judged if _is_wrong(each)))
    if arguments.write:
        before = PAGE.read_text(encoding="utf-8").partition(MARK)[0]
        PAGE.write_text(before + MARK + "\n" + "\n".join(lines) + "\n", encoding="utf-8")


def report(judged: Sequence[Judged]) -> Iterator[str]:
    """Yield the result as Markdown: a summary, tables by case, family and level, and what was wrong."""
    held = [each for each in judged if each.family in HELD_OUT]
    tuned = [each for each in judged if each.family in MENDED_ON]
    yield f"{len(judged)} comparisons of {len({(each.family, each.case) for each in judged})} pairs of steps."
    yield ""
    yield "| | held-out families | families it was mended on | goal |"
    yield "|---|---|---|---|"
    yield f"| first difference right | {_share(_faulty(held))} | {_share(_faulty(tuned))} | ≥ 95 % |"
    yield f"| nothing blamed where nothing is wrong | {_share(_clean(held))} | {_share(_clean(tuned))} | all |"
    yield f"| no healthy call blamed, in any pair | {_unblamed(held)} | {_unblamed(tuned)} | all |"
    for title, key in (("case", _case), ("family", _family), ("level and task", _level)):
        yield ""
        yield from _table(title, judged, key)
    wrong = [each for each in judged if _is_wrong(each)]
    if wrong:
        yield ""
        yield "| wrong | there it is | said instead | healthy calls blamed |"
        yield "|---|---|---|---|"
        for each in wrong[:_MAX_WRONG]:
            place = " ".join(each.truth[:3]) or "nowhere"
            said = each.headline if not each.is_right else "(right)"
            name = f"{each.family}, {each.case}, {each.level}, {each.mode}"
            yield f"| {name} | `{place}` | {said} | {len(each.healthy)} |"
        if len(wrong) > _MAX_WRONG:
            yield f"| and {len(wrong) - _MAX_WRONG} more | | | |"


def _table(title: str, judged: Sequence[Judged], key: Callable[[Judged], str]) -> Iterator[str]:
    yield f"| {title} | first right, or nothing blamed | no healthy call blamed |"
    yield "|---|---|---|"
    for name in dict.fromkeys(map(key, judged)):
        of_name = [each for each in judged if key(each) == name]
        yield f"| {name} | {_share(of_name)} | {_unblamed(of_name)} |"


def _case(each: Judged) -> str:
    return each.case


def _family(each: Judged) -> str:
    return f"{each.family}{' (held out)' if each.family in HELD_OUT else ''}"


def _level(each: Judged) -> str:
    return f"{each.level}, {each.mode}"


def _is_wrong(each: Judged) -> bool:
    return not each.is_right or bool(each.healthy)


def _faulty(judged: Sequence[Judged]) -> list[Judged]:
    return [each for each in judged if not each.is_clean]


def _clean(judged: Sequence[Judged]) -> list[Judged]:
    return [each for each in judged if each.is_clean]


def _share(judged: Sequence[Judged]) -> str:
    return _of(sum(each.is_right for each in judged), len(judged))


def _unblamed(judged: Sequence[Judged]) -> str:
    return _of(sum(not each.healthy for each in judged), len(judged))


def _of(right: int, number: int) -> str:
    return f"{right} of {number}, {right / number:.1%}" if number else "–"


def _of_family(family: str, *, folder: Path, levels: Sequence[str], what: str) -> list[Judged]:
    record([family], folder)
    return list(judge([family], folder, levels, what))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recordings", type=Path, default=RECORDINGS, help="where dumps are recorded to, and kept")
    families = (*MENDED_ON, *HELD_OUT)
    parser.add_argument("--family", action="append", choices=families, help="only this one; may be repeated")
    parser.add_argument("--level", action="append", choices=LEVELS, help="only this level; may be repeated")
    parser.add_argument("--case", default="", help="only cases with this in their name")
    parser.add_argument("--jobs", type=int, default=2, help="processes (default: 2)")
    parser.add_argument("--write", action="store_true", help=f"write the result to {PAGE.relative_to(ROOT)}")
    parser.add_argument("--verbose", action="store_true", help="say in full what was said of each wrong one")
    return parser.parse_args()


if __name__ == "__main__":
    main()
