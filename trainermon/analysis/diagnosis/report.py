"""A diagnosis as text for a terminal: at most 40 lines, aligned, coloured only on a terminal."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Iterator

from trainermon.analysis.diagnosis.against.gradient_chain import chain_texts
from trainermon.analysis.diagnosis.against.run_verdicts import describe
from trainermon.analysis.diagnosis.findings import (
    BadTensor,
    Contrast,
    Diagnosis,
    LevelFinding,
    NextCollection,
    PathLink,
    PlaceLevel,
    RankFinding,
    RankRole,
    Symptom,
)
from trainermon.analysis.diagnosis.wording import counted, phase_name
from trainermon.analysis.environment.apart import lines_of
from trainermon.dump.files.verdicts import OperationVerdict, Reproducibility

WIDTH = 100
MAX_LINES = 40
_LABEL = 10
_MAX_RANKS = 8
_MAX_PARAMETERS = 4
_MAX_EVIDENCE = 5
_MAX_CONTRASTS = 3
_MAX_FIRING = 4
_MAX_LINKS_BESIDE_LEVELS = 5
_BESIDE_REFERENCE = {
    RankRole.ORIGIN: "differs first",
    RankRole.REACHED: "differs as a consequence",
    RankRole.INNOCENT: "agrees",
    RankRole.UNKNOWN: "not known",
}
_SAID = {
    Reproducibility.REPRODUCIBLE: "reproducible",
    Reproducibility.NOT_REPRODUCIBLE: "not reproducible",
    Reproducibility.STATEFUL: "stateful",
    Reproducibility.UNKNOWN: "not known",
}


def render_text(diagnosis: Diagnosis, *, colour: bool = False) -> str:
    """Return the diagnosis as several lines of text for a terminal, with a newline at the end.

    `colour` adds escape codes.
    """
    lines = list(lines_of(diagnosis.setting_differences))
    lines += [_bold(line) if colour else line for line in _wrapped("", diagnosis.headline)]
    for label, text in _facts(diagnosis):
        lines += _wrapped(label, text)
    causes = (f"{number}. {cause}" for number, cause in enumerate(diagnosis.causes, start=1))
    lines += _block("usually", [line for cause in causes for line in _wrapped("", cause)])
    lines += _wrapped("look at", diagnosis.look_at) if diagnosis.look_at else []
    if diagnosis.symptom is not Symptom.NONFINITE:  # there the facts above say the same
        lines += _block("levels", [line for level in diagnosis.levels for line in _level_lines(level)])
    lines += _block("gradients", chain_texts(diagnosis.gradient_chain))
    other = "reference" if diagnosis.reference else "usual"
    contrasts = diagnosis.contrasts[:_MAX_CONTRASTS]
    lines += _block("values", [line for contrast in contrasts for line in _values(contrast, other)])
    chain = [_link_text(link, _chain_width(diagnosis)) for link in diagnosis.chain]
    lines += _block("chain", chain[: _MAX_LINKS_BESIDE_LEVELS if diagnosis.contrasts else None])
    telling = tuple(finding for finding in diagnosis.ranks if _tells(finding))
    lines += _block("ranks", list(_compared_texts(telling) if diagnosis.reference else _rank_texts(telling)))
    lines += _block("after it", [line for text in diagnosis.consequences for line in _wrapped("", text)])
    evidence = diagnosis.evidence[:_MAX_EVIDENCE]
    last = list(_next(diagnosis.collect)) if diagnosis.collect is not None else []
    room = max(1, MAX_LINES - len(lines) - len(last) - 1)
    lines += _block("evidence", [textwrap.shorten(text, WIDTH + 40, placeholder=" …") for text in evidence][:room])
    return "\n".join([*lines[: MAX_LINES - len(last)], *last]) + "\n"


def _level_lines(level: LevelFinding) -> list[str]:
    name = str(level.level).replace("_", " ")
    answer = level.answer or "–"
    return textwrap.wrap(f"{name:<11} {answer}: {level.reason}", WIDTH, subsequent_indent=" " * 12)


def _values(contrast: Contrast, other: str) -> Iterator[str]:
    """Yield the place, and below it both sides, number under number; of what is equal, the place only."""
    if contrast.relative == 0:
        yield f"{contrast.place} is equal"
        return
    size = "" if contrast.relative is None else f", apart by {contrast.relative:.2g}"
    is_known = contrast.expected is not None and math.isfinite(contrast.expected)
    expected = f", where {contrast.expected:.2g} is explained" if is_known else ""
    is_bad = contrast.relative is not None and math.isnan(contrast.relative)
    yield f"{contrast.place}{', finite on one side only' if is_bad else size + expected}"
    sides = (("here", contrast.value), (other, contrast.usual))
    names = [name for name in contrast.value if any(values.get(name) is not None for _, values in sides)]
    for side, values in sides:
        texts = (f"{name} {_number(values.get(name)):<13}" for name in names)
        yield f"  {side:<{len(other)}}  {' '.join(texts)}".rstrip()


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.6g}"


def _next(order: NextCollection) -> Iterator[str]:
    """Yield why and what to collect next, a configuration on one line each."""
    yield from _wrapped("next", order.reason)
    for name, configuration in (("config.json", order.debugger), ("monitor_config.json", order.monitor)):
        if configuration is not None:
            yield from _block("", [f"{name}: {json.dumps(configuration)}"])


def describe_tensor(tensor: BadTensor) -> str:
    """Return a few words on a bad tensor: place, type, shape and the share of elements that are NaN or Inf."""
    shape = f"[{', '.join(map(str, tensor.shape))}]" if tensor.shape else ""
    bad = [f"{number:,} {name}" for number, name in ((tensor.nans, "NaN"), (tensor.infs, "Inf")) if number > 0]
    is_finite = tensor.nans == tensor.infs == 0
    share = f"{' + '.join(bad) or 'non-finite'}{f' of {tensor.count:,}' if tensor.count > 0 else ''}"
    dtype = tensor.dtype.removeprefix("<class '").removesuffix("'>")  # an argument that is no tensor
    words = [tensor.slot, f"{dtype}{shape}", "" if is_finite else share]
    if tensor.min is not None and tensor.max is not None and math.isfinite(tensor.min):
        low, high = tensor.min + 0.0, tensor.max + 0.0  # -0.0 is 0
        words.append(f"{'' if is_finite else 'the rest '}{low:.3g} … {high:.3g}")
    return ", ".join(filter(None, words))


def describe_classification(verdict: OperationVerdict) -> str:
    """Return the cause, the operation, and what to collect where the cause is not known, in a few words."""
    collect = f". To know: {verdict.collect}" if verdict.collect else ""
    name = f"{verdict.operation}: " if verdict.operation else ""
    return f"{verdict.cause}: {name}{verdict.reason}{collect}"


def firing_text(diagnosis: Diagnosis) -> str:
    """Return which alerts of the run still fire, in a few words; expects at least one."""
    more = len(diagnosis.firing) - _MAX_FIRING
    return f"still firing: {', '.join(diagnosis.firing[:_MAX_FIRING])}{f' and {more} more' if more > 0 else ''}"


def _alerts(diagnosis: Diagnosis) -> Iterator[tuple[str, str]]:
    if diagnosis.firing:
        yield "alerts", f"{firing_text(diagnosis)}; `trainermon alerts {diagnosis.run_id}` has them"


def _facts(diagnosis: Diagnosis) -> Iterator[tuple[str, str]]:
    yield "run", ", ".join([diagnosis.run_id, *_place(diagnosis)])
    if diagnosis.reference:
        yield "against", diagnosis.reference
    for verdict in diagnosis.run_verdicts:
        yield verdict.quantity.replace("_", " "), describe(verdict)
    yield from _alerts(diagnosis)
    yield "why", diagnosis.reason
    if diagnosis.module:
        kind = f" ({diagnosis.class_name})" if diagnosis.class_name else ""
        call = f", call {diagnosis.call}" if diagnosis.call and not diagnosis.api else ""
        yield "module", f"{diagnosis.module}{kind}{call}, phase: {phase_name(diagnosis.phase)}"
    domain = next((level for level in diagnosis.levels if level.level is PlaceLevel.DOMAIN and level.answer), None)
    if domain is not None and diagnosis.symptom is Symptom.NONFINITE:
        yield "domain", f"{domain.answer}: {domain.reason}"
    if diagnosis.api:
        yield "function", diagnosis.api
    if diagnosis.tensor is not None:
        yield "tensor", describe_tensor(diagnosis.tensor)
    yield from _causes(diagnosis)
    if diagnosis.source and (diagnosis.classification is None or diagnosis.classification.source != diagnosis.source):
        yield "called in", diagnosis.source
    if diagnosis.parameters:
        names = [parameter.name for parameter in diagnosis.parameters]
        more = f" and {len(names) - _MAX_PARAMETERS} more" if len(names) > _MAX_PARAMETERS else ""
        yield "weights", f"not finite: {', '.join(names[:_MAX_PARAMETERS])}{more}"
    if diagnosis.dump:
        yield "dump", diagnosis.dump


def _place(diagnosis: Diagnosis) -> Iterator[str]:
    parts = {
        "step": diagnosis.step,
        "attempt": diagnosis.attempt,
        "rank": diagnosis.rank,
        "micro step": diagnosis.micro_step or None,
    }
    return (f"{name} {value}" for name, value in parts.items() if value is not None)


def _causes(diagnosis: Diagnosis) -> Iterator[tuple[str, str]]:
    if diagnosis.candidates and diagnosis.symptom is not Symptom.NONFINITE:
        shown, number = diagnosis.candidates[:_MAX_PARAMETERS], len(diagnosis.candidates)
        yield "or", ", ".join(shown) + (f" and {number - len(shown)} more" if number > len(shown) else "")
    if diagnosis.classification is not None:
        yield "cause", describe_classification(diagnosis.classification)
        if diagnosis.classification.source:
            yield "made in", diagnosis.classification.source
    if diagnosis.reproducibility is not None:
        yield "again", f"{_SAID[diagnosis.reproducibility]}: {diagnosis.reproducibility_reason}"


def _chain_width(diagnosis: Diagnosis) -> int:
    return max((len(link.module) for link in diagnosis.chain), default=0)


def _link_text(link: PathLink, width: int) -> str:
    omitted = f"… {link.omitted} more …  " if link.omitted else ""
    return f"{omitted}{link.module:<{width}}  {describe_tensor(link.tensor)}"


def _tells(finding: RankFinding) -> bool:
    """Return whether there is something to say of a rank: it replayed the step, or something was not finite on it."""
    return finding.replay != "none" or finding.role != "unknown" or bool(finding.unreduced or finding.reduced)


def _rank_texts(ranks: tuple[RankFinding, ...]) -> Iterator[str]:
    interesting = sorted(ranks, key=lambda finding: (finding.role != "origin", finding.rank))
    for finding in interesting[:_MAX_RANKS]:
        why = f": {finding.replay_reason}" if finding.replay_reason else ""
        words = ["no replay" if finding.replay == "none" else f"replay {finding.replay}{why}"]
        for name, number in (("before", finding.unreduced), ("after", finding.reduced)):
            if number is not None:
                words.append(f"{counted(number, 'bad gradient')} {name} the reduction")
        yield f"{finding.rank:>4}  {finding.role:<8}  {', '.join(words)}"
    if len(interesting) > _MAX_RANKS:
        yield f"      and {len(interesting) - _MAX_RANKS} more ranks"


def _compared_texts(ranks: tuple[RankFinding, ...]) -> Iterator[str]:
    for finding in sorted(ranks, key=lambda finding: (finding.role != "origin", finding.rank))[:_MAX_RANKS]:
        words = [_BESIDE_REFERENCE[finding.role]]
        for name, number in (("before", finding.unreduced), ("after", finding.reduced)):
            if number:
                words.append(f"{counted(number, 'other gradient')} {name} the reduction")
        yield f"{finding.rank:>4}  {', '.join(words)}"
    if len(ranks) > _MAX_RANKS:
        yield f"      and {len(ranks) - _MAX_RANKS} more ranks"


def _block(label: str, lines: list[str]) -> list[str]:
    return [f"{label if index == 0 else '':<{_LABEL}} {line}" for index, line in enumerate(lines)]


def _wrapped(label: str, text: str) -> list[str]:
    lines = textwrap.wrap(text, WIDTH, break_long_words=False, break_on_hyphens=False) or [""]
    return _block(label, lines) if label else lines


def _bold(text: str) -> str:
    return f"\033[1m{text}\033[0m"
