"""Expands words as bash does: variables, arrays, arithmetic, braces, splitting. What only a shell can know is marked.

Source: POSIX.1-2017, Shell Command Language, 2.6; the manual of bash, 3.5.
"""

from __future__ import annotations

import ast
import fnmatch
import itertools
import operator
import re
from collections.abc import Callable, Iterator, Sequence

from trainermon.analysis.environment.shell.words import ShellSyntaxError, ShellWord, WordPart, parts_of

UNKNOWN_FROM, UNKNOWN_TO = "\ue000", "\ue001"
"""Stand around text that is not known; letters of the private use area, which no script has."""
MAX_FIELDS, MAX_LETTERS = 5_000, 1 << 20
_PARAMETER = re.compile(r"([!#]?)([A-Za-z_]\w*|\d+|[@*#?$!-])(?:\[([^\]]*)\])?(.*)", re.DOTALL)
_OPERATION = re.compile(r"(:?[-=+?]|##?|%%?|//?|\^\^?|,,?|:)(.*)", re.DOTALL)
_BRACE_SPLIT = re.compile(r"\{([^{}]*,[^{}]*)\}|\{(-?\d+)\.\.(-?\d+)(?:\.\.(-?\d+))?\}|\{([A-Za-z])\.\.([A-Za-z])\}")

_BLANKS = (" ", "\t", "\n")

ShellValue = str | list[str]


def unknown(text: str) -> str:
    """Return the mark of what is not known, around the text that it was written as."""
    return f"{UNKNOWN_FROM}{text.replace(UNKNOWN_FROM, '').replace(UNKNOWN_TO, '')}{UNKNOWN_TO}"


def is_unknown(text: str) -> bool:
    """Return whether a part of a text is not known."""
    return UNKNOWN_FROM in text


def without_marks(text: str) -> str:
    """Return a text with what is not known as it was written."""
    return text.replace(UNKNOWN_FROM, "").replace(UNKNOWN_TO, "")


