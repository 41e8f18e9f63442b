"""Splits a shell script into words and operators, and words into the parts that are expanded each in its own way.

Source: POSIX.1-2017, Shell Command Language, 2.2 and 2.3; the manual of bash for what goes beyond it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from trainermon.core.errors import PackError

_OPERATORS = ("&>>", "<<-", "<<<", ";;&", "&&", "||", ";;", ";&", "<<", ">>", "<&", ">&", "<>", ">|", "&>", "|&",
              "&", "|", ";", "(", ")", "<", ">")  # fmt: skip
REDIRECTIONS = frozenset(["<", ">", ">>", ">|", "<&", ">&", "<>", "&>", "&>>", "<<<", "<<", "<<-"])
MAX_SCANNED = 1_000_000
_HEREDOCS = ("<<", "<<-")
_ARRAY = re.compile(r"[A-Za-z_]\w*\+?=$")
_NAME = re.compile(r"[A-Za-z_]\w*|[0-9@*#?$!-]")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v", "e": "\033", "0": "\0"}


class WordPart(NamedTuple):
    """A part of a word.

    Attributes:
        kind: `text`, `name` (of `$name`), `variable` (what stands in `${…}`), `arithmetic`, or `command` (what a shell
            would have to run).
        text: Its text; of a command as it was written, with what stands around it.
        quoted: Whether it stands in quotes, so that it is not split.
    """

    kind: str
    text: str
    quoted: bool


class ShellWord(NamedTuple):
    """A word: its parts, and its elements if it is the assignment of an array.

    Attributes:
        parts: What it is made of, in order.
        array: The elements of `NAME=(…)`; None for another word.
    """

    parts: tuple[WordPart, ...]
    array: tuple[ShellWord, ...] | None = None

    @property
    def plain(self) -> str | None:
        """The word's text if it is only that and nothing of it is quoted, as reserved words are; else None."""
        if len(self.parts) == 1 and self.parts[0].kind == "text" and not self.parts[0].quoted and self.array is None:
            return self.parts[0].text
        return None


class ShellToken(NamedTuple):
    """A word, or an operator; the end of a line is an operator, too.

    Attributes:
        operator: The operator; "" for a word.
        word: The word; None for an operator.
        line: The line in which it begins, from 1.
    """

    operator: str
    word: ShellWord | None
    line: int


class ShellSyntaxError(PackError):
    """Raised for a script that bash would not accept either."""


