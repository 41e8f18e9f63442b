"""Prints how the code is built, in numbers: `make measure`. Policy tests hold them to their limits."""

from __future__ import annotations

import ast
import collections
import dataclasses
import functools
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "trainermon"
MAX_ATTRIBUTES, MAX_PARAMETERS, MAX_LINES = 12, 8, 50
TEARDOWN = ["let_go", "release", "forget", "clear", "abandon", "give_up", "discard", "fall_silent", "finish"]
"""Words beside detach, close, stop and reset that take something away; `remove` is what torch calls it of a hook."""


def statements(tree: ast.Module) -> list[ast.AST]:
    """Return the statements of a module, those inside others too, without the expressions, which are most of a tree."""
    found: list[ast.AST] = [tree]
    for node in found:
        inner = ast.iter_child_nodes(node)
        found += [each for each in inner if isinstance(each, ast.stmt | ast.ExceptHandler | ast.match_case)]
    return found


@dataclasses.dataclass(frozen=True, slots=True)
class Source:
    """A module: its path in the repository, its lines, and what they say."""

    path: str
    lines: tuple[str, ...]
    tree: ast.Module

    def classes(self) -> Iterator[ast.ClassDef]:
        """Yield all classes, nested ones too."""
        return (node for node in statements(self.tree) if isinstance(node, ast.ClassDef))

    def functions(self) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
        """Yield all functions and methods."""
        functions = ast.FunctionDef | ast.AsyncFunctionDef
        return (node for node in statements(self.tree) if isinstance(node, functions))


