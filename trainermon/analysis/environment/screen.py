"""A comparison, and a pack, as text for a terminal."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from trainermon.analysis.environment.differences import DifferenceLevel, EnvironmentComparison, SettingDifference
from trainermon.core.environment.pack import EnvironmentPack
from trainermon.core.terminal.escapes import printable

MAX_VALUE = 60
MAX_INFOS = 5
_HASH, _SHOWN_DIGITS = re.compile(r"[0-9a-f]{16,64}"), 12  # enough to tell two apart, as git shows them
_COLOURS = {DifferenceLevel.ERROR: "\033[1;31m", DifferenceLevel.WARNING: "\033[33m"}
_END = "\033[0m"


def render_comparison(comparison: EnvironmentComparison, *, everything: bool = False, colour: bool = False) -> str:
    """Return a comparison for a terminal: the headline, then what changes numbers, then the rest.

    Of what does not change numbers, a few rows of a section are shown unless `everything` is wanted.
    """
    lines = [printable(comparison.headline)]
    lines += [f"  first   {printable(comparison.sources[0])}", f"  second  {printable(comparison.sources[1])}"]
    for section in comparison.sections:
        lines += _section(comparison, section, everything=everything, colour=colour)
    lines += [f"note: {printable(note)}" for note in comparison.notes]
    return "\n".join(lines) + "\n"


def _section(comparison: EnvironmentComparison, section: str, *, everything: bool, colour: bool) -> Iterator[str]:
    rows = [row for row in comparison.rows if row.section == section]
    shown = rows if everything else [row for row in rows if row.level is not DifferenceLevel.SAME]
    if not shown:
        yield f"\n{section}: no difference in {len(rows):,}"
        return
    yield f"\n{section}"
    infos = 0
    for row in shown:
        infos += row.level is DifferenceLevel.INFO
        if everything or row.level is not DifferenceLevel.INFO or infos <= MAX_INFOS:
            yield _row(row, colour=colour)
    if infos > MAX_INFOS and not everything:
        yield f"  …        and {infos - MAX_INFOS:,} more that change no numbers; --all shows them"


def _row(row: SettingDifference, *, colour: bool) -> str:
    word = f"{row.level.value:<8}"
    if colour and row.level in _COLOURS:
        word = f"{_COLOURS[row.level]}{word}{_END}"
    names = [name for name in dict.fromkeys(row.names) if name is not None]
    reason = f"  ({printable(row.reason)})" if row.reason else ""
    first, second = (shown_value(value) for value in row.values)
    between = f"{first}  →  {second}" if row.level is not DifferenceLevel.SAME else first
    return f"  {word} {printable(' = '.join(names))}: {between}{reason}"


def shown_value(value: Any, most: int = MAX_VALUE) -> str:
    """Return a value as short text; – for one that is not there, the first digits of a hash unless `most` is large.

    Numbers, which may differ in their last digit alone, are whole.
    """
    if value is None:
        return "–"
    text = value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
    text = printable(text)
    if text.lstrip("-").isdecimal():
        return text
    if most <= MAX_VALUE and _HASH.fullmatch(text):
        return text[:_SHOWN_DIGITS]
    return text if len(text) <= most else f"{text[: most - 1]}…"


def render_pack(pack: EnvironmentPack, section: str | None = None) -> str:
    """Return what a pack holds: a line per section, or every setting of one."""
    if section is not None:
        return "".join(f"{line}\n" for line in _whole_section(pack, section))
    lines = [f"{printable(pack.source)}: collected by {pack.origin}"]
    lines += [f"  {name:<16}{len(settings):>6,} settings" for name, settings in pack.sections.items()]
    if pack.ranks:
        shown = sorted({part for ranks in pack.ranks.values() for part in ranks})
        lines.append(f"  {'ranks':<16}{len(pack.ranks):>6,} with {', '.join(shown)}")
    lines += [f"  note: {printable(note)}" for note in pack.notes]
    return "\n".join(lines) + "\n"


def _whole_section(pack: EnvironmentPack, section: str) -> Iterator[str]:
    for name, value in pack.sections.get(section, {}).items():
        yield f"{printable(name)}: {shown_value(value, 2000)}"
    for rank, shown in sorted(pack.ranks.items()):
        part = shown.get(section)
        if isinstance(part, dict) and section not in pack.sections:
            for name, value in part.items():
                yield f"rank {rank}, {printable(name)}: {shown_value(value, 2000)}"
