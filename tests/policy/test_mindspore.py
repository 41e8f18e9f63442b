"""MindSpore and torch stay apart: no module loads both, neither by itself nor through what it imports."""

import ast
from functools import cache
from pathlib import Path

import trainermon

ROOT = Path(trainermon.__file__).parent
NAMED = ("mindspore", "mindspore.py")


@cache
def imports_of(path, *, lazy=False):
    """Return the dotted names that a module imports when it is loaded; with `lazy`, those in its functions too."""
    found = set()
    waiting = [ast.parse(path.read_text())]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
        is_left_out = isinstance(node, ast.FunctionDef) and not lazy
        is_left_out |= isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        waiting += [] if is_left_out else ast.iter_child_nodes(node)
    return found


def file_of(name):
    """Return the file of a module of the package, None of anything else."""
    path = ROOT.parent.joinpath(*name.split("."))
    return next((each for each in (path.with_suffix(".py"), path / "__init__.py") if each.is_file()), None)


def loads(path, package):
    """Whether a module imports a package anywhere; one that does not have the name is not parsed."""
    return package in path.read_text() and any(name.split(".")[0] == package for name in imports_of(path, lazy=True))


def of_mindspore():
    return [path for path in sorted(ROOT.rglob("*.py")) if loads(path, "mindspore")]


def test_only_what_is_named_mindspore_loads_mindspore():
    assert len(of_mindspore()) > 20
    assert not [path for path in of_mindspore() if not set(path.relative_to(ROOT).parts) & set(NAMED)]


def test_nothing_that_loads_mindspore_loads_torch_through_what_it_imports():
    waiting = list(of_mindspore())
    seen = set(waiting)
    while waiting:
        path = waiting.pop()
        assert "torch" not in {name.split(".")[0] for name in imports_of(path)}, path
        for name in imports_of(path):
            parents = [name.rsplit(".", count)[0] for count in range(name.count(".") + 1)] if file_of(name) else []
            new = {file for each in parents if (file := file_of(each)) is not None} - seen
            seen |= new
            waiting += new
