"""No file over 500 lines, no function over 60: a reader must be able to hold one in mind."""

import ast
import subprocess
import textwrap
from pathlib import Path

from tests.measures import statements

ROOT = Path(__file__).parents[2]
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60
TRACKED = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
SOURCES = sorted(
    path
    for name in TRACKED.split("\0")
    if (path := ROOT / name).suffix in {".py", ".c", ".js", ".css"} and path.is_file()
)


def long_functions(text: str) -> list[tuple[str, int]]:
    if text.count("\n") < MAX_FUNCTION_LINES:
        return []
    functions = [
        node for node in statements(ast.parse(text)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    lengths = [(node.name, _body_lines(node)) for node in functions]
    return [(name, length) for name, length in lengths if length > MAX_FUNCTION_LINES]


def _body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    first = function.body[0]
    documented = ast.get_docstring(function) is not None and isinstance(first, ast.Expr)
    docstring_lines = first.end_lineno - first.lineno + 1 if documented else 0
    return function.end_lineno - function.lineno + 1 - docstring_lines


def test_files_and_their_functions_are_short():
    assert len(SOURCES) > 2000
    found = {}
    for path in SOURCES:
        text = path.read_text(encoding="utf-8")
        lines = text.count("\n")
        functions = long_functions(text) if path.suffix == ".py" else []
        if lines > MAX_FILE_LINES or functions:
            found[str(path.relative_to(ROOT))] = (lines, functions)

    assert found == {}


def test_a_long_function_is_found():
    text = "def long():\n" + "    x = 1\n" * 60
    inside = "try:\n    pass\nexcept OSError:\n    match 1:\n        case _:\n            class Inside:\n"

    assert long_functions(text) == [("long", 61)]
    assert long_functions(inside + textwrap.indent(text, " " * 16)) == [("long", 61)]
