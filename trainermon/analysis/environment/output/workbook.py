"""Tables as a workbook, one sheet each. The few parts of a workbook are written directly.

Source: ECMA-376, Office Open XML, part 1, sections 12 (SpreadsheetML) and 18.
"""

from __future__ import annotations

import io
import re
import zipfile
from collections.abc import Iterator, Sequence
from xml.sax.saxutils import escape, quoteattr

from trainermon.analysis.environment.differences import DifferenceLevel
from trainermon.analysis.environment.output.sheets import Cell, ResultSheet

_MAX_TEXT = 32_000  # a cell holds 32 767 characters
_UNWRITABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")  # not allowed in XML 1.0
_FILLS = {DifferenceLevel.ERROR: "FFF8CBAD", DifferenceLevel.WARNING: "FFFFF2CC", DifferenceLevel.INFO: "FFE7E6E6"}
_STYLES = {level: number for number, level in enumerate(_FILLS, start=2)}
_XML = '<?xml version="1.0" encoding="UTF-8" standalone="yes"?>\n'
_PACKAGE = "http://schemas.openxmlformats.org/package/2006"
_OFFICE = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
_MAIN = "http://schemas.openxmlformats.org/spreadsheetml/2006/main"
_TYPES = "application/vnd.openxmlformats-officedocument.spreadsheetml"


def workbook_of(sheets: Sequence[ResultSheet]) -> bytes:
    """Return the tables as the bytes of an xlsx file; rows that matter are coloured."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as book:
        for name, part in _parts(sheets):
            book.writestr(zipfile.ZipInfo(name), _XML + part, zipfile.ZIP_DEFLATED)
    return buffer.getvalue()


def _parts(sheets: Sequence[ResultSheet]) -> Iterator[tuple[str, str]]:
    numbers = range(1, len(sheets) + 1)
    over = "".join(
        f'<Override PartName="/xl/worksheets/sheet{n}.xml" ContentType="{_TYPES}.worksheet+xml"/>' for n in numbers
    )
    yield (
        "[Content_Types].xml",
        f'<Types xmlns="{_PACKAGE}/content-types">'
        '<Default Extension="rels" ContentType="application/vnd.openxmlformats-package.relationships+xml"/>'
        f'<Override PartName="/xl/workbook.xml" ContentType="{_TYPES}.sheet.main+xml"/>{over}'
        f'<Override PartName="/xl/styles.xml" ContentType="{_TYPES}.styles+xml"/></Types>',
    )
    yield "_rels/.rels", _relations([("officeDocument", "xl/workbook.xml")])
    names = "".join(
        f'<sheet name={quoteattr(sheet.name[:31])} sheetId="{n}" r:id="rId{n}"/>'
        for n, sheet in zip(numbers, sheets, strict=True)
    )
    yield "xl/workbook.xml", f'<workbook xmlns="{_MAIN}" xmlns:r="{_OFFICE}"><sheets>{names}</sheets></workbook>'
    targets = [("worksheet", f"worksheets/sheet{n}.xml") for n in numbers]
    yield "xl/_rels/workbook.xml.rels", _relations([*targets, ("styles", "styles.xml")])
    yield "xl/styles.xml", _styles()
    for number, sheet in zip(numbers, sheets, strict=True):
        yield f"xl/worksheets/sheet{number}.xml", _sheet(sheet)


def _relations(targets: Sequence[tuple[str, str]]) -> str:
    inside = "".join(
        f'<Relationship Id="rId{n}" Type="{_OFFICE}/{kind}" Target="{target}"/>'
        for n, (kind, target) in enumerate(targets, start=1)
    )
    return f'<Relationships xmlns="{_PACKAGE}/relationships">{inside}</Relationships>'


def _styles() -> str:
    fills = "".join(
        f'<fill><patternFill patternType="solid"><fgColor rgb="{colour}"/></patternFill></fill>'
        for colour in _FILLS.values()
    )
    forms = "".join(
        f'<xf numFmtId="0" fontId="0" fillId="{number}" borderId="0" xfId="0" applyFill="1"/>'
        for number in _STYLES.values()
    )
    return (
        f'<styleSheet xmlns="{_MAIN}"><fonts count="2"><font><sz val="11"/><name val="Calibri"/></font>'
        f'<font><b/><sz val="11"/><name val="Calibri"/></font></fonts><fills count="{2 + len(_FILLS)}">'
        f'<fill><patternFill patternType="none"/></fill><fill><patternFill patternType="gray125"/></fill>'
        f"{fills}</fills>"
        '<borders count="1"><border><left/><right/><top/><bottom/><diagonal/></border></borders>'
        '<cellStyleXfs count="1"><xf numFmtId="0" fontId="0" fillId="0" borderId="0"/></cellStyleXfs>'
        f'<cellXfs count="{2 + len(_FILLS)}"><xf numFmtId="0" fontId="0" fillId="0" borderId="0" xfId="0"/>'
        f'<xf numFmtId="0" fontId="1" fillId="0" borderId="0" xfId="0" applyFont="1"/>{forms}</cellXfs>'
        '<cellStyles count="1"><cellStyle name="Normal" xfId="0" builtinId="0"/></cellStyles></styleSheet>'
    )


def _sheet(sheet: ResultSheet) -> str:
    last = chr(ord("A") + len(sheet.titles) - 1)
    rows = [_row(1, sheet.titles, 1)]
    for number, (cells, level) in enumerate(zip(sheet.rows, sheet.levels, strict=True), start=2):
        rows.append(_row(number, cells, _STYLES.get(level, 0)))
    return (
        f'<worksheet xmlns="{_MAIN}"><sheetViews><sheetView workbookViewId="0"><pane ySplit="1" topLeftCell="A2" '
        'activePane="bottomLeft" state="frozen"/></sheetView></sheetViews><cols><col min="1" '
        f'max="{len(sheet.titles)}" width="26" customWidth="1"/></cols><sheetData>{"".join(rows)}</sheetData>'
        f'<autoFilter ref="A1:{last}{len(rows)}"/></worksheet>'
    )


def _row(number: int, cells: Sequence[Cell], style: int) -> str:
    inside = "".join(_cell(f"{chr(ord('A') + column)}{number}", cell, style) for column, cell in enumerate(cells))
    return f'<row r="{number}">{inside}</row>'


def _cell(place: str, value: Cell, style: int) -> str:
    begin = f'<c r="{place}" s="{style}"'
    if value is None:
        return f"{begin}/>"
    if isinstance(value, bool):
        return f'{begin} t="b"><v>{int(value)}</v></c>'
    if isinstance(value, int | float) and abs(value) < 1e300:  # what is not finite, or longer, is a text
        return f"{begin}><v>{value!r}</v></c>"
    text = escape(_UNWRITABLE.sub("\ufffd", str(value)[:_MAX_TEXT]))
    return f'{begin} t="inlineStr"><is><t xml:space="preserve">{text}</t></is></c>'
