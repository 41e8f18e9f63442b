"""What the words of a script make together: commands, conditions, loops, functions."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

from trainermon.analysis.environment.shell.words import (
    REDIRECTIONS,
    ShellSyntaxError,
    ShellToken,
    ShellWord,
    WordPart,
    tokens_of,
)

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(?:\[([^\]]*)\])?(\+?)=")
_MAX_DEPTH = 100
_NEVER_FIRST = ("then", "elif", "else", "fi", "do", "done", "esac", "in", "}")
_ARGUMENTS = ShellWord((WordPart("name", "@", quoted=True),))


@dataclasses.dataclass(frozen=True, slots=True)
class ShellAssignment:
    """`NAME=value`, `NAME+=value`, `NAME=(…)`, `NAME[index]=value`."""

    name: str
    value: ShellWord
    appends: bool = False
    index: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class SimpleCommand:
    """Assignments and words; redirections are left out."""

    assignments: tuple[ShellAssignment, ...]
    words: tuple[ShellWord, ...]
    line: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Conditional:
    """`if`, `elif`, `else`: pairs of what is asked and what follows; the last one may ask nothing."""

    branches: tuple[tuple[ShellBody, ShellBody], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class ForLoop:
    """`for NAME in words`; `words` None where it is not known over what it goes."""

    name: str
    words: tuple[ShellWord, ...] | None
    body: ShellBody


@dataclasses.dataclass(frozen=True, slots=True)
class WhileLoop:
    """`while` or `until`."""

    condition: ShellBody
    body: ShellBody
    is_until: bool


@dataclasses.dataclass(frozen=True, slots=True)
class CaseChoice:
    """`case word in patterns) … ;; esac`."""

    word: ShellWord
    branches: tuple[tuple[tuple[ShellWord, ...], ShellBody], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class FunctionDefinition:
    """`name() { … }`."""

    name: str
    body: ShellBody


@dataclasses.dataclass(frozen=True, slots=True)
class CommandGroup:
    """`{ …; }` or `( … )`."""

    body: ShellBody
    is_subshell: bool


@dataclasses.dataclass(frozen=True, slots=True)
class CommandChain:
    """Commands joined by `&&` and `||`, or (a pipeline) by `|`; `operators` stand before all but the first."""

    commands: tuple[ShellNode, ...]
    operators: tuple[str, ...]
    is_negated: bool = False


ShellNode = (
    SimpleCommand | Conditional | ForLoop | WhileLoop | CaseChoice | FunctionDefinition | CommandGroup | CommandChain
)
ShellBody = tuple[ShellNode, ...]


def parse_script(text: str) -> ShellBody:
    """Return the commands of a script.

    Raises:
        ShellSyntaxError: Bash would not accept it either, or it is nested more than 100 deep.
    """
    parser = _ScriptParser(tokens_of(text))
    body = parser.body(())
    if parser.token is not None:
        raise parser.unexpected()
    return body


class _ScriptParser:
    def __init__(self, tokens: list[ShellToken]) -> None:
        self.tokens = tokens
        self.at = 0
        self.depth = 0

    @property
    def token(self) -> ShellToken | None:
        return self.tokens[self.at] if self.at < len(self.tokens) else None

    def unexpected(self) -> ShellSyntaxError:
        if self.token is None:
            return ShellSyntaxError("the script ends in the middle of a command")
        found = self.token.operator or (self.token.word.plain if self.token.word else "") or "a word"
        return ShellSyntaxError(f"line {self.token.line}: {found!r} is not expected here")

    def is_operator(self, *operators: str) -> bool:
        return self.token is not None and self.token.operator in operators

    def reserved(self) -> str:
        return (self.token.word.plain or "") if self.token is not None and self.token.word is not None else ""

    def expect(self, *words: str) -> None:
        if self.reserved() not in words and not self.is_operator(*words):
            raise self.unexpected()
        self.at += 1

    def skip_lines(self) -> None:
        while self.is_operator("\n"):
            self.at += 1

    def body(self, ends: tuple[str, ...]) -> ShellBody:
        """Return the commands up to one of the reserved words or operators `ends`, which is not taken."""
        self.depth += 1
        if self.depth > _MAX_DEPTH:
            raise ShellSyntaxError("nested too deeply")
        found: list[ShellNode] = []
        while True:
            while self.is_operator("\n", ";", "&"):
                self.at += 1
            if self.token is None or self.reserved() in ends or self.is_operator(*ends):
                self.depth -= 1
                return tuple(found)
            found.append(self.chain())

    def chain(self) -> ShellNode:
        return self._joined(("&&", "||"), self.pipeline)

    def pipeline(self) -> ShellNode:
        is_negated = False
        while self.reserved() in ("!", "time"):
            is_negated ^= self.reserved() == "!"
            self.at += 1
        found = self._joined(("|", "|&"), self.command)
        return CommandChain((found,), (), is_negated=True) if is_negated else found

    def _joined(self, operators: tuple[str, ...], part: Callable[[], ShellNode]) -> ShellNode:
        commands, joints = [part()], []
        while self.is_operator(*operators):
            joints.append(self.tokens[self.at].operator)
            self.at += 1
            self.skip_lines()
            commands.append(part())
        return commands[0] if len(commands) == 1 else CommandChain(tuple(commands), tuple(joints))

    def command(self) -> ShellNode:
        found = self._compound()
        if found is None:
            return self._simple()
        while self._skip_redirection():
            pass
        return found

    def _compound(self) -> ShellNode | None:
        word = self.reserved()
        readers = {
            "if": self._if,
            "for": self._for,
            "select": self._for,
            "while": self._while,
            "until": self._while,
            "case": self._case,
            "{": self._group,
            "function": self._function,
        }
        if word in readers:
            return readers[word]()
        if self.is_operator("("):
            return self._group()
        following = self.tokens[self.at + 1 : self.at + 3]
        if word and [token.operator for token in following] == ["(", ")"]:
            return self._function()
        return None

    def _if(self) -> ShellNode:
        branches = []
        while self.reserved() in ("if", "elif"):
            self.at += 1
            condition = self.body(("then",))
            self.expect("then")
            branches.append((condition, self.body(("elif", "else", "fi"))))
        if self.reserved() == "else":
            self.at += 1
            branches.append(((), self.body(("fi",))))
        self.expect("fi")
        return Conditional(tuple(branches))

    def _for(self) -> ShellNode:
        self.at += 1
        is_counted = self.is_operator("((")
        words = None if is_counted else [_ARGUMENTS]
        name = self.reserved()
        self.at += 1
        self.skip_lines()
        if self.reserved() == "in":
            self.at += 1
            words = []
            while self.token is not None and self.token.word is not None and not self.token.operator:
                words.append(self.token.word)
                self.at += 1
        body = self._loop_body()
        return ForLoop(name, tuple(words) if words is not None else None, body)

    def _while(self) -> ShellNode:
        is_until = self.reserved() == "until"
        self.at += 1
        condition = self.body(("do",))
        return WhileLoop(condition, self._loop_body(), is_until)

    def _loop_body(self) -> ShellBody:
        while self.is_operator("\n", ";"):
            self.at += 1
        self.expect("do")
        body = self.body(("done",))
        self.expect("done")
        return body

    def _case(self) -> ShellNode:
        self.at += 1
        word = self._word()
        self.skip_lines()
        self.expect("in")
        branches = []
        self.skip_lines()
        while self.reserved() != "esac":
            if self.is_operator("("):
                self.at += 1
            patterns = [self._word()]
            while self.is_operator("|"):
                self.at += 1
                patterns.append(self._word())
            self.expect(")")
            branches.append((tuple(patterns), self.body((";;", ";&", ";;&", "esac"))))
            if self.is_operator(";;", ";&", ";;&"):
                self.at += 1
            self.skip_lines()
        self.expect("esac")
        return CaseChoice(word, tuple(branches))

    def _group(self) -> ShellNode:
        is_subshell = self.is_operator("(")
        self.at += 1
        closing = ")" if is_subshell else "}"
        body = self.body((closing,))
        self.expect(closing)
        return CommandGroup(body, is_subshell)

    def _function(self) -> ShellNode:
        if self.reserved() == "function":
            self.at += 1
        name = self.reserved()
        self.at += 1
        if self.is_operator("("):
            self.at += 1
            self.expect(")")
        self.skip_lines()
        found = self.command()
        return FunctionDefinition(name, (found,))

    def _word(self) -> ShellWord:
        if self.token is None or self.token.word is None:
            raise self.unexpected()
        self.at += 1
        return self.tokens[self.at - 1].word or ShellWord(())

    def _simple(self) -> ShellNode:
        assignments: list[ShellAssignment] = []
        words: list[ShellWord] = []
        line = self.token.line if self.token else 0
        if self.is_operator("(("):
            word = self._word()
            return SimpleCommand((), (_text("(("), word), line)
        if self.reserved() in _NEVER_FIRST:
            raise self.unexpected()
        begin = self.at
        while self.token is not None:
            if self._skip_redirection():
                continue
            if self.token.word is None or self.token.operator:
                break
            assignment = as_assignment(self.token.word) if not words else None
            if assignment is not None:
                assignments.append(assignment)
                self.at += 1
            elif not words and self.reserved() == "[[":
                words += self._double_bracket()
            else:
                words.append(self._word())
        if self.at == begin:
            raise self.unexpected()
        return SimpleCommand(tuple(assignments), tuple(words), line)

    def _skip_redirection(self) -> bool:
        if not self.is_operator(*REDIRECTIONS):
            return False
        self.at += 1
        self._word()
        return True

    def _double_bracket(self) -> list[ShellWord]:
        """Return the words of `[[ … ]]`; operators are words in it."""
        found: list[ShellWord] = []
        while self.token is not None:
            token = self.token
            self.at += 1
            if token.word is not None and not token.operator:
                found.append(token.word)
                if token.word.plain == "]]":
                    return found
            elif token.operator != "\n":
                found.append(_text(token.operator))
        raise self.unexpected()


def as_assignment(word: ShellWord) -> ShellAssignment | None:
    """Return the assignment that a word is; None if it is none."""
    first = word.parts[0] if word.parts else None
    if first is None or first.kind != "text" or first.quoted:
        return None
    match = _ASSIGNMENT.match(first.text)
    if match is None:
        return None
    rest = (first._replace(text=first.text[match.end() :]), *word.parts[1:])
    value = ShellWord(tuple(part for part in rest if part.text or part.quoted or part.kind != "text"), word.array)
    return ShellAssignment(match[1], value, bool(match[3]), match[2] or "")


def _text(text: str) -> ShellWord:
    return ShellWord((WordPart("text", text, quoted=False),))
