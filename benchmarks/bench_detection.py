"""How well the default alert rules find faults, and how seldom they cry wolf, on labelled training runs.

    python -m benchmarks.bench_detection                          # record what is missing, judge, print
    python -m benchmarks.bench_detection --write                  # and write docs/detection.md
    python -m benchmarks.bench_detection --rules my.yaml --families tuning --verbose

Runs are recorded once into `--recordings` (about an hour of one core) and judged as often as one likes (some minutes).
Figures of rules are chosen on the tuning families, and never after a look at the others. The small GPT is what earlier
figures were about; its runs with even seeds were tuned on, those with odd ones are judged.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.detection import cases, family_cases
from benchmarks.detection.cases import Case
from benchmarks.detection.record import ROOT, record, recorded
from benchmarks.detection.replay import Judged, RuleScore, by_fault, by_rule, fault_of, judge, judge_family
from trainermon.alerts.rules import AlertRule, load_rules

RECORDINGS = ROOT / "build" / "detection"
PAGE = ROOT / "docs" / "detection.md"
MARK = "<!-- The rest is written by `make bench-detection`. -->\n"
PER_STEPS = 10_000
ODD_SEEDS = 1


def main() -> None:
    arguments = _parse()
    rules = load_rules(arguments.rules)
    chosen = {name: SETS[name] for name in (SETS if arguments.families == "all" else [arguments.families])}
    lines: list[str] = []
    for name, (title, cases_of) in chosen.items():
        wanted = list(cases_of())
        known = recorded(arguments.recordings)
        runs = [known[case.run_id] for case in wanted if case.run_id in known]
        if not arguments.as_recorded:
            runs = record(wanted, arguments.recordings)
        judged = [each for case in runs for each in _judge(case, arguments.recordings, rules)]
        if not judged:
            continue
        lines += [f"## {title}", "", *report(judged, rules, whole=name != "tuning"), ""]
        if arguments.verbose:
            print("\n".join(_details(judged)))
    print("\n".join(lines))
    if arguments.write:
        before = PAGE.read_text(encoding="utf-8").partition(MARK)[0]
        PAGE.write_text(before + MARK + "\n" + "\n".join(lines).rstrip() + "\n", encoding="utf-8")


def _judge(case: Case, folder: Path, rules: Sequence[AlertRule]) -> list[Judged]:
    is_family = (folder / f"{case.run_id}.json").exists()
    return judge_family(case, folder, rules) if is_family else [judge(case, folder, rules)]


def _of(families: Sequence[str]) -> Callable[[], Iterator[Case]]:
    return lambda: (case for case in family_cases.family_cases() if case.size in families)


def _gpt() -> Iterator[Case]:
    return (case for case in cases.all_cases() if case.seed % 2 == ODD_SEEDS)


SETS: Mapping[str, tuple[str, Callable[[], Iterator[Case]]]] = {
    "held-out": (
        f"Families on which nothing was tuned: {', '.join(family_cases.HELD_OUT)}",
        _of(family_cases.HELD_OUT),
    ),
    "tuning": (f"Families on which rules were tuned: {', '.join(family_cases.TUNING)}", _of(family_cases.TUNING)),
    "gpt": ("The small GPT of earlier figures", _gpt),
}


def report(judged: Sequence[Judged], rules: Sequence[AlertRule], *, whole: bool = True) -> Iterator[str]:
    """Yield the result as Markdown: a summary, and if `whole` rows per fault, per rule, and per kind of healthy run."""
    faulty = [each for each in judged if fault_of(each.case)]
    found = sum(each.delay is not None for each in faulty)
    clean_steps = sum(each.num_clean_steps for each in judged)
    false = [fired for each in judged for fired in each.false]
    kinds = len({each.case.name for each in faulty})
    yield f"{len(faulty)} faults of {kinds} kinds, {clean_steps} clean steps."
    yield ""
    yield "| | measured | goal |"
    yield "|---|---|---|"
    yield f"| faults found in time (recall) | {found} of {len(faulty)}, {found / max(1, len(faulty)):.1%} | ≥ 95 % |"
    rate = PER_STEPS * len(false) / max(1, clean_steps)
    yield f"| false grouped alerts per 10 000 clean steps | {rate:.2f} ({len(false)} alerts) | ≤ 1 |"
    yield f"| longest delay, non-finite values and replicas | {_longest(judged, 2)} steps | ≤ 2 |"
    yield f"| longest delay, spikes | {_longest(judged, 5)} steps | ≤ 5 |"
    if whole:
        yield ""
        yield from _fault_table(judged)
        yield ""
        yield from _rule_table(by_rule(judged, rules), clean_steps)
        yield ""
        yield from _clean_table(judged)


def _longest(judged: Sequence[Judged], within: int) -> str:
    """Return the longest delay of the faults that should be found `within` so many steps, and which were missed."""
    of_kind = [each for each in judged if (fault := fault_of(each.case)) and fault.within == within]
    delays = [each.delay for each in of_kind if each.delay is not None]
    missed = len(of_kind) - len(delays)
    return f"{max(delays, default=-1)}" + (f" ({missed} missed)" if missed else "")


def _fault_table(judged: Sequence[Judged]) -> Iterator[str]:
    yield "| fault | ranks | found | steps until then: median, longest | limit | first found by | missed |"
    yield "|---|---|---|---|---|---|---|"
    for name, score in by_fault(judged).items():
        runs = [each for each in judged if each.case.name == name]
        fault = fault_of(runs[0].case)
        assert fault is not None
        firsts = [each.answers[0].rule for each in runs if each.delay is not None]
        by = ", ".join(f"`{rule}`" for rule in dict.fromkeys(firsts)) or "–"
        missed = ", ".join(_place(each.case) for each in runs if each.delay is None) or "–"
        late = f"{score.median_delay:.0f}, {score.late}" if score.found else "–"
        yield f"| {name} | {fault.ranks} | {score.found} of {score.runs} | {late} | {fault.within} | {by} | {missed} |"


def _place(case: Case) -> str:
    return case.size if case.split == "plain" else f"{case.size} ({case.split})"


def _rule_table(scores: Mapping[str, RuleScore], clean_steps: int) -> Iterator[str]:
    yield "| rule | found, of runs with a fault that it may find | precision | median delay | false per 10 000 steps |"
    yield "|---|---|---|---|---|"
    silent = [name for name, score in scores.items() if score.asked and not (score.found or score.other or score.false)]
    for name, score in scores.items():
        if not (score.found or score.other or score.false):
            continue
        precision = "–" if math.isnan(score.precision) else f"{score.precision:.0%}"
        delay = f"{statistics.median(score.delays):.0f}" if score.delays else "–"
        rate = PER_STEPS * score.false / max(1, clean_steps)
        yield f"| `{name}` | {score.found} of {score.asked} | {precision} | {delay} | {rate:.2f} |"
    yield ""
    yield f"Held back by others that said the same, or silent: {', '.join(f'`{name}`' for name in silent) or 'none'}."


def _clean_table(judged: Sequence[Judged]) -> Iterator[str]:
    yield "| healthy steps | of | steps | false alerts |"
    yield "|---|---|---|---|"
    of_place: dict[tuple[str, str], list[Judged]] = {}
    for each in judged:
        if each.num_clean_steps:
            name = (
                "before the faults" if fault_of(each.case) or each.case.name == family_cases.FAULTY else each.case.name
            )
            of_place.setdefault((name, _place(each.case)), []).append(each)
    for (name, place), runs in of_place.items():
        false = ", ".join(f"`{fired.rule}`" for each in runs for fired in each.false) or "none"
        yield f"| {name} | {place} | {sum(each.num_clean_steps for each in runs)} | {false} |"


def _details(judged: Sequence[Judged]) -> Iterator[str]:
    for each in judged:
        missed = fault_of(each.case) is not None and each.delay is None
        if missed or each.false:
            after = [(fired.rule, fired.step, fired.ranks) for fired in each.fired if fired not in each.false]
            false = [(fired.rule, fired.step) for fired in each.false]
            yield f"{each.case.run_id}: begins {each.case.first_bad}, missed {missed}, false {false}, fired {after}"


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recordings", type=Path, default=RECORDINGS, help="where runs are recorded to, and kept")
    parser.add_argument("--rules", help="YAML file of rules instead of the default ones")
    parser.add_argument("--families", choices=[*SETS, "all"], default="all", help="which runs (default: all)")
    parser.add_argument("--as-recorded", action="store_true", help="judge what is recorded already, record nothing")
    parser.add_argument("--write", action="store_true", help=f"write the result to {PAGE.relative_to(ROOT)}")
    parser.add_argument("--verbose", action="store_true", help="list what was missed, and every false alert")
    return parser.parse_args()


if __name__ == "__main__":
    main()
