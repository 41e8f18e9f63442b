"""How often `trainermon diagnose` names the first cause, on families of models and in every parallel split.

    python -m benchmarks.bench_diagnosis                          # record what is missing, judge, print
    python -m benchmarks.bench_diagnosis --write                  # and write docs/diagnosis.md
    python -m benchmarks.bench_diagnosis --models families --split zero3 --half both --verbose

Runs are recorded once into `--recordings` and judged as often as one likes. Mechanisms were tuned on half of the
families, and on the runs of the small GPT and of Megatron with even seeds; what is reported is said of the others, and
of Megatron with a seed that nobody looked at.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from benchmarks.diagnosis.cases import MEGATRON, SEEDS, SPLITS, UNSEEN_SEED, Case, all_cases
from benchmarks.diagnosis.family_cases import FAMILY_SPLITS, HELD_OUT, TUNED, family_cases
from benchmarks.diagnosis.judge import Judged, judge
from benchmarks.diagnosis.record import record

ROOT = Path(__file__).parents[1]
RECORDINGS = ROOT / "build" / "diagnosis"
PAGE = ROOT / "docs" / "diagnosis.md"
MARK = "<!-- The {models}: written by `make bench-diagnosis`. -->\n"
HALVES = {"even": {0}, "odd": {1}, "both": {0, 1}}
FAMILIES_OF = {"even": TUNED, "odd": HELD_OUT, "both": (*TUNED, *HELD_OUT)}
MODELS = ("families", "megatron", "small")
"""The families, Megatron's GPT with draws that nobody looked at, and it and the small GPT, on which most was made."""


def main() -> None:
    arguments = _parse()
    for models in MODELS if arguments.models == "all" else (arguments.models,):
        cases = record(_cases(models, arguments), arguments.recordings)
        judged = [judge(case, arguments.recordings) for case in cases]
        lines = list(report(judged))
        print("\n".join(lines))
        if arguments.verbose:
            print("\n".join(_details(judged)))
        if arguments.write:
            _write(models, lines)


def _cases(models: str, arguments: argparse.Namespace) -> list[Case]:
    if models == "small":
        seeds = [seed for seed in SEEDS if seed % 2 in HALVES[arguments.half]]
        return all_cases(arguments.split or tuple(SPLITS), seeds)
    if models == "megatron":
        return all_cases([split for split in MEGATRON if split in (arguments.split or MEGATRON)], [UNSEEN_SEED])
    splits = [split for split in FAMILY_SPLITS if split in (arguments.split or FAMILY_SPLITS)]
    return family_cases(FAMILIES_OF[arguments.half], splits)


def _write(models: str, lines: Sequence[str]) -> None:
    """Put `lines` behind the mark of `models`, up to the next heading."""
    mark = MARK.format(models=models)
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(mark)
    after = rest.partition("\n## ")
    PAGE.write_text(f"{before}{mark}\n" + "\n".join(lines) + "\n" + "".join(after[1:]), encoding="utf-8")


def report(judged: Sequence[Judged]) -> Iterator[str]:
    """Yield the result as Markdown: a summary, tables by split, by what broke and by module, and what was wrong.

    A run in which everything stayed finite though it should not tells nothing, and is only counted.
    """
    harmless = [each for each in judged if each.is_harmless]
    judged = [each for each in judged if not each.is_harmless]
    faulty = [each for each in judged if each.case.direction]
    clean = [each for each in judged if not each.case.direction]
    without = f"; {len(harmless)} more did no harm" if harmless else ""
    yield f"{len(judged)} runs, {len(faulty)} of them with a fault{without}."
    yield ""
    yield from _summary(faulty, clean)
    yield ""
    directions = list(dict.fromkeys(each.case.direction for each in faulty))
    yield from _table("split", directions, faulty, lambda each: (each.case.split, each.case.direction))
    yield ""
    effects = list(dict.fromkeys(each.case.effect for each in faulty))
    yield from _table("what broke", effects, faulty, lambda each: (each.case.site, each.case.effect))
    yield ""
    kinds = list(dict.fromkeys(each.case.family or each.case.role for each in faulty))
    yield from _table(
        "direction", kinds, faulty, lambda each: (each.case.direction, each.case.family or each.case.role)
    )
    wrong = [each for each in judged if each.wrong]
    if wrong:
        yield ""
        yield "| wrong | in | said instead |"
        yield "|---|---|---|"
        for each in wrong:
            yield f"| `{each.case.run_id}` | {', '.join(each.wrong)} | {each.diagnosis.headline} |"