class _ScriptLexer:
    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.heredocs: list[tuple[str, bool]] = []
        self.num_scanned = 0

    def fail(self, trouble: str, begin: int) -> ShellSyntaxError:
        return ShellSyntaxError(f"line {self.text.count(chr(10), 0, begin) + 1}: {trouble}")

    def tokens(self, *, until: str = "") -> list[ShellToken]:
        """Return the tokens up to the end, or up to the operator `until`, which is taken."""
        found: list[ShellToken] = []
        line, counted = 1, 0
        while self._skip_blanks():
            line, counted = line + self.text.count("\n", counted, self.at), self.at
            token = self._token(line)
            if until and token.operator == until:
                return found
            found.append(token)
            if token.operator == "\n" and not until:
                self._skip_heredocs()
            before = found[-2].operator if len(found) > 1 else ""
            if before in _HEREDOCS and token.word is not None:
                delimiter = "".join(part.text for part in token.word.parts)
                self.heredocs.append((delimiter, before == "<<-"))
        if until:
            raise self.fail(f"no {until!r} to the end of the script", len(self.text))
        return found

    def _token(self, line: int) -> ShellToken:
        text = self.text
        if text[self.at] == "\n":
            self.at += 1
            return ShellToken("\n", None, line)
        if text.startswith("((", self.at):
            end = self._matching(self.at + 2, "))")
            if end is not None:
                inside, self.at = text[self.at + 2 : end], end + 2
                return ShellToken("((", ShellWord((WordPart("arithmetic", inside, quoted=True),)), line)
        number = re.compile(r"\d+(?=[<>])|\{\w+\}(?=[<>])").match(text, self.at)
        if number and not text.startswith(("<(", ">("), number.end()):
            self.at = number.end()
        for operator in _OPERATORS:
            if text.startswith(operator, self.at) and not text.startswith(("<(", ">("), self.at):
                self.at += len(operator)
                return ShellToken(operator, None, line)
        return ShellToken("", self.word(), line)

    def _skip_blanks(self) -> bool:
        """Go to the next token; return whether there is one."""
        while self.at < len(self.text):
            if self.text[self.at] in " \t":
                self.at += 1
            elif self.text.startswith("\\\n", self.at):
                self.at += 2
            elif self.text[self.at] == "#":
                end = self.text.find("\n", self.at)
                self.at = len(self.text) if end < 0 else end
            else:
                return True
        return False

    def _skip_heredocs(self) -> None:
        for delimiter, strips in self.heredocs:
            while self.at < len(self.text):
                end = self.text.find("\n", self.at)
                end = len(self.text) if end < 0 else end
                row, self.at = self.text[self.at : end], end + 1
                if (row.lstrip("\t") if strips else row) == delimiter:
                    break
        self.heredocs = []

    def word(self) -> ShellWord:
        """Return the word that begins here."""
        parts: list[WordPart] = []
        begin = self.at
        while self.at < len(self.text):
            letter = self.text[self.at]
            if letter == "(" and _ARRAY.search(self.text[begin : self.at]):
                self.at += 1
                elements = [token.word for token in self.tokens(until=")") if token.word is not None]
                return ShellWord(_joined(parts), tuple(elements))
            if letter in " \t\n;&|()" or (letter in "<>" and self.text[self.at + 1 : self.at + 2] != "("):
                break
            parts += self._part(letter)
        return ShellWord(_joined(parts))

    def _part(self, letter: str) -> list[WordPart]:
        readers: dict[str, Callable[[], list[WordPart]]] = {
            "'": self._single,
            '"': self._double,
            "\\": self._escaped,
            "$": lambda: [self._dollar(quoted=False)],
            "`": lambda: [self._backticks(quoted=False)],
            "<": lambda: [self._process()],
            ">": lambda: [self._process()],
        }
        if letter in readers:
            return readers[letter]()
        match = re.compile(r"[^ \t\n;&|()<>'\"\\$`]+").match(self.text, self.at)
        text = match[0] if match else letter
        self.at += len(text)
        return [WordPart("text", text, quoted=False)]

    def _escaped(self) -> list[WordPart]:
        letter = self.text[self.at + 1 : self.at + 2]
        self.at += 2
        return [] if letter == "\n" else [WordPart("text", letter or "\\", quoted=True)]

    def _single(self) -> list[WordPart]:
        end = self.text.find("'", self.at + 1)
        if end < 0:
            raise self.fail("a ' without its end", self.at)
        inside, self.at = self.text[self.at + 1 : end], end + 1
        return [WordPart("text", inside, quoted=True)]

    def _double(self) -> list[WordPart]:
        begin = self.at
        self.at += 1
        parts: list[WordPart] = []
        while self.text[self.at : self.at + 1] != '"':
            if self.at >= len(self.text):
                raise self.fail('a " without its end', begin)
            parts += self.quoted_part()
        self.at += 1
        return parts or [WordPart("text", "", quoted=True)]  # "" is a word, too

    def quoted_part(self) -> list[WordPart]:
        """Return the parts that begin here, inside double quotes."""
        letter = self.text[self.at]
        if letter == "$":
            return [self._dollar(quoted=True)]
        if letter == "`":
            return [self._backticks(quoted=True)]
        if letter == "\\" and self.text[self.at + 1 : self.at + 2] in ("$", "`", '"', "\\", "\n"):
            return self._escaped()
        match = re.compile(r'[^"\\$`]+').match(self.text, self.at)
        text = match[0] if match else letter
        self.at += len(text)
        return [WordPart("text", text, quoted=True)]

    def _dollar(self, *, quoted: bool) -> WordPart:
        begin = self.at
        following = self.text[begin + 1 : begin + 3]
        if following == "((":
            end = self._matching(begin + 3, "))")
            if end is not None:
                self.at = end + 2
                return WordPart("arithmetic", self.text[begin + 3 : end], quoted)
        if following[:1] == "(":
            self.at = self._closed(begin + 2, ")") + 1
            return WordPart("command", self.text[begin : self.at], quoted)
        if following[:1] == "{":
            end = self._closed(begin + 2, "}")
            self.at = end + 1
            return WordPart("variable", self.text[begin + 2 : end], quoted)
        if following[:1] in ("'", '"') and following and not quoted:
            return self._dollar_quotes(following[0])
        match = _NAME.match(self.text, begin + 1)
        self.at = match.end() if match else begin + 1
        return WordPart("name", match[0], quoted) if match else WordPart("text", "$", quoted)

    def _dollar_quotes(self, quote: str) -> WordPart:
        if quote == '"':
            self.at += 1
            return WordPart("text", "", quoted=True)
        match = re.compile(r"\$'((?:[^'\\]|\\.)*)'", re.DOTALL).match(self.text, self.at)
        if match is None:
            raise self.fail("a $' without its end", self.at)
        self.at = match.end()
        text = re.sub(r"\\(.)", lambda found: _ESCAPES.get(found[1], found[1]), match[1], flags=re.DOTALL)
        return WordPart("text", text, quoted=True)

    def _backticks(self, *, quoted: bool) -> WordPart:
        match = re.compile(r"`(?:[^`\\]|\\.)*`", re.DOTALL).match(self.text, self.at)
        if match is None:
            raise self.fail("a ` without its end", self.at)
        self.at = match.end()
        return WordPart("command", match[0], quoted)

    def _process(self) -> WordPart:
        begin = self.at
        self.at = self._closed(begin + 2, ")") + 1
        return WordPart("command", self.text[begin : self.at], quoted=True)

    def _count(self, begin: int) -> None:
        """Count a letter that was looked at to find the end of a bracket: brackets in brackets are read many times."""
        self.num_scanned += 1
        if self.num_scanned > MAX_SCANNED:
            raise self.fail("too many brackets in brackets", begin)

    def _matching(self, begin: int, closing: str) -> int | None:
        """Return where the arithmetic that begins at `begin` ends; None if it is none."""
        depth = 0
        for at in range(begin, len(self.text)):
            self._count(begin)
            if self.text[at] == "(":
                depth += 1
            elif self.text[at] == ")":
                if depth == 0:
                    return at if self.text.startswith(closing, at) else None
                depth -= 1
        return None

    def _closed(self, begin: int, closing: str) -> int:
        """Return where `closing` stands that belongs to what begins at `begin`; quotes and nesting count."""
        opening = {")": "(", "}": "{"}[closing]
        depth, at = 0, begin
        while at < len(self.text):
            self._count(begin)
            letter = self.text[at]
            if letter == "\\":
                at += 1
            elif letter in "'\"":
                at = self._end_of_quotes(at)
            elif letter == opening:
                depth += 1
            elif letter == closing:
                if depth == 0:
                    return at
                depth -= 1
            at += 1
        raise self.fail(f"no {closing!r} to the end of the script", begin)

    def _end_of_quotes(self, begin: int) -> int:
        quote, at = self.text[begin], begin + 1
        while at < len(self.text) and self.text[at] != quote:
            at += 2 if self.text[at] == "\\" and quote == '"' else 1
        return at


