"""What a page says of a whole run beside its reference: the verdicts, and the way of the gradients, link by link."""

from __future__ import annotations

import math

from trainermon.analysis.diagnosis.against.gradient_chain import DIFFERS, NOT_COMPARED, NOT_STORED, GradientLink
from trainermon.analysis.diagnosis.against.run_verdicts import RunVerdict, describe, word_of
from trainermon.analysis.diagnosis.findings import Diagnosis
from trainermon.analysis.diagnosis.page.markup import table, text

_UNKNOWN = (NOT_STORED, NOT_COMPARED)


def verdict_table(diagnosis: Diagnosis) -> str:
    """Return an HTML table of how far loss and gradient norm are from the reference run's; "" without any."""
    rows = [_verdict(verdict) for verdict in diagnosis.run_verdicts]
    return table(("quantity", "verdict", "", "limit", "value"), rows, numbers=2) if rows else ""


def _verdict(verdict: RunVerdict) -> tuple[str, ...]:
    colour = "bad" if verdict.differs else "good"
    value = "–" if verdict.value is None else f"{verdict.value:.3g}"
    return (
        text(verdict.quantity.replace("_", " ")),
        f'<span class="{colour}">{word_of(verdict)}</span>',
        text(describe(verdict).partition(": ")[2]),
        f"{verdict.limit:g}",
        value,
    )


def chain_table(diagnosis: Diagnosis) -> str:
    """Return an HTML table of the stations of the gradients' way, and where two runs part; "" where none was stored."""
    if all(link.state in _UNKNOWN for link in diagnosis.gradient_chain):
        return ""
    rows = [_link(link) for link in diagnosis.gradient_chain]
    return table(("link", "", "series", "rank", "first step", "apart by"), rows, numbers=3)


def _link(link: GradientLink) -> tuple[str, ...]:
    colour = "bad" if link.state == DIFFERS else "dim" if link.state in _UNKNOWN else "good"
    size = "–" if not link.relative else f"{link.relative:.2g}"
    if link.relative is not None and math.isnan(link.relative):
        size = "finite on one side only"
    return (
        text(link.link),
        f'<span class="{colour}">{link.state}</span>',
        f"<code>{text(link.series)}</code>" if link.series else "",
        "–" if link.rank is None else str(link.rank),
        "–" if link.step is None else str(link.step),
        size,
    )
