"""The result table as a spreadsheet, with failing rows in colour. Needs the extra `compare`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainermon.analysis.compare.comparison import Comparison
from trainermon.analysis.compare.tables import header, table
from trainermon.analysis.compare.verdicts import ERROR, UNMATCHED, WARNING
from trainermon.monitor.errors import DumpError

if TYPE_CHECKING:
    from xlsxwriter import Workbook

MAX_ROWS = 1_048_500
_FILL = {ERROR: "#F8CBAD", WARNING: "#FFF2CC", UNMATCHED: "#E7E6E6"}
_NAME_WIDTH = 48


def write_xlsx(comparison: Comparison, path: Path) -> None:
    """Write the result table as xlsx, row by row: memory does not grow with it.

    Raises:
        DumpError: the table has more rows than a sheet can hold, or the writer is not installed.
    """
    rows = sum(comparison.row_counts().values())
    if rows > MAX_ROWS:
        raise DumpError(f"{rows:,} rows are more than a sheet can hold ({MAX_ROWS:,}): write csv")
    try:
        import xlsxwriter
    except ImportError as error:
        raise DumpError("xlsx needs XlsxWriter: pip install 'trainermon[compare]', or write csv") from error
    options = {
        "constant_memory": True,
        "nan_inf_to_errors": True,
        "strings_to_formulas": False,
        "strings_to_urls": False,
    }
    with xlsxwriter.Workbook(str(path), options) as book:
        _write(book, comparison)


def _write(book: Workbook, comparison: Comparison) -> None:
    sheet = book.add_worksheet("compare_result")
    titles = header(comparison.mode)
    result = titles.index("Result")
    sheet.write_row(0, 0, titles, book.add_format({"bold": True, "bottom": 1}))
    sheet.freeze_panes(1, 1)
    sheet.set_column(0, 1, _NAME_WIDTH)
    sheet.set_column(2, len(titles) - 1, 14)
    formats = {name: book.add_format({"bg_color": colour}) for name, colour in _FILL.items()}
    number = 0
    for number, cells in enumerate(table(comparison), start=1):
        sheet.write_row(number, 0, [_cell(cell) for cell in cells], formats.get(str(cells[result])))
    sheet.autofilter(0, 0, number, len(titles) - 1)


def _cell(value: Any) -> Any:
    return value[:32_000] if isinstance(value, str) else value  # a cell holds 32 767 characters
