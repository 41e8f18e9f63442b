"""How well the default alert rules find faults, and how seldom they cry wolf, on more than 200 labelled training runs.

    python -m benchmarks.bench_detection                          # record what is missing, judge, print
    python -m benchmarks.bench_detection --write                  # and write docs/detection.md
    python -m benchmarks.bench_detection --rules my.yaml --half even

Runs are recorded once into `--recordings` (about 25 minutes of one core) and judged as often as one likes (one minute).
The rules were tuned on the runs with even seeds; what is reported is said of those with odd ones.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.detection.cases import CLEAN, FAULTS, all_cases
from benchmarks.detection.record import ROOT, record
from benchmarks.detection.replay import Judged, RuleScore, by_fault, by_rule, judge
from trainermon.alerts.rules import Rule, load_rules

RECORDINGS = ROOT / "build" / "detection"
PAGE = ROOT / "docs" / "detection.md"
MARK = "<!-- The rest is written by `make bench-detection`. -->\n"
PER_STEPS = 10_000
HALVES = {"even": {0}, "odd": {1}, "both": {0, 1}}


def main() -> None:
    arguments = _parse()
    cases = record(all_cases(), arguments.recordings)
    rules = load_rules(arguments.rules)
    judged = [judge(case, arguments.recordings, rules) for case in cases]
    chosen = [each for each in judged if each.case.seed % 2 in HALVES[arguments.half]]
    lines = list(report(chosen, rules))
    print("\n".join(lines))
    if arguments.verbose:
        print("\n".join(_details(chosen)))
    if arguments.write:
        before = PAGE.read_text(encoding="utf-8").partition(MARK)[0]
        PAGE.write_text(before + MARK + "\n" + "\n".join(lines) + "\n", encoding="utf-8")


def report(judged: Sequence[Judged], rules: Sequence[Rule]) -> Iterator[str]:
    """Yield the result as Markdown: a summary, a row per fault, a row per rule, and the healthy ways to train."""
    faulty = [each for each in judged if each.case.first_bad >= 0]
    found = sum(each.delay is not None for each in faulty)
    clean_steps = sum(each.num_clean_steps for each in judged)
    false = [fired for each in judged for fired in each.false]
    scores = by_rule(judged, rules)
    yield f"{len(judged)} runs, {len(faulty)} of them with a fault of {len(FAULTS)} kinds, {clean_steps} clean steps."
    yield ""
    yield "| | measured | goal |"
    yield "|---|---|---|"
    yield f"| faults found in time (recall) | {found} of {len(faulty)}, {found / max(1, len(faulty)):.1%} | ≥ 95 % |"
    rate = PER_STEPS * len(false) / max(1, clean_steps)
    yield f"| false grouped alerts per 10 000 clean steps | {rate:.2f} ({len(false)} alerts) | ≤ 1 |"
    yield f"| longest delay, non-finite values and replicas | {_longest(judged, 2)} steps | ≤ 2 |"
    yield f"| longest delay, spikes | {_longest(judged, 5)} steps | ≤ 5 |"
    yield ""
    yield from _fault_table(judged)
    yield ""
    yield from _rule_table(scores, clean_steps)
    yield ""
    yield from _clean_table(judged)


def _longest(judged: Sequence[Judged], within: int) -> str:
    """Return the longest delay of the faults that should be found `within` so many steps, and which were missed."""
    of_kind = [each for each in judged if each.case.name in FAULTS and FAULTS[each.case.name].within == within]
    delays = [each.delay for each in of_kind if each.delay is not None]
    missed = len(of_kind) - len(delays)
    return f"{max(delays, default=-1)}" + (f" ({missed} missed)" if missed else "")


def _fault_table(judged: Sequence[Judged]) -> Iterator[str]:
    yield "| fault | ranks | found | steps until then: median, longest | limit | first found by |"
    yield "|---|---|---|---|---|---|"
    scores = by_fault(judged)
    for name, fault in FAULTS.items():
        if name not in scores:
            continue
        score = scores[name]
        firsts = [each.answers[0].rule for each in judged if each.case.name == name and each.delay is not None]
        by = ", ".join(f"`{rule}`" for rule in dict.fromkeys(firsts)) or "–"
        late = f"{score.median_delay:.0f}, {score.late}" if score.found else "–"
        yield f"| {name} | {fault.ranks} | {score.found} of {score.runs} | {late} | {fault.within} | {by} |"


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
    yield "| healthy run | runs | steps | false alerts |"
    yield "|---|---|---|---|"
    for name in CLEAN:
        runs = [each for each in judged if each.case.name == name]
        if runs:
            false = ", ".join(f"`{fired.rule}`" for each in runs for fired in each.false) or "none"
            yield f"| {name} | {len(runs)} | {sum(each.num_steps for each in runs)} | {false} |"
    faulty = [each for each in judged if each.case.first_bad >= 0]
    false = ", ".join(f"`{fired.rule}`" for each in faulty for fired in each.false) or "none"
    yield f"| before the faults | {len(faulty)} | {sum(each.num_clean_steps for each in faulty)} | {false} |"


def _details(judged: Sequence[Judged]) -> Iterator[str]:
    for each in judged:
        missed = each.case.first_bad >= 0 and each.delay is None
        if missed or each.false:
            after = [(fired.rule, fired.step, fired.ranks) for fired in each.fired if fired not in each.false]
            false = [(fired.rule, fired.step) for fired in each.false]
            yield f"{each.case.run_id}: begins {each.case.first_bad}, missed {missed}, false {false}, fired {after}"


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recordings", type=Path, default=RECORDINGS, help="where runs are recorded to, and kept")
    parser.add_argument("--rules", help="YAML file of rules instead of the default ones")
    parser.add_argument("--half", choices=HALVES, default="odd", help="runs with these seeds (default: odd)")
    parser.add_argument("--write", action="store_true", help=f"write the result to {PAGE.relative_to(ROOT)}")
    parser.add_argument("--verbose", action="store_true", help="list what was missed, and every false alert")
    return parser.parse_args()


if __name__ == "__main__":
    main()
