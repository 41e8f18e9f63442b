"""Which code the classes of a model are: a hash of each, in which comments and layout do not count."""

from __future__ import annotations

import ast
import hashlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from torch import nn

_KNOWN_BY_VERSION = frozenset(["torch", "builtins", "deepspeed", "accelerate", "lightning", "pytorch_lightning"])


def model_sources(models: Sequence[nn.Module]) -> dict[str, str]:
    """Return 64 bits of a hash of the source of each class of the models' modules, as `model.<module>.<class>`.

    Classes of torch and of what wraps models are left out, versions say which they are; so is what has no source file,
    or a file that was changed so that it no longer has the class. Cost: each file is parsed once.
    """
    by_module: dict[str, set[str]] = {}
    for each in {type(module) for model in models for module in model.modules()}:
        own = [base for base in each.__mro__ if base.__module__.partition(".")[0] not in _KNOWN_BY_VERSION]
        for base in own[:1]:  # below a class that a wrapper made for it
            by_module.setdefault(base.__module__, set()).add(base.__qualname__)
    return {
        f"model.{module}.{name}": digest
        for module, names in sorted(by_module.items())
        for name, digest in sorted(_digests(module, names))
    }


def _digests(module: str, names: Iterable[str]) -> Iterator[tuple[str, str]]:
    try:
        path = getattr(sys.modules[module], "__file__", None)
        tree = ast.parse(Path(path).read_bytes()) if path else ast.Module([], [])
    except (OSError, SyntaxError, ValueError, KeyError):
        return
    found = dict(_classes(tree, ""))
    for name in names:
        if name in found:
            yield name, hashlib.sha256(ast.dump(found[name]).encode()).hexdigest()[:16]


def _classes(node: ast.AST, above: str) -> Iterator[tuple[str, ast.ClassDef]]:
    """Yield the classes below `node` by qualified name, those within functions too."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            yield f"{above}{child.name}", child
            yield from _classes(child, f"{above}{child.name}.")
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _classes(child, f"{above}{child.name}.<locals>.")
        else:
            yield from _classes(child, above)
