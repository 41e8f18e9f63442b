"""Takes secrets out of Python code: literals that go by a secret name, and whatever looks like a secret."""

from __future__ import annotations

import functools
import re
from typing import NamedTuple

from trainermon.core.environment.secrets import REDACTED, Redactor, is_secret_name, is_small

_TOKEN = re.compile(
    r"(?P<comment>#[^\n]*)"
    r"|(?P<prefix>[rbufRBUF]{0,2})(?P<quote>\"\"\"|'''|\"|')"
    r"|(?P<name>[A-Za-z_]\w*)|(?P<number>\d[\w.]*)|(?P<mark>[()\[\]{},\n])"
)
_ENDS = {
    quote: re.compile(rf"(?P<content>(?:\\.|{inside})*?)(?P<end>{quote}|(?=\\?\Z){short})", re.DOTALL)
    for quote, inside, short in (('"""', r"[^\\]", ""), ("'''", r"[^\\]", ""), ('"', r'[^"\\\n]', r"|(?=\n)"),
                                 ("'", r"[^'\\\n]", r"|(?=\n)"))
}  # fmt: skip
_TAKES = re.compile(r"\s*(?:\[[^\]\n]*\]\s*)?(?:[:!+|]?=|:)")  # an assignment, a default, a comparison
_SETS = re.compile(r"(?i)^(set|use|with|add)(?=_|[A-Z])")
_KEY = re.compile(r"-{0,2}[A-Za-z_][\w.-]*")
_CONSTANT = re.compile(r"[A-Z][A-Z0-9_]*")
_SUBSCRIPT = re.compile(r"[\w)\]]\[\s*\Z")
_OF_METHOD = re.compile(
    r"\.(?:replace|r?split|[lr]?strip|remove(?:prefix|suffix)|startswith|endswith|join|format|encode|decode)"
    r"\([^()]*\Z"
)
_ASKED = re.compile(
    r"(?i)(?:\bgetpass|\binput|\b(?:ask|prompt)\w*|\b(?:get|read|load|fetch)\w*(?:pass|secret|token|cred|key)\w*)"
    r"\([^()=]*\Z"
)  # the question, or the place, of a secret that is not in the code
_OF_TEXT = re.compile(r"\b(?:encoding|errors|newline|mode)\s*=\s*\Z")  # how a file is read, which holds the secret
_OPTION = re.compile(r"add_(?:argument|option)\(\s*(?:\"-\w\"|'-\w')?,?\s*\Z")
_INSTEAD = re.compile(r"\s+(?:or|else)\b")  # of a secret that is not given
_TARGETS = re.compile(r"(?:\A|[\n;])\s*(?:[\w.]+\s*,\s*)+\Z")
_UNPACKED = re.compile(r"\s*(?:,\s*[\w.]+\s*)*,?\s*=(?!=)")
_COMPARED = re.compile(r"\s*[!=]=\s*(?:\w+\.)*(\w+)")
_EQUALS = re.compile(r"\s*[!=]=")
_FIELD = re.compile(r"\{[^{}]*\}")
_NO_WORD = re.compile(r"(?=\S*\d)(?=\S*[A-Za-z])\S{8,}")
_BEFORE = 80


class _Reach(NamedTuple):
    """How far a secret name reaches: literals from here on are its value.

    Attributes:
        depth: How many brackets are open around it; it ends with them.
        commas: How many commas at that depth it still goes beyond.
        is_strong: Whether small values, and numbers, are secrets too.
    """

    depth: int
    commas: int
    is_strong: bool


@functools.lru_cache(maxsize=4096)
def masked_code(text: str) -> str:
    """Return Python code, whole or a line of it, without secrets; it keeps its number of lines.

    A literal is a secret if it is assigned to, given as, or compared with a secret name (`token="…"`), stands behind
    such a name that is a text itself (`"--token", "…"`), or looks like one. Cost: one pass over the text.

    >>> masked_code('login(token="abc", mode="max")')
    'login(token="<redacted>", mode="max")'
    """
    return _Masking(text).masked()


