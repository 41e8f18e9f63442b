"""The page itself: what a person needs first stands first. Everything that comes from files is escaped in `markup`."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import trainermon
from trainermon.analysis.diagnosis.findings import (
    BadTensor,
    Contrast,
    Diagnosis,
    DiagnosisVerdict,
    NextCollection,
    PathLink,
    RankFinding,
    RankRole,
)
from trainermon.analysis.diagnosis.page.code import render_excerpt
from trainermon.analysis.diagnosis.page.curves import draw
from trainermon.analysis.diagnosis.page.history import curves
from trainermon.analysis.diagnosis.page.markup import STYLE, section, table, text
from trainermon.analysis.diagnosis.page.over_run import chain_table, verdict_table
from trainermon.analysis.diagnosis.page.values import DumpView, look, render_view
from trainermon.analysis.diagnosis.report import describe_classification, describe_tensor, firing_text
from trainermon.analysis.diagnosis.wording import counted, phase_name
from trainermon.analysis.source.excerpts import excerpt
from trainermon.core.values import as_plain

MAX_RANKS = 1024
MAX_ROWS = 64
_LINE = 110
# Nothing is loaded from anywhere, and nothing runs, whatever a file of the run may hold.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_BADGES = {
    DiagnosisVerdict.LOCATED: "located",
    DiagnosisVerdict.CONSEQUENCE: "consequence of an earlier step",
    DiagnosisVerdict.NOT_REPRODUCED: "not reproduced",
    DiagnosisVerdict.FINITE: "nothing wrong found",
    DiagnosisVerdict.ALERTED: "an alert fired",
    DiagnosisVerdict.EQUAL: "no difference found",
    DiagnosisVerdict.NO_EVIDENCE: "nothing known",
}


def render_page(run_dir: Path, diagnosis: Diagnosis) -> str:
    """Return a diagnosis as the text of one HTML file.

    It reads the run's store and the origin's dump for curves and values.
    """
    dump = look(run_dir, diagnosis)
    return "".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            '<meta name="viewport" content="width=device-width,initial-scale=1">',
            f"<title>{text(diagnosis.headline)}</title><style>{STYLE}</style></head><body>",
            *_head(diagnosis),
            section("The code", *_code(diagnosis, dump)),
            section("Around the step", _plots(run_dir, diagnosis)),
            section("Over the run", verdict_table(diagnosis)),
            section("Along the gradients' way", chain_table(diagnosis)),
            section("From there to the loss" if _is_forward(diagnosis) else "The way it took", _chain(diagnosis)),
            section("The tensor" if diagnosis.reference else "The first bad tensor", *_tensor(diagnosis, dump)),
            section("Beside what it should be", _contrasts(diagnosis)),
            section("Ranks", *_ranks(diagnosis)),
            section("What followed", _list(diagnosis.consequences)),
            section("How it was found", *_found(diagnosis)),
            section("What to collect next", *_collect(diagnosis.collect)),
            f'<p class="dim">trainermon {text(trainermon.__version__)} · the same as data: ',
            f"<code>{_command(diagnosis)}</code></p></body></html>\n",
        ]
    )


def _command(diagnosis: Diagnosis) -> str:
    against = f" --against {diagnosis.reference}" if diagnosis.reference else ""
    step = "" if diagnosis.step is None else f" --step {diagnosis.step}"
    return text(f"trainermon diagnose {diagnosis.run_id}{against}{step} --json")


def _is_forward(diagnosis: Diagnosis) -> bool:
    return all(link.direction == "forward" for link in diagnosis.chain)


def _head(diagnosis: Diagnosis) -> Iterator[str]:
    calm = diagnosis.verdict in (DiagnosisVerdict.FINITE, DiagnosisVerdict.EQUAL, DiagnosisVerdict.NO_EVIDENCE)
    reference = f" · against <code>{text(diagnosis.reference)}</code>" if diagnosis.reference else ""
    yield f'<div class="dim">run <code>{text(diagnosis.run_id)}</code>{reference}</div>'
    if diagnosis.setting_differences:
        yield "<p><b>Settings that differ, what follows may come of them:</b></p>"
        yield _list(diagnosis.setting_differences)
    yield f"<h1>{text(diagnosis.headline)}</h1>"
    yield f'<span class="badge{" calm" if calm else ""}">{_BADGES[diagnosis.verdict]}</span>'
    yield f"<p>{text(diagnosis.reason)}.</p>"
    if diagnosis.causes:
        yield f"<p><b>Usual causes</b>, the most frequent first:</p>{_list(diagnosis.causes)}"
    if diagnosis.look_at:
        yield f"<p><b>Look at</b> {text(diagnosis.look_at)}.</p>"
    if diagnosis.firing:
        yield f"<p><b>Alerts:</b> {text(firing_text(diagnosis))}.</p>"
    tiles = "".join(
        f'<div class="tile"><span>{name}</span><b>{text(value)}</b><small>{text(more)}</small></div>'
        for name, value, more in _facts(diagnosis)
    )
    yield f'<div class="tiles">{tiles}</div>'
    if diagnosis.classification is not None:
        yield f"<p><b>Cause:</b> {text(describe_classification(diagnosis.classification))}</p>"
    if diagnosis.reproducibility is not None and diagnosis.reproducibility_reason:
        yield f"<p><b>Run again:</b> {text(diagnosis.reproducibility_reason)}.</p>"


def _facts(diagnosis: Diagnosis) -> Iterator[tuple[str, object, str]]:
    if diagnosis.step is not None:
        micro = f"micro step {diagnosis.micro_step}" if diagnosis.micro_step else f"attempt {diagnosis.attempt}"
        yield "Step", diagnosis.step, micro if diagnosis.micro_step or diagnosis.attempt is not None else ""
    if diagnosis.rank is not None:
        yield "Rank", diagnosis.rank, ""
    if diagnosis.module:
        call = f"call {diagnosis.call}" if diagnosis.call and not diagnosis.api else ""
        yield "Module", diagnosis.module, " ".join(filter(None, [diagnosis.class_name, call]))
    if diagnosis.api:
        yield "Function", diagnosis.api, ""
    if diagnosis.module:
        yield "Phase", phase_name(diagnosis.phase), ""
    if diagnosis.classification is not None:
        yield "Cause", diagnosis.classification.cause, diagnosis.classification.operation
    if diagnosis.reproducibility is not None:
        yield "Run again", str(diagnosis.reproducibility).replace("_", " "), ""


def _code(diagnosis: Diagnosis, dump: DumpView) -> Iterator[str]:
    made = diagnosis.classification.source if diagnosis.classification is not None else ""
    called = diagnosis.source if diagnosis.source != made else ""
    for title, frame in (("Made in", made), ("Called in", called)):
        found = excerpt(frame, dump.sources) if frame else None
        if found is not None:
            yield render_excerpt(found, title)
        elif frame:
            yield f"<p>{title} <code>{text(frame)}</code></p>"
    if dump.stack and (made or called):  # without a line of the model it shows only where the replay ran
        frames = "".join(f"<li><code>{text(' '.join(frame.split()))}</code></li>" for frame in dump.stack)
        yield f"<details><summary>Call stack, innermost first</summary><ul>{frames}</ul></details>"


def _plots(run_dir: Path, diagnosis: Diagnosis) -> str:
    found = curves(run_dir, diagnosis)
    if not found or diagnosis.step is None:
        return ""
    plots = "".join(
        f'<div class="plot"><h3>{text(curve.title)}</h3>{draw(curve, diagnosis.step)}</div>' for curve in found
    )
    several = len(diagnosis.ranks) > 1 and diagnosis.rank is not None
    lines = f"Line: rank {diagnosis.rank}. Band: all ranks. " if several else ""
    lines += "Dashed: the reference. " if any(curve.reference for curve in found) else ""
    return (
        f'<div class="plots">{plots}</div><p class="dim">{lines}Cross: not finite in that step, on some rank.'
        " A rank on which something is not finite has no point there.</p>"
    )


def _chain(diagnosis: Diagnosis) -> str:
    rows: list[tuple[str, ...]] = []
    for link in diagnosis.chain[:MAX_ROWS]:
        if link.omitted:
            rows.append((f'<span class="dim">… {counted(link.omitted, "more module")}</span>', "", "", ""))
        rows.append(_link(link))
    return table(("module", "direction", "tensor", "not finite"), rows) if rows else ""


def _link(link: PathLink) -> tuple[str, ...]:
    kind = f' <span class="dim">{text(link.class_name)}</span>' if link.class_name else ""
    call = f' <span class="dim">call {link.call}</span>' if link.call else ""
    return (
        f"<code>{text(link.module)}</code>{kind}{call}",
        text(link.direction),
        _described(link.tensor),
        _share(link.tensor),
    )


def _described(tensor: BadTensor) -> str:
    return text(describe_tensor(tensor))


def _share(tensor: BadTensor) -> str:
    bad = max(0, tensor.nans) + max(0, tensor.infs)
    if tensor.count <= 0 or not bad:
        return ""
    share = bad / tensor.count
    percent = f"{share:.1%}" if share >= 1e-3 else "&lt; 0.1%"
    return f'<span class="share"><i style="width:{max(3.0, 100 * share):.0f}%"></i></span> {percent}'


def _tensor(diagnosis: Diagnosis, dump: DumpView) -> Iterator[str]:
    if diagnosis.tensor is None:
        return
    yield f"<p>{_described(diagnosis.tensor)}</p>"
    if dump.tensor is not None:
        yield render_view(dump.tensor)
    elif diagnosis.dump is not None:
        yield '<p class="dim">Its elements were not dumped: <code>"task": "tensor"</code> keeps them,'
        yield " in the configuration of a dump, or in the monitor's under <code>replay</code>.</p>"
    if diagnosis.parameters:
        names = ", ".join(
            f"<code>{text(bad.name)}</code> ({bad.nans:,} NaN, {bad.infs:,} Inf of {bad.count:,})"
            for bad in diagnosis.parameters
        )
        yield f"<p>Weights that were bad before the forward: {names}</p>"


def _contrasts(diagnosis: Diagnosis) -> str:
    other = "reference" if diagnosis.reference else "usual"
    rows = [row for contrast in diagnosis.contrasts[:MAX_ROWS] for row in _contrast(contrast, other)]
    return table(("place", "rank", "side", "values", "apart by", "explained"), rows, numbers=2) if rows else ""


def _contrast(contrast: Contrast, other: str) -> Iterator[tuple[str, ...]]:
    rank = "" if contrast.rank is None else str(contrast.rank)
    apart = "–" if contrast.relative is None else f"{contrast.relative:.2g}"
    expected = "–" if contrast.expected is None else f"{contrast.expected:.2g}"
    if contrast.relative is not None and math.isnan(contrast.relative):
        apart, expected = "finite on one side only", "–"
    yield f"<code>{text(contrast.place)}</code>", rank, "here", _numbers(contrast.value), apart, expected
    yield "", "", text(other), _numbers(contrast.usual), "", ""


def _numbers(values: Mapping[str, float | None]) -> str:
    return text(", ".join(f"{name} {value:.6g}" for name, value in values.items() if value is not None) or "–")


def _ranks(diagnosis: Diagnosis) -> Iterator[str]:
    if not diagnosis.ranks:
        return
    squares = "".join(
        f'<span class="{finding.role}" title="{text(_rank_title(finding))}">{finding.rank}</span>'
        for finding in diagnosis.ranks[:MAX_RANKS]
    )
    more = len(diagnosis.ranks) - MAX_RANKS
    yield f'<div class="ranks">{squares}{f" and {more} more" if more > 0 else ""}</div>'
    words = _BESIDE_REFERENCE if diagnosis.reference else {}
    telling = sorted(diagnosis.ranks, key=lambda finding: (finding.role != "origin", finding.rank))[:MAX_ROWS]
    rows = [
        (
            str(finding.rank),
            f'<span class="{_COLOURS.get(finding.role, "dim")}">{words.get(finding.role, finding.role)}</span>',
            text(finding.replay + (f": {finding.replay_reason}" if finding.replay_reason else "")),
            "–" if finding.unreduced is None else str(finding.unreduced),
            "–" if finding.reduced is None else str(finding.reduced),
        )
        for finding in telling
    ]
    which = "other" if diagnosis.reference else "bad"
    yield table(("rank", "role", "replay", f"{which} gradients before the reduction", "after it"), rows, numbers=2)


_COLOURS = {RankRole.ORIGIN: "bad", RankRole.REACHED: "bad", RankRole.INNOCENT: "good"}
_BESIDE_REFERENCE = {
    RankRole.ORIGIN: "differs first",
    RankRole.REACHED: "differs as a consequence",
    RankRole.INNOCENT: "agrees",
    RankRole.UNKNOWN: "not known",
}


def _rank_title(finding: RankFinding) -> str:
    return f"rank {finding.rank}: {finding.role}, replay {finding.replay}"


def _list(items: tuple[str, ...]) -> str:
    return f"<ul>{''.join(f'<li>{text(item)}</li>' for item in items)}</ul>" if items else ""


def _found(diagnosis: Diagnosis) -> Iterator[str]:
    rows = [
        (text(str(level.level).replace("_", " ")), text(level.answer or "–"), text(level.reason), text(level.source))
        for level in diagnosis.levels
    ]
    if rows:
        yield table(("level", "answer", "because", "by"), rows)
    if diagnosis.candidates:
        yield f"<p>The evidence cannot tell it from <code>{text(', '.join(diagnosis.candidates))}</code>.</p>"
    if diagnosis.evidence:
        yield f"<p>Data that this rests on:</p>{_list(diagnosis.evidence)}"
    if diagnosis.dump is not None:
        yield f"<p>Dump of the origin: <code>{text(diagnosis.dump)}</code></p>"


def _collect(order: NextCollection | None) -> Iterator[str]:
    if order is None:
        return
    yield f"<p>{text(order.reason)}.</p>"
    for name, configuration in (
        ("config.json, for PrecisionDebugger", order.debugger),
        ("monitor_config.json, for TrainerMon", order.monitor),
    ):
        if configuration is not None:
            plain = as_plain(configuration)
            short = json.dumps(plain)
            lines = [short] if len(short) < _LINE else json.dumps(plain, indent=2).splitlines()
            box = "\n".join(text(line) for line in lines)
            yield f'<p class="dim">{name}:</p><pre class="box">{box}</pre>'