class WordExpander:
    """Expands words from the variables of a shell.

    Args:
        variables: Values by name; `:=` adds to them. Arrays are lists.
        arguments: The positional parameters, from `$1`.
        script: What `$0` is.
    """

    def __init__(self, variables: dict[str, ShellValue], arguments: Sequence[str] = (), script: str = "bash") -> None:
        self.variables = variables
        self.arguments = list(arguments)
        self.script = script

    def fields(self, word: ShellWord) -> list[str]:
        """Return the fields that a word of a command becomes: none, one or several."""
        found: list[str] = []
        for parts in _braces(word.parts):
            found += self._fields(parts)
            if len(found) > MAX_FIELDS:
                raise ShellSyntaxError(f"a word becomes more than {MAX_FIELDS:,} words")
        return found

    def text(self, word: ShellWord) -> str:
        """Return what a word becomes where it is not split: in an assignment, a test, a pattern."""
        return self._joined(_tilde(word.parts, self.variables))

    def pattern(self, word: ShellWord) -> str:
        """Return what a word becomes as a pattern: what is quoted in it stands for itself."""
        found = ""
        for part in word.parts:
            text = self._joined((part,))
            found += re.sub(r"([*?\[])", r"[\1]", text) if part.quoted else text
        return found

    def elements(self, words: Sequence[ShellWord]) -> list[str]:
        """Return the elements of an array."""
        return list(itertools.chain.from_iterable(map(self.fields, words)))

    def _joined(self, parts: Sequence[WordPart]) -> str:
        text = "".join(part.text if part.kind == "text" else " ".join(self._values(part)) for part in parts)
        if len(text) > MAX_LETTERS:
            raise ShellSyntaxError(f"a word becomes longer than {MAX_LETTERS:,} letters")
        return text

    def _fields(self, parts: Sequence[WordPart]) -> list[str]:
        fields = _FieldList()
        for part in self._with_defaults(_tilde(parts, self.variables)):
            if part.kind == "text":
                fields.add(part.text)
            elif part.quoted:
                values = self._values(part)
                fields.add_all(values if _is_list(part) else [" ".join(values)])
            else:
                fields.add_split([part.text] if part.kind == "split" else self._values(part))
        return fields.finished()

    def _with_defaults(self, parts: Sequence[WordPart]) -> Iterator[WordPart]:
        """Yield parts with `${NAME:-a "b c"}` as what it stands for, since quotes in it count."""
        for part in parts:
            match = _PARAMETER.fullmatch(part.text) if part.kind == "variable" and not part.quoted else None
            operation = _OPERATION.fullmatch(match[4]) if match and not match[1] else None
            if match is None or operation is None or operation[1][-1] not in "-+":
                yield part
                continue
            values = self._lookup(match[2], match[3])
            is_set = values is not None and (operation[1][0] != ":" or any(values))
            if is_set is (operation[1][-1] == "+"):
                inner = parts_of(operation[2], quoted=False)
                split = (p._replace(kind="split") if p.kind == "text" and not p.quoted else p for p in inner)
                yield from self._with_defaults(tuple(split))
            elif is_set:
                yield part

    def _values(self, part: WordPart) -> list[str]:
        """Return what a part becomes: one text, or the elements of an array."""
        if part.kind == "command":
            return [unknown(part.text)]
        if part.kind == "arithmetic":
            return [self.arithmetic(part.text)]
        return self._parameter(part)

    def arithmetic(self, text: str) -> str:
        """Return the value of an arithmetic expression of whole numbers, as text; the mark if it is not known."""
        shown = self._joined(parts_of(text, quoted=True))
        try:
            return str(_evaluate(shown, self.variables))
        except (ValueError, SyntaxError, TypeError, ArithmeticError, KeyError, RecursionError):
            return unknown(f"$(({text}))")

    def _parameter(self, part: WordPart) -> list[str]:
        match = _PARAMETER.fullmatch(part.text)
        if match is None:
            return [unknown(f"${{{part.text}}}")]
        prefix, name, index, rest = match.groups()
        if prefix == "#" and not rest:
            values = self._lookup(name, index)
            return [str(len(values or []) if index in ("@", "*") or name in "@*" else len("".join(values or [])))]
        if prefix == "!" and not rest and index is None:
            target = "".join(self._lookup(name, None) or [])
            return self._lookup(target, None) or [""]
        if prefix:
            return [unknown(f"${{{part.text}}}")]
        values = self._lookup(name, index)
        return self._operated(name, values, rest, part) if rest else _or_empty(values, part)

    def _lookup(self, name: str, index: str | None) -> list[str] | None:
        """Return the value, or the elements, of a parameter; None if it is not set."""
        if not name.isidentifier():
            return self._special(name)
        value = self.variables.get(name)
        if value is None:
            return None
        elements = value if isinstance(value, list) else [value]
        if index in ("@", "*"):
            return list(elements)
        number = self._index(index)
        if number is None:
            return [unknown(f"${{{name}[{index}]}}")]
        return elements[number : number + 1 or None] or None

    def _special(self, name: str) -> list[str] | None:
        if name in "@*":
            return list(self.arguments)
        if name == "0":
            return [self.script]
        if name.isdigit():
            return self.arguments[int(name) - 1 : int(name)] or None
        return [str(len(self.arguments))] if name == "#" else [unknown(f"${name}")]

    def _index(self, index: str | None) -> int | None:
        text = self.arithmetic(index) if index else "0"
        return None if is_unknown(text) else int(text)

    def _operated(self, name: str, values: list[str] | None, rest: str, part: WordPart) -> list[str]:
        match = _OPERATION.fullmatch(rest)
        if match is None:
            return [unknown(f"${{{part.text}}}")]
        sign, argument = match.groups()
        if sign[-1] in "-=+?":
            return self._default(name, values, sign, argument, quoted=part.quoted)
        if sign == ":":
            return self._sliced(values, argument, part)
        pattern = self._joined(parts_of(argument, quoted=False))
        return _or_empty([_edited(value, sign, pattern, argument) for value in values or []], part)

    def _default(self, name: str, values: list[str] | None, sign: str, argument: str, *, quoted: bool) -> list[str]:
        is_set = values is not None and (sign[0] != ":" or any(values))
        if sign[-1] == "+":
            return [self._joined(parts_of(argument, quoted=quoted))] if is_set else [""]
        if is_set:
            return values or []
        if sign[-1] == "?":
            return [unknown(f"${{{name}{sign}{argument}}}")]
        text = self._joined(parts_of(argument, quoted=quoted))
        if sign[-1] == "=":
            self.variables[name] = text
        return [text]

    def _sliced(self, values: list[str] | None, argument: str, part: WordPart) -> list[str]:
        numbers = [self.arithmetic(number or "0") for number in argument.split(":")]
        if any(map(is_unknown, numbers)) or len(numbers) > 2:
            return [unknown(f"${{{part.text}}}")]
        begin = int(numbers[0])
        begin = max(0, begin - 1) if _is_list(part) and part.text[0] in "@*" else begin
        length = int(numbers[1]) if len(numbers) > 1 else None
        if _is_list(part):
            elements = values or []
            return elements[begin:] if length is None else elements[begin:][: max(0, length)]
        text = "".join(values or [])
        rest = text[begin:] if begin >= -len(text) else ""
        return [rest if length is None else rest[:length]]