class _Masking:
    def __init__(self, text: str) -> None:
        self._text = text
        self._depth = 0
        self._reach: _Reach | None = None

    def masked(self) -> str:
        found: list[str] = []
        at = 0
        while match := _TOKEN.search(self._text, at):
            found.append(self._text[at : match.start()])
            at = match.end()
            if match["quote"]:
                whole = _ENDS[match["quote"]].match(self._text, at)
                assert whole is not None  # it ends with the text at the latest
                content = self._string(whole["content"], match, whole.end())
                found.append(f"{match[0]}{content}{whole['end']}")
                at = whole.end()
            else:
                found.append(self._other(match))
        return "".join([*found, self._text[at:]])

    def _other(self, match: re.Match[str]) -> str:
        word = match[0]
        if match["comment"]:
            return Redactor().text(word)
        if match["name"]:
            self._name(word, match.start(), match.end())
        elif match["mark"]:
            self._mark(word, match.start())
        elif len(word) > 3 and self._reach is not None and self._reach == (self._depth, self._reach.commas, True):
            return REDACTED
        return word

    def _name(self, name: str, start: int, end: int) -> None:
        if not is_secret_name(name):
            return
        is_strong = is_secret_name(name, "1")
        is_call = self._text[end : end + 1] == "(" and not self._before(start).endswith("def ")
        if is_call and (is_strong or _SETS.match(name)):
            self._reach = _Reach(self._depth + 1, 99, is_strong)
        elif _TAKES.match(self._text, end) and not (_EQUALS.match(self._text, end) and name in ("key", "keys")):
            is_unpacked = not self._depth and _TARGETS.search(self._before(start))
            self._reach = _Reach(self._depth, 99 if is_unpacked else 0, is_strong)
        elif is_strong and _INSTEAD.match(self._text, end):
            self._reach = _Reach(self._depth, 0, is_strong)
        elif is_strong and not self._depth and _UNPACKED.match(self._text, end):
            self._reach = _Reach(self._depth, 99, is_strong)

    def _mark(self, mark: str, start: int) -> None:
        self._depth = max(0, self._depth + (mark in "([{") - (mark in ")]}"))
        reach = self._reach
        if reach is None:
            return
        is_over = self._depth < reach.depth
        if mark == "\n":
            is_over = not self._depth and not self._before(start).endswith("\\")
        elif mark == "," and self._depth == reach.depth:
            is_over = not reach.commas
            reach = reach._replace(commas=reach.commas - 1)
        self._reach = None if is_over else reach

    def _string(self, content: str, begin: re.Match[str], end: int) -> str:
        before = self._before(begin.start())
        is_taken = self._reach is not None and self._is_value(content, before, self._reach)
        if self._reach is not None and not self._reach.is_strong and _is_computed(begin["prefix"], content):
            is_taken = False
        other = _COMPARED.match(self._text, end)
        is_taken = is_taken or bool(content and other and is_secret_name(other[1], "1"))
        clean = REDACTED if is_taken else Redactor().text(content)
        if not is_taken and _KEY.fullmatch(content) and is_secret_name(content.lstrip("-")):
            self._key(content.lstrip("-"), before, end)
        return clean + "\n" * (content.count("\n") - clean.count("\n"))

    def _is_value(self, content: str, before: str, reach: _Reach) -> bool:
        if not content or (is_small(content) and not reach.is_strong):
            return False
        if any(pattern.search(before) for pattern in (_SUBSCRIPT, _OF_METHOD, _OF_TEXT, _ASKED)):
            return False
        is_argument = before.rstrip().endswith(("(", ",")) and self._depth > reach.depth
        names = _CONSTANT if reach.is_strong else _KEY  # of what is looked up: `token = found.get("token")`
        return not (is_argument and names.fullmatch(content) and is_secret_name(content))

    def _key(self, name: str, before: str, end: int) -> None:
        following = self._text[end : end + _BEFORE].lstrip()[:1]
        depth = self._depth - (following in ("]", ")"))
        commas = 99 if _OPTION.search(before) else int(following == ",")
        self._reach = _Reach(depth, commas, is_secret_name(name, "1"))

    def _before(self, start: int) -> str:
        return self._text[max(0, start - _BEFORE) : start]


def _is_computed(prefix: str, content: str) -> bool:
    """Return whether a text is put together of values and plain words, as keys of dicts are: `f"{name}_weight"`."""
    words = _FIELD.sub(" ", content)
    return "f" in prefix.lower() and words != content and not any(map(_NO_WORD.fullmatch, words.split()))
