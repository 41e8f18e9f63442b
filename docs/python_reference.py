"""The page of the Python API, from the signatures and docstrings of what `import trainermon` hands out."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import trainermon

HEAD = """\
# Python API

<!-- Generated from the docstrings by `make sync`. Do not edit. -->

What `import trainermon` hands out; each is imported on first use, and importing trainermon loads no torch. Everything
else is internal, and may change with any version. The configuration's keys are in [configuration](configuration.md),
what exporters of your own are given in [exporters](../exporters.md#your-own).
"""


def render_python_reference() -> str:
    """Return the page as Markdown."""
    names = [name for name in trainermon.__all__ if not name.startswith("_")]
    return "".join([HEAD, *(part for name in names for part in _entry(name, getattr(trainermon, name)))])


def _entry(name: str, value: Any) -> Iterator[str]:
    yield f"\n## {name}\n\n"
    yield f"```python\n{name}{_signature(value)}\n```\n\n"
    yield _markdown(inspect.getdoc(value) or "")
    if inspect.isclass(value):
        for method, function in _methods(value):
            yield f"\n### {name}.{method}\n\n"
            if not isinstance(function, property):
                yield f"```python\n{method}{_signature(function)}\n```\n\n"
            yield _markdown(inspect.getdoc(function) or "")


def _methods(cls: type[Any]) -> Iterator[tuple[str, Any]]:
    """Yield the public methods and properties that have a docstring of their own, in the order of the source."""
    seen: set[str] = set()
    for each in cls.__mro__[:-1]:
        if not each.__module__.startswith("trainermon"):
            continue
        for name, value in vars(each).items():
            function = value.__func__ if isinstance(value, classmethod | staticmethod) else value
            is_shown = inspect.isfunction(function) or isinstance(function, property)
            if is_shown and not name.startswith("_") and name not in seen and inspect.getdoc(function):
                seen.add(name)
                yield name, function


def _signature(value: Any) -> str:
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return "(…)"
    parameters = [each for each in signature.parameters.values() if each.name not in ("self", "cls")]
    shown = re.sub(r"""(: |-> )(?:'([^']*)'|"([^"]*)")""", r"\1\2\3", str(signature.replace(parameters=parameters)))
    return re.sub(r"<[^>]*>", "…", re.sub(r"\b(?:trainermon|pathlib|collections|torch)(?:\.\w+)*\.(?=\w)", "", shown))


def _markdown(text: str) -> str:
    """Return a docstring as Markdown: sections become bold words, their entries a list, examples code."""
    text = re.sub(r"(^>>> .*(?:\n(?!\n).*)*)", r"```python\n\1\n```", text, flags=re.MULTILINE)
    head, *sections = re.split(r"\n(?=(?:Args|Attributes|Returns|Yields|Raises):)", text)
    parts = [head.strip() + "\n"]
    for section in sections:
        title, _, body = section.partition(":")
        lines = [inspect.cleandoc(body)] if title in ("Returns", "Yields") else _items(body)
        parts.append(f"\n**{title}**\n\n" + "\n".join(lines) + "\n")
    return "".join(parts)


def _items(body: str) -> list[str]:
    """Return the entries of a section as a list; what comes after them, indented less, as text."""
    listed, _, rest = body.strip("\n").partition("\n\n")
    entries = re.split(r"\n(?=\S)", inspect.cleandoc("\n" + listed))
    found = [re.sub(r"^([\w*, .]+): ", r"* `\1`: ", " ".join(entry.split())) for entry in entries]
    return [*found, *(["", inspect.cleandoc(rest)] if rest.strip() else [])]