def tokens_of(text: str) -> list[ShellToken]:
    """Return the words and operators of a script; comments and the bodies of here-documents are left out.

    Raises:
        ShellSyntaxError: A quote or a bracket has no end.
    """
    return _ScriptLexer(text).tokens()


def parts_of(text: str, *, quoted: bool) -> tuple[WordPart, ...]:
    """Return the parts of a text that is expanded as one word: what stands behind `:-`, or an arithmetic expression.

    With `quoted` as it would be inside double quotes.

    Raises:
        ShellSyntaxError: A quote or a bracket has no end.
    """
    lexer = _ScriptLexer(text)
    parts: list[WordPart] = []
    while lexer.at < len(lexer.text):
        letter = lexer.text[lexer.at]
        if quoted and letter != '"':
            parts += lexer.quoted_part()
        elif not quoted and letter in " \t\n;&|()<>":
            parts.append(WordPart("text", letter, quoted=False))
            lexer.at += 1
        else:
            parts += lexer._part(letter)
    return _joined(parts)


def _joined(parts: list[WordPart]) -> tuple[WordPart, ...]:
    found: list[WordPart] = []
    for part in parts:
        if found and part.kind == found[-1].kind == "text" and part.quoted == found[-1].quoted:
            found[-1] = part._replace(text=found[-1].text + part.text)
        else:
            found.append(part)
    return tuple(found)
