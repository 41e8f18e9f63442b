"""Joins modules of the web pages into one script, for a page that is a single file.

Only what the modules use is understood: named imports from relative paths, and exports of declarations.
"""

from __future__ import annotations

import re
from pathlib import Path

_IMPORT = re.compile(r'^import \{([^}]*)\} from "(\.[^"]+)";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async )?function\*? |const |class )", re.MULTILINE)
_NAME = re.compile(r"^export (?:async )?(?:function\*?|const|class) (\w+)", re.MULTILINE)


def join_modules(entry: Path) -> str:
    """Return the module `entry` and all that it imports as one script. Each module is a function of its own.

    Raises:
        ValueError: A module imports or exports in a way that is not understood, or two import each other.
    """
    parts: list[str] = []
    _join(entry.resolve(), {}, [], parts)
    return "\n".join(parts)


def _join(path: Path, done: dict[Path, str], open_modules: list[Path], parts: list[str]) -> str:
    """Add the module `path` to `parts` behind what it imports; return the name of its variable."""
    if path in done:
        return done[path]
    if path in open_modules:
        raise ValueError(f"{path.name} imports itself, by way of {open_modules[-1].name}")
    text = path.read_text(encoding="utf-8")
    heads = []
    for names, source in _IMPORT.findall(text):
        variable = _join((path.parent / source).resolve(), done, [*open_modules, path], parts)
        heads.append(f"const {{ {names.strip().rstrip(',').replace(' as ', ': ')} }} = {variable};")
    body = _EXPORT.sub("", _IMPORT.sub("", text))
    if left := re.search(r"^(?:import|export)\b.*", body, re.MULTILINE):
        raise ValueError(f"{path.name} has {left[0]!r}: expected named imports, and exports of declarations only")
    done[path] = f"module{len(done)}"
    exports = ", ".join(_NAME.findall(text))
    parts.append(f"const {done[path]} = (() => {{\n{chr(10).join(heads)}\n{body}\nreturn {{ {exports} }};\n}})();")
    return done[path]
