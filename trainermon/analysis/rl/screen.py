"""Reports as text for a terminal."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from trainermon.analysis.rl.logged_settings import SettingsComparison
from trainermon.analysis.rl.stage_differences import StageComparison
from trainermon.analysis.rl.token_text import Decode, text_at
from trainermon.analysis.tensor.screen import table
from trainermon.core.terminal.escapes import printable
from trainermon.rl.measures import PolicyMeasures
from trainermon.rl.values import HISTOGRAM_EDGES, WITHIN_ROWS, Report, WeightCheck

SHOWN = 8
TEXT = 48
"""Characters of text that are shown before a token, and of it."""
_BARS = " ▁▂▃▄▅▆▇█"


def screen_of_run(
    ranks: Mapping[int, Sequence[Report]], rank: int, report: Report, decode: Decode | None = None
) -> Iterator[str]:
    """Yield the lines on a run: its verdict in one sentence, what that rests on, and how it has been before.

    `decode` gives the text of token ids; None: ids are shown.
    """
    where = f"step {report.step}" + (f", rank {rank} of {len(ranks)}" if len(ranks) > 1 else "")
    yield f"{where}: {printable(report.sentence)}{_lacking(ranks)}"
    for number, cause in enumerate(report.causes):
        label = "next" if not number else "also"
        text = cause.advice if not number else f"{cause.cause}: {cause.evidence}"
        yield f"  {label:<9}{printable(text)}"
    yield from _history(ranks[rank])
    if report.measures is not None:
        yield ""
        yield from _measures(report.measures, report)
    if report.weights is not None:
        yield ""
        yield from _weights(report.weights)
    if len(report.engines) > 1:
        yield ""
        yield from table(
            ("engine", "version", "sequences", "tokens", "mean |Δ|", "ratio", "z"),
            [
                (
                    printable(part.engine), "" if part.version is None else str(part.version), f"{part.sequences:,}",
                    f"{part.tokens:,}", f"{part.mean_abs:.3g}", f"{part.ratio:.4f}", f"{part.ratio_z:+.1f}",
                )
                for part in report.engines
            ],
        )  # fmt: skip
    if report.histogram:
        yield ""
        yield from _histogram(report)
    if report.worst:
        yield ""
        yield from _worst(report, decode)
    if report.version_lag:
        age = "1 version" if report.version_lag == 1 else f"{report.version_lag} versions"
        yield f"  note: an engine samples with weights that are {age} old"
    for note in report.notes:
        yield f"  note: {printable(note)}"


def lacking_steps(ranks: Mapping[int, Sequence[Report]]) -> dict[int, int]:
    """Return how many steps that another rank has are missing, by the ranks that lack some."""
    steps = {number: {report.step for report in reports} for number, reports in ranks.items()}
    known = set[int]().union(*steps.values())
    return {number: len(known - here) for number, here in steps.items() if known - here}


def _lacking(ranks: Mapping[int, Sequence[Report]]) -> str:
    lacking = lacking_steps(ranks)
    if not lacking:
        return ""
    first, number = next(iter(lacking.items()))
    more = f", nor have {len(lacking) - 1} other ranks of all" if len(lacking) > 1 else ""
    return f" Rank {first} has no report of {number} of the steps{more}."


def screen_of_stages(found: StageComparison) -> Iterator[str]:
    """Yield the lines on two runs' stages."""
    yield printable(found.sentence)
    if found.differing:
        yield ""
        yield from table(
            ("stage", "step", "rank", "micro step", "equal", "first", "max |Δ|", "within 0.1 %"),
            [
                (
                    printable(f"{each.key}.{each.part}" if each.part else each.key), str(each.step), str(each.rank),
                    str(each.micro_step), f"{each.equal:.1%}", "–" if each.first is None else str(list(each.first)),
                    f"{each.max_abs:.3g}", f"{each.within_thousandth:.1%}",
                )
                for each in found.differing[: 2 * SHOWN]
            ],
        )  # fmt: skip
        if len(found.differing) > 2 * SHOWN:
            yield f"  and {len(found.differing) - 2 * SHOWN} more"
    for run, only in (("first", found.only_first), ("second", found.only_second)):
        if only:
            yield f"  only in the {run} run: {printable(', '.join(only[:3]))}" + (
                f" and {len(only) - 3} more" if len(only) > 3 else ""
            )
    for reason in found.unread[:SHOWN]:
        yield f"  not compared: {printable(reason)}"


def screen_of_settings(found: SettingsComparison) -> Iterator[str]:
    """Yield the lines on two runs' settings."""
    matter = sum(bool(each.why) for each in found.differing)
    yield f"{len(found.differing)} settings differ, {matter} of them matter to rollouts; {found.equal} are equal"
    if found.differing:
        yield ""
        rows = [
            tuple(
                printable(cell)[:60]
                for cell in (
                    each.name,
                    "–" if each.first is None else each.first,
                    "–" if each.second is None else each.second,
                    each.why,
                )
            )
            for each in found.differing
        ]
        yield from table(("setting", "first", "second", "why it matters"), rows, left=4)
    if found.traps:
        yield ""
        yield from (f"  {printable(trap)}" for trap in found.traps)


