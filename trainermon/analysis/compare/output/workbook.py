"""The answer and the result table as a spreadsheet, with failing rows in colour.

The few parts of a workbook are written directly: a library that makes an object of every cell needs ten times as long.
Source: ECMA-376, Office Open XML, part 1, sections 12 (SpreadsheetML) and 18.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

from trainermon.analysis.compare.answer.summary import details_of, summarise
from trainermon.analysis.compare.comparison import Comparison
from trainermon.analysis.compare.output.lines import CellSyntax, lines
from trainermon.analysis.compare.output.tables import header
from trainermon.analysis.compare.verdicts import ERROR, NOT_COMPARED, UNMATCHED, WARNING
from trainermon.core.errors import DumpError
from trainermon.core.terminal.results import writing

MAX_ROWS = 1_048_500
_ZIP64_ROWS = 500_000  # from here on a sheet may exceed 2 GiB, for which the zip format needs another kind of entry
_LEVEL = 1  # of compression: such text shrinks to a tenth, and three times as fast as by default
_MAX_TEXT = 32_000  # a cell holds 32 767 characters
_UNWRITABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff]")  # not allowed in XML 1.0, even escaped
_FILLS = {ERROR: "FFF8CBAD", WARNING: "FFFFF2CC", UNMATCHED: "FFE7E6E6", NOT_COMPARED: "FFE7E6E6"}
_STYLES = {result: f' s="{number}"' for number, result in enumerate(_FILLS, start=2)}
_HEADER_STYLE = ' s="1"'

_XML = '<?xml version="1.0" encoding="UTF-8" standalone="yes"?>\n'
_PACKAGE = "http://schemas.openxmlformats.org/package/2006"
_OFFICE = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
_SHEET = "http://schemas.openxmlformats.org/spreadsheetml/2006/main"
_TYPES = "application/vnd.openxmlformats-officedocument.spreadsheetml"
_PARTS = {
    "[Content_Types].xml": f'<Types xmlns="{_PACKAGE}/content-types">'
    '<Default Extension="rels" ContentType="application/vnd.openxmlformats-package.relationships+xml"/>'
    f'<Override PartName="/xl/workbook.xml" ContentType="{_TYPES}.sheet.main+xml"/>'
    f'<Override PartName="/xl/worksheets/sheet1.xml" ContentType="{_TYPES}.worksheet+xml"/>'
    f'<Override PartName="/xl/worksheets/sheet2.xml" ContentType="{_TYPES}.worksheet+xml"/>'
    f'<Override PartName="/xl/styles.xml" ContentType="{_TYPES}.styles+xml"/></Types>',
    "_rels/.rels": f'<Relationships xmlns="{_PACKAGE}/relationships">'
    f'<Relationship Id="rId1" Type="{_OFFICE}/officeDocument" Target="xl/workbook.xml"/></Relationships>',
    "xl/workbook.xml": f'<workbook xmlns="{_SHEET}" xmlns:r="{_OFFICE}">'
    '<sheets><sheet name="answer" sheetId="2" r:id="rId3"/><sheet name="compare_result" sheetId="1" r:id="rId1"/>'
    "</sheets></workbook>",
    "xl/_rels/workbook.xml.rels": f'<Relationships xmlns="{_PACKAGE}/relationships">'
    f'<Relationship Id="rId1" Type="{_OFFICE}/worksheet" Target="worksheets/sheet1.xml"/>'
    f'<Relationship Id="rId3" Type="{_OFFICE}/worksheet" Target="worksheets/sheet2.xml"/>'
    f'<Relationship Id="rId2" Type="{_OFFICE}/styles" Target="styles.xml"/></Relationships>',
    "xl/styles.xml": f'<styleSheet xmlns="{_SHEET}"><fonts count="2"><font><sz val="11"/><name val="Calibri"/></font>'
    '<font><b/><sz val="11"/><name val="Calibri"/></font></fonts>'
    f'<fills count="{2 + len(_FILLS)}"><fill><patternFill patternType="none"/></fill>'
    '<fill><patternFill patternType="gray125"/></fill>'
    + "".join(
        f'<fill><patternFill patternType="solid"><fgColor rgb="{colour}"/></patternFill></fill>'
        for colour in _FILLS.values()
    )
    + '</fills><borders count="1"><border><left/><right/><top/><bottom/><diagonal/></border></borders>'
    '<cellStyleXfs count="1"><xf numFmtId="0" fontId="0" fillId="0" borderId="0"/></cellStyleXfs>'
    f'<cellXfs count="{2 + len(_FILLS)}"><xf numFmtId="0" fontId="0" fillId="0" borderId="0" xfId="0"/>'
    '<xf numFmtId="0" fontId="1" fillId="0" borderId="0" xfId="0" applyFont="1"/>'
    + "".join(
        f'<xf numFmtId="0" fontId="0" fillId="{number}" borderId="0" xfId="0" applyFill="1"/>'
        for number in range(2, 2 + len(_FILLS))
    )
    + '</cellXfs><cellStyles count="1"><cellStyle name="Normal" xfId="0" builtinId="0"/></cellStyles></styleSheet>',
}


def write_xlsx(comparison: Comparison, path: Path) -> None:
    """Write the answer and the result table as two sheets of an xlsx file.

    The table is written block by block: memory does not grow with it.

    Raises:
        DumpError: the table has more rows than a sheet can hold.
    """
    num_rows = sum(comparison.row_counts().values())
    if num_rows > MAX_ROWS:
        raise DumpError(f"{num_rows:,} rows are more than a sheet can hold ({MAX_ROWS:,}): write csv")
    with writing(path) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=_LEVEL) as book:
        for name, part in _PARTS.items():
            book.writestr(name, _XML + part)
        book.writestr("xl/worksheets/sheet2.xml", "".join(_answer(comparison)))
        with book.open("xl/worksheets/sheet1.xml", "w", force_zip64=num_rows > _ZIP64_ROWS) as sheet:
            for text in _sheet(comparison, num_rows):
                sheet.write(text.encode())


def _answer(comparison: Comparison) -> Iterator[str]:
    """Yield the sheet that is seen first: the answer, and what the screen says of it."""
    outcome = summarise(comparison)
    yield f'{_XML}<worksheet xmlns="{_SHEET}"><cols><col min="1" max="1" width="12" customWidth="1"/>'
    yield '<col min="2" max="2" width="160" customWidth="1"/></cols><sheetData>'
    yield _row(1, ["A"], _XLSX.cell(outcome.headline), _HEADER_STYLE)
    for number, (name, text) in enumerate(details_of(outcome), start=3):
        yield _row(number, ["A", "B"], _XLSX.cell(name) + _XLSX.cell(text), "")
    yield "</sheetData></worksheet>"


def _sheet(comparison: Comparison, num_rows: int) -> Iterator[str]:
    titles = header(comparison.mode)
    yield f'{_XML}<worksheet xmlns="{_SHEET}"><sheetViews><sheetView workbookViewId="0">'
    yield '<pane xSplit="1" ySplit="1" topLeftCell="B2" activePane="bottomRight" state="frozen"/>'
    yield "</sheetView></sheetViews>"
    yield f'<cols><col min="1" max="2" width="48" customWidth="1"/><col min="3" max="{len(titles)}" width="14" '
    yield 'customWidth="1"/></cols><sheetData>'
    columns = [_column(number) for number in range(1, len(titles) + 1)]
    yield _row(1, columns, "".join(map(_XLSX.cell, titles)), _HEADER_STYLE)
    for number, (result, cells) in enumerate(lines(comparison, _XLSX), start=2):
        yield _row(number, columns, cells, _STYLES.get(result, ""))
    yield f'</sheetData><autoFilter ref="A1:{columns[-1]}{num_rows + 1}"/></worksheet>'


def _row(number: int, columns: Sequence[str], cells: str, style: str) -> str:
    """Return a row. Cells say where they are: the standard does not ask for it, but Gnumeric needs it."""
    parts = cells.split("<c")[1:]
    placed = [f'<c r="{column}{number}"{style}{part}' for column, part in zip(columns, parts, strict=True)]
    return f'<row r="{number}">{"".join(placed)}</row>'


def _column(number: int) -> str:
    """Return the letters of a column, counted from 1.

    >>> _column(2), _column(28)
    ('B', 'AB')
    """
    above, letter = divmod(number - 1, 26)
    return (_column(above) if above else "") + chr(ord("A") + letter)


def _safe(text: str) -> str:
    return escape(_UNWRITABLE.sub("\ufffd", text[:_MAX_TEXT]))


_XLSX = CellSyntax(
    text=('<c t="inlineStr"><is><t>', "</t></is></c>"), number=("<c><v>", "</v></c>"), between="", escape=_safe
)