class _FieldList:
    """Puts fields together from pieces: what is not split continues the field before it."""

    def __init__(self) -> None:
        self._fields: list[str] = []
        self._current: str | None = None

    def add(self, text: str) -> None:
        self._current = (self._current or "") + text

    def add_all(self, values: Sequence[str]) -> None:
        for number, value in enumerate(values):
            if number:
                self._end()
            self.add(value)

    def add_split(self, values: Sequence[str]) -> None:
        for number, value in enumerate(values):
            if number or value[:1] in _BLANKS:
                self._end()
            self.add_all(_split(value))
            if value[-1:] in _BLANKS:
                self._end()

    def _end(self) -> None:
        if self._current is not None:
            self._fields.append(self._current)
            self._current = None

    def finished(self) -> list[str]:
        self._end()
        return self._fields


def _or_empty(values: list[str] | None, part: WordPart) -> list[str]:
    if values or _is_list(part):
        return values or []
    return [""]


def _is_list(part: WordPart) -> bool:
    """Return whether a part stands for several fields even in quotes: `"$@"`, `"${A[@]}"`."""
    return part.kind in ("name", "variable") and (
        part.text.startswith("@") or bool(re.match(r"[A-Za-z_]\w*\[@\]", part.text))
    )


def _split(value: str) -> list[str]:
    """Return a value split at blanks, those in what is not known left alone."""
    marked = re.compile(rf"(?:{UNKNOWN_FROM}[^{UNKNOWN_TO}]*{UNKNOWN_TO}|[^ \t\n])+")
    return marked.findall(value)


def _tilde(parts: Sequence[WordPart], variables: dict[str, ShellValue]) -> Sequence[WordPart]:
    first = parts[0] if parts else None
    home = variables.get("HOME")
    if first is None or first.kind != "text" or first.quoted or not re.match(r"~(/|$)", first.text):
        return parts
    if (len(parts) > 1 and first.text == "~") or not isinstance(home, str):
        return parts
    return (first._replace(text=home + first.text[1:]), *parts[1:])


def _braces(parts: tuple[WordPart, ...]) -> Iterator[tuple[WordPart, ...]]:
    """Yield the words that a word with braces becomes, each as parts; the word itself if there are none."""
    for number, part in enumerate(parts):
        match = _BRACE_SPLIT.search(part.text) if part.kind == "text" and not part.quoted else None
        if match is not None:
            for choice in itertools.islice(_choices(match), MAX_FIELDS):
                text = part.text[: match.start()] + choice + part.text[match.end() :]
                yield from _braces((*parts[:number], part._replace(text=text), *parts[number + 1 :]))
            return
    yield tuple(_with_longer_names([part for part in parts if part.text or part.quoted or part.kind != "text"]))