def _summary(faulty: Sequence[Judged], clean: Sequence[Judged]) -> Iterator[str]:
    yield "| | measured | goal |"
    yield "|---|---|---|"
    is_family = any(each.case.family for each in faulty)
    goal = 95 if is_family else 90
    yield f"| first cause right | {_share(faulty)} | ≥ 90 % |"
    alone = [each for each in faulty if not each.case.against]
    yield f"| of faults that are not finite, by `diagnose RUN` | {_share(alone)} | ≥ {goal} % |"
    compared = [each for each in faulty if each.case.against]
    yield f"| of faults that stay finite, by `diagnose RUN --against HEALTHY` | {_share(compared)} | ≥ 90 % |"
    lean = [each for each in faulty if each.case.is_lean]
    if lean:
        yield f"| of faults under an unconfigured monitor, activations recomputed | {_share(lean)} | ≥ 90 % |"
    yield f"| clean runs without a claimed origin | {_share(clean)} | all |"


def _table(
    corner: str, columns: Sequence[str], judged: Sequence[Judged], place: Callable[[Judged], tuple[str, str]]
) -> Iterator[str]:
    """Yield a table of right ones among all, each run in the row and column of its `place`, with sums."""
    rows = list(dict.fromkeys(place(each)[0] for each in judged))
    yield f"| {corner} | {' | '.join(columns)} | all |"
    yield "|" + "---|" * (len(columns) + 2)
    for row in rows:
        of_row = [each for each in judged if place(each)[0] == row]
        cells = [_count([each for each in of_row if place(each)[1] == column]) for column in columns]
        yield f"| {row} | {' | '.join(cells)} | {_count(of_row)} |"
    sums = [_count([each for each in judged if place(each)[1] == column]) for column in columns]
    yield f"| all | {' | '.join(sums)} | {_count(judged)} |"


def _count(judged: Sequence[Judged]) -> str:
    return f"{sum(not each.wrong for each in judged)} of {len(judged)}" if judged else "–"


def _share(judged: Sequence[Judged]) -> str:
    share = sum(not each.wrong for each in judged) / max(1, len(judged))
    return f"{_count(judged)}, {share:.1%}"


def _details(judged: Sequence[Judged]) -> Iterator[str]:
    for each in judged:
        if each.wrong:
            found = each.diagnosis
            said = f"step {found.step}, rank {found.rank}, {found.phase} of {found.module} {found.candidates}"
            yield f"{each.case}\n    {found.verdict}: {said}\n    {found.headline}. {found.reason}"


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recordings", type=Path, default=RECORDINGS, help="where runs are recorded to, and kept")
    half = "runs with these seeds, and families with such numbers: tuned on (even), or not (default: odd)"
    parser.add_argument("--half", choices=HALVES, default="odd", help=half)
    parser.add_argument("--models", choices=("all", *MODELS), default="all", help="default: all")
    parser.add_argument("--split", action="append", choices=SPLITS, help="only this split; may be given several times")
    parser.add_argument("--write", action="store_true", help=f"write the result to {PAGE.relative_to(ROOT)}")
    parser.add_argument("--verbose", action="store_true", help="say in full what was said of each wrong one")
    return parser.parse_args()


if __name__ == "__main__":
    main()