@functools.cache
def tracked() -> tuple[str, ...]:
    """Return the files that git knows, links left out."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return tuple(name for name in listed.split("\0") if name and not (ROOT / name).is_symlink())


def sources(folder: str = "trainermon") -> Iterator[Source]:
    """Yield the Python modules below a folder of the repository.

    None is kept: with all trees in memory, the collection of garbage takes three times as long as reading them again.
    """
    for name in tracked():
        if name.startswith(f"{folder}/") and name.endswith(".py") and (ROOT / name).exists():
            text = (ROOT / name).read_text(encoding="utf-8")
            yield Source(name, tuple(text.splitlines()), ast.parse(text))


def files_by_folder() -> dict[str, int]:
    """Return how many files each folder of the package has, those in its own folders left out."""
    return collections.Counter(str(Path(name).parent) for name in tracked() if name.startswith("trainermon/"))


@functools.cache
def class_names() -> tuple[tuple[str, str], ...]:
    """Return file and name of every class of the package."""
    return tuple((source.path, node.name) for source in sources() for node in source.classes())


def repeated_classes() -> dict[str, list[str]]:
    """Return, by name, the files of classes that are called the same; a leading underscore does not count."""
    files = collections.defaultdict(set)
    for path, name in class_names():
        files[name.lstrip("_")].add(path)
    return {name: sorted(paths) for name, paths in files.items() if len(paths) > 1}


def one_word_classes() -> tuple[int, int]:
    """Return how many classes have a name of one word, and how many there are."""
    names = [name for _, name in class_names()]
    return sum(len(re.findall(r"[A-Z][a-z0-9]*", name)) <= 1 for name in names), len(names)


def attributes_of(node: ast.ClassDef) -> set[str]:
    """Return the attributes that methods of a class assign on `self`."""
    return {
        part.attr
        for part in ast.walk(node)
        if isinstance(part, ast.Attribute)
        and isinstance(part.ctx, ast.Store)
        and isinstance(part.value, ast.Name)
        and part.value.id == "self"
    }


def crowded_classes() -> dict[str, int]:
    """Return the classes with more than `MAX_ATTRIBUTES` attributes."""
    found = {
        f"{source.path}:{node.name}": len(attributes_of(node)) for source in sources() for node in source.classes()
    }
    return {name: number for name, number in found.items() if number > MAX_ATTRIBUTES}


def long_constructors() -> dict[str, int]:
    """Return the `__init__` with more than `MAX_PARAMETERS` parameters beside `self`."""
    found = {}
    for source in sources():
        for node in source.classes():
            for method in node.body:
                if isinstance(method, ast.FunctionDef) and method.name == "__init__":
                    number = len([*method.args.posonlyargs, *method.args.args, *method.args.kwonlyargs]) - 1
                    found[f"{source.path}:{node.name}"] = number
    return {name: number for name, number in found.items() if number > MAX_PARAMETERS}


def chains() -> list[str]:
    """Return the places that reach three attributes deep through a part of `self`: `self.a.b.c.d`."""
    found = []
    for source in sources():
        inner = {
            id(node.value)
            for node in ast.walk(source.tree)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute)
        }
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Attribute) and id(node) not in inner and _depth(node) > 3:
                found.append(f"{source.path}:{node.lineno}: {ast.unparse(node)}")
    return found


def _depth(node: ast.expr) -> int:
    """Return how many attributes lead from `self` to here, 0 for what does not begin there."""
    depth = 0
    while isinstance(node, ast.Attribute):
        node, depth = node.value, depth + 1
    return depth if isinstance(node, ast.Name) and node.id == "self" else 0


def long_functions() -> list[str]:
    """Return the functions of more than `MAX_LINES` lines."""
    return [
        f"{source.path}:{node.name}"
        for source in sources()
        for node in source.functions()
        if (node.end_lineno or node.lineno) - node.lineno + 1 > MAX_LINES
    ]


def lines_with(pattern: str) -> list[str]:
    """Return the lines of the package that a regular expression finds."""
    return [
        f"{source.path}:{number}"
        for source in sources()
        for number, line in enumerate(source.lines, 1)
        if re.search(pattern, line)
    ]


def classes_with(method: str) -> list[str]:
    """Return the classes that have a method of this name."""
    return [
        f"{source.path}:{node.name}"
        for source in sources()
        for node in source.classes()
        if any(isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef) and part.name == method for part in node.body)
    ]


def code_lines(folder: str) -> int:
    """Return the lines of code below a folder: no blank lines, comments or docstrings."""
    return sum(_code_lines(source) for source in sources(folder))


def _code_lines(source: Source) -> int:
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    docstrings: set[int] = set()
    for node in ast.walk(source.tree):
        if isinstance(node, documented) and ast.get_docstring(node) is not None:
            docstrings.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return sum(
        bool(line.strip()) and not line.strip().startswith("#") and number not in docstrings
        for number, line in enumerate(source.lines, 1)
    )


def main() -> None:
    """Print the figures as a table, with what is wanted."""
    folder, most = max(files_by_folder().items(), key=lambda item: item[1])
    one_word, num_classes = one_word_classes()
    code, tests = code_lines("trainermon"), code_lines("tests")
    words = {word: len(classes_with(word)) for word in TEARDOWN}
    rows = [
        ("lines of code; of tests for each", f"{code}; {tests / code:.2f}", ""),
        ("most files in a folder", f"{most} ({folder})", "≤ 25"),
        ("class names in several files", str(len(repeated_classes())), "≤ 5"),
        ("class names of one word", f"{one_word / num_classes:.0%} of {num_classes}", "≤ 30 %"),
        (f"classes with more than {MAX_ATTRIBUTES} attributes", str(len(crowded_classes())), "≤ 5"),
        (f"constructors with more than {MAX_PARAMETERS} parameters", str(len(long_constructors())), "0"),
        ("chains of three attributes through a part", str(len(chains())), "0"),
        (f"functions of more than {MAX_LINES} lines", str(len(long_functions())), "0"),
        ("events read as dictionaries (`event.get(`)", str(len(lines_with(r"\bevent\.get\("))), "0"),
        ("rule names matched by pattern", str(len(lines_with(r"fnmatch\w*\([^)]*rule"))), "0"),
        ("classes with a method `take`", str(len(classes_with("take"))), "≤ 3"),
        ("teardown methods by other words", ", ".join(f"{w} {n}" for w, n in words.items() if n) or "0", "0"),
    ]
    width = max(len(name) for name, _, _ in rows)
    for name, value, wanted in rows:
        print(f"{name:<{width}}  {value}{f'  (wanted: {wanted})' if wanted else ''}")


if __name__ == "__main__":
    main()