def _history(reports: Sequence[Report]) -> Iterator[str]:
    """Yield the mean |Δ| and the verdicts of all steps, if there are several."""
    sizes = [report.measures.mean_abs if report.measures else math.nan for report in reports]
    if len(sizes) < 2:
        return
    last = sizes[-60:]
    known = [size for size in last if not math.isnan(size)]
    top = max(known, default=0.0)
    bars = "".join("×" if math.isnan(size) else _BARS[max(1, round(8 * size / (top or 1.0)))] for size in last)
    wrong = sum(bool(report.causes) for report in reports)
    yield f"  {'steps':<9}{bars}  mean |Δ| up to {top:.3g}; {wrong} of {len(sizes)} steps have a cause"


def _measures(measures: PolicyMeasures, report: Report) -> Iterator[str]:
    floor = ""
    if report.floor is not None:
        floor = f", {measures.mean_abs / report.floor.mean_abs:.1f} × what rounding gives"
    lines = {
        "tokens": f"{measures.tokens:,} in {measures.sequences:,} sequences",
        "|Δ|": f"mean {measures.mean_abs:.3g}{floor}, median {measures.median_abs:.3g}, 99 % {measures.p99_abs:.3g}, "
        f"largest {measures.max_abs:.3g}",
        "ratio": f"mean {measures.ratio:.4f}, {measures.ratio_z:+.1f} standard errors from 1; outside 0.9 … 1.1 "
        f"{measures.outside_tenth:.1%}, outside 0.5 … 2 {measures.outside_half:.2%}",
        "ESS": f"{measures.ess:.1%} of the tokens, {measures.ess_truncated:.1%} with ratios cut at 2",
        "KL": f"k1 {measures.k1:.3g}, k3 {measures.k3:.3g}; χ² of tokens {measures.chi2_token:.3g}, of sequences "
        f"{measures.chi2_sequence:.3g}",
        "fit": f"correlation {measures.correlation:.4f}, slope {measures.slope:.3f}; perplexity "
        f"{measures.perplexity_rollout:.3g} rollout, {measures.perplexity_train:.3g} trainer",
    }
    if report.first_diverging is not None:
        lines["diverges"] = f"at position {report.first_diverging}, in the median: the first |Δ| above 10 × rounding"
    for label, text in lines.items():
        yield f"  {label:<9}{text}"


def _worst(report: Report, decode: Decode | None) -> Iterator[str]:
    """Yield the tables of the sequences and tokens that differ most."""
    if report.sequences:
        yield from table(
            ("sequence", "tokens", "mean |Δ|", "log ratio", "diverges at"),
            [
                (
                    str(part.sequence), f"{part.tokens:,}", f"{part.mean_abs:.3g}", f"{part.log_ratio:+.3f}",
                    "–" if part.first_diverging is None else str(part.first_diverging),
                )
                for part in report.sequences[:3]
            ],
            left=0,
        )  # fmt: skip
        yield ""
    head = ("sequence", "position", "token", "rollout", "trainer", "Δ")
    rows = [
        (
            str(token.sequence), str(token.position), "" if token.id is None else str(token.id),
            f"{token.rollout:.3f}", f"{token.train:.3f}", f"{token.train - token.rollout:+.3f}",
        )
        for token in report.worst[:SHOWN]
    ]  # fmt: skip
    lines = list(table(head, rows, left=0))
    if decode is not None:
        texts = ["text", *(repr(text_at(token, decode)[-TEXT:])[1:-1] for token in report.worst[:SHOWN])]
        lines = [f"{line}  {printable(text)}" for line, text in zip(lines, texts, strict=True)]
    yield from lines


def _weights(check: WeightCheck) -> Iterator[str]:
    engines = printable(", ".join(check.engines))
    held = f"{check.equal} of {check.num_tensors} tensors as sent, in {engines}"
    yield f"  {'weights':<9}version {check.version}: {held} ({WITHIN_ROWS})"
    for each in check.differing[:SHOWN]:
        yield f"  {'':<9}{printable(each.name)} in {printable(each.engine)}: {each.found}"
    for name in check.missing[:SHOWN]:
        yield f"  {'':<9}{printable(name)}: missing"
    rest = len(check.differing[SHOWN:]) + len(check.missing[SHOWN:])
    if rest:
        yield f"  {'':<9}and {rest} more"
    if check.uncompared:
        yield f"  {'':<9}not compared, as they are of another type there: {len(check.uncompared)} tensors"
    if check.unexpected:
        yield f"  {'':<9}not sent, and there: {printable(', '.join(check.unexpected[:3]))}"


def _histogram(report: Report) -> Iterator[str]:
    top = max(report.histogram) or 1
    bars = "".join(_BARS[math.ceil(8 * count / top)] for count in report.histogram)
    yield f"  {'|Δ|':<9}{HISTOGRAM_EDGES[0]:g} {bars} {HISTOGRAM_EDGES[-1]:g}, half decades"
    parts = ", ".join(f"{part.first}–{part.last}: {part.mean_abs:.3g}" for part in report.positions)
    yield f"  {'position':<9}{parts}"