def _with_longer_names(parts: Sequence[WordPart]) -> Iterator[WordPart]:
    """Yield parts, with names that letters out of braces have made longer: `$x{a,b}` is `$xa $xb`."""
    name: WordPart | None = None
    for part in parts:
        if name is not None and part.kind == "text" and not part.quoted:
            more = re.match(r"\w*", part.text)
            taken = more[0] if more and name.text.isidentifier() else ""
            yield name._replace(text=name.text + taken)
            name = None
            if part.text[len(taken) :]:
                yield part._replace(text=part.text[len(taken) :])
            continue
        if name is not None:
            yield name
        name = part if part.kind == "name" and not part.quoted else None
        if name is None:
            yield part
    if name is not None:
        yield name


def _choices(match: re.Match[str]) -> Iterator[str]:
    listed, first, last, step, letter, end = match.groups()
    if listed is not None:
        yield from listed.split(",")
        return
    if letter is not None:
        begin, stop = ord(letter), ord(end)
        yield from (chr(code) for code in _span(begin, stop, 1))
        return
    yield from (str(number) for number in _span(int(first), int(last), int(step or 1)))


def _span(first: int, last: int, step: int) -> range:
    step = abs(step) or 1
    return range(first, last + 1, step) if last >= first else range(first, last - 1, -step)


def _edited(value: str, sign: str, pattern: str, argument: str) -> str:
    if is_unknown(value) or is_unknown(pattern):
        return unknown(f"${{…{sign}{argument}}}")
    if sign in ("^", "^^", ",", ",,"):
        change = str.upper if sign[0] == "^" else str.lower
        return change(value) if len(sign) == 2 else change(value[:1]) + value[1:]
    if sign[0] == "/":
        found, _, instead = pattern.partition("/")
        return (
            re.sub(_regular(found), lambda _match: instead, value, count=0 if sign == "//" else 1) if found else value
        )
    lengths = range(len(value) + 1)
    wanted = reversed(lengths) if len(sign) == 2 else lengths
    for length in wanted:
        cut = value[:length] if sign[0] == "#" else value[len(value) - length :]
        if fnmatch.fnmatchcase(cut, pattern):
            return value[length:] if sign[0] == "#" else value[: len(value) - length]
    return value


def _regular(pattern: str) -> str:
    text = fnmatch.translate(pattern)
    return text.removeprefix("(?s:").removesuffix(r")\Z").removesuffix(r")\z")


_OPERATIONS: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda one, other: int(abs(one) // abs(other)) * (1 if (one < 0) == (other < 0) else -1),
    ast.Mod: lambda one, other: abs(one) % abs(other) * (1 if one >= 0 else -1),
    ast.LShift: lambda one, other: one << min(other, 64),
    ast.RShift: operator.rshift,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
    ast.Pow: lambda one, other: one ** min(other, 64),
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}


def _evaluate(text: str, variables: dict[str, ShellValue]) -> int:
    """Return the value of an expression of whole numbers and names.

    Raises:
        ValueError, SyntaxError, TypeError, ArithmeticError, KeyError, RecursionError: It is something else.
    """
    if not text.strip():
        return 0
    text = re.sub(r"\b0+(?=\d)", "", text) if not re.search(r"\b0[0-7]*[1-7]", text) else text
    return _value(ast.parse(" ".join(text.split()), mode="eval").body, variables, depth=0)


def _value(node: ast.AST, variables: dict[str, ShellValue], depth: int) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.Name):
        held = variables.get(node.id, "0")
        if depth > 10 or not isinstance(held, str):
            raise ValueError(node.id)
        return _value(ast.parse(held.strip() or "0", mode="eval").body, variables, depth + 1)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _value(node.operand, variables, depth)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp):
        return _OPERATIONS[type(node.op)](_value(node.left, variables, depth), _value(node.right, variables, depth))
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        sides = (_value(node.left, variables, depth), _value(node.comparators[0], variables, depth))
        return int(_OPERATIONS[type(node.ops[0])](*sides))
    raise ValueError(type(node).__name__)
