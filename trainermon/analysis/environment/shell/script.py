"""Walks through a script as a shell would, and tells the commands that it comes to; none of them is run."""

from __future__ import annotations

import contextlib
import fnmatch
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from trainermon.analysis.environment.shell.conditions import holds
from trainermon.analysis.environment.shell.expansion import ShellValue, WordExpander, is_unknown, unknown, without_marks
from trainermon.analysis.environment.shell.grammar import (
    CaseChoice,
    CommandChain,
    CommandGroup,
    Conditional,
    ForLoop,
    FunctionDefinition,
    ShellAssignment,
    ShellBody,
    ShellNode,
    SimpleCommand,
    WhileLoop,
    as_assignment,
    parse_script,
)
from trainermon.analysis.environment.shell.words import ShellSyntaxError, ShellWord

MAX_STEPS = 20_000
MAX_BYTES = 1 << 18
MAX_DEPTH = 30
MAX_TURNS = 1_000
_DECLARING = ("export", "declare", "local", "readonly", "typeset")
_SILENT = """
    cd pushd popd mkdir rm cp mv ln touch chmod set shopt ulimit echo printf sleep wait kill trap umask alias type hash
    true : cat tee ls date pwd grep sed awk head tail cut tr wc hostname which command test shift unset false
"""
_SILENT_NAMES = frozenset(_SILENT.split())
_OF_LAUNCHERS = re.compile(  # variables that are set for each process: nobody knows them before
    r"\b(?:SLURM|OMPI|PMI|PMIX)_\w+|\b(?:(?:LOCAL_|GROUP_|NODE_)?RANK|(?:LOCAL_)?WORLD_SIZE|MASTER_(?:ADDR|PORT))\b"
)
_UNREAD = ("source", ".", "eval", "read", "mapfile", "readarray", "getopts")


class ShellCommand(NamedTuple):
    """A command that a script comes to.

    Attributes:
        words: Its words; what is not known stands as it was written.
        line: Where it stands, from 1.
        is_certain: Whether the script comes to it whatever is not known.
        unresolved: Those of its words of which a part is not known.
        variables: The variables that it gets beside those of the surroundings.
    """

    words: tuple[str, ...]
    line: int
    is_certain: bool
    unresolved: tuple[str, ...]
    variables: Mapping[str, str]


class ScriptReading(NamedTuple):
    """What a script does, as far as it can be known without running it.

    Attributes:
        commands: The commands that it comes to, in order, builtin ones left out.
        notes: What could not be followed.
    """

    commands: tuple[ShellCommand, ...]
    notes: tuple[str, ...]


class _LeavingError(Exception):
    """`exit`, `return`, `break` or `continue`."""

    def __init__(self, word: str) -> None:
        super().__init__(word)
        self.word = word


def read_script(path: Path, environ: Mapping[str, str]) -> ScriptReading:
    """Return what a script does when it is started without arguments with the variables `environ`.

    Raises:
        ShellSyntaxError: It cannot be read, bash would not accept it either, or it goes on without end.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise ShellSyntaxError(f"{path}: has more than {MAX_BYTES:,} bytes, which no launch script needs")
        text = content.decode()
    except (OSError, UnicodeError) as error:
        raise ShellSyntaxError(f"{path}: cannot be read ({' '.join(str(error).split())})") from error
    try:
        return read_text(text, environ, script=str(path))
    except (ShellSyntaxError, RecursionError) as error:
        raise ShellSyntaxError(f"{path}: {error}") from error


def read_text(
    text: str, environ: Mapping[str, str], *, script: str = "bash", arguments: Sequence[str] = ()
) -> ScriptReading:
    """Return what the text of a script does that is started with `arguments`; see `read_script`."""
    not_known = {name: unknown(f"${{{name}}}") for name in _OF_LAUNCHERS.findall(text)}
    walker = _ScriptWalker({**not_known, **environ}, script)
    walker.expander.arguments = [*arguments]
    with contextlib.suppress(_LeavingError):
        walker.walk(parse_script(text))
    return ScriptReading(tuple(walker.commands), tuple(dict.fromkeys(walker.notes)))


class _ScriptWalker:
    def __init__(self, environ: Mapping[str, str], script: str) -> None:
        self.variables: dict[str, ShellValue] = dict(environ)
        self.exported = set(environ)
        self.environ = environ
        self.expander = WordExpander(self.variables, (), script)
        self.functions: dict[str, ShellBody] = {}
        self.commands: list[ShellCommand] = []
        self.notes: list[str] = []
        self.doubts = 0  # how many conditions that are not known stand around the command
        self.depth = 0
        self.steps = 0

    def walk(self, body: ShellBody) -> bool | None:
        """Walk through commands; return whether the last one succeeds, None where that is not known."""
        status: bool | None = True
        for node in body:
            status = self._node(node)
        return status

    def _node(self, node: ShellNode) -> bool | None:
        self.steps += 1
        if self.steps > MAX_STEPS:
            raise ShellSyntaxError(f"goes on for more than {MAX_STEPS:,} commands")
        walkers: dict[type, Callable[[Any], bool | None]] = {
            SimpleCommand: self._simple,
            CommandChain: self._chain,
            Conditional: self._conditional,
            ForLoop: self._for,
            WhileLoop: self._while,
            CaseChoice: self._case,
            FunctionDefinition: self._define,
            CommandGroup: self._group,
        }
        return walkers[type(node)](node)

    def _define(self, node: FunctionDefinition) -> bool:
        self.functions[node.name] = node.body
        return True

    def _group(self, node: CommandGroup) -> bool | None:
        if not node.is_subshell:
            return self.walk(node.body)
        before, exported = dict(self.variables), set(self.exported)
        try:
            return self.walk(node.body)
        except _LeavingError:
            return None
        finally:
            self._set_variables(before)
            self.exported = exported

    def _chain(self, node: CommandChain) -> bool | None:
        if not node.operators:
            status = self._node(node.commands[0])
            return (not status) if node.is_negated and status is not None else status
        if node.operators[0] in ("|", "|&"):
            statuses = [self._group(CommandGroup((command,), is_subshell=True)) for command in node.commands]
            return statuses[-1]
        status = self._node(node.commands[0])
        for joint, command in zip(node.operators, node.commands[1:], strict=True):
            if status is None:
                self._in_doubt([(command,)])
            elif status is (joint == "&&"):
                status = self._node(command)
        return status

    def _conditional(self, node: Conditional) -> bool | None:
        for number, (condition, body) in enumerate(node.branches):
            status = self.walk(condition) if condition else True
            if status is None:
                self._in_doubt([branch for _, branch in node.branches[number:]])
                return None
            if status:
                return self.walk(body)
        return True

    def _for(self, node: ForLoop) -> bool | None:
        values = self.expander.elements(node.words) if node.words is not None else None
        if values is None or len(values) > MAX_TURNS:
            self._in_doubt([node.body])
            return None
        for value in values:
            self.variables[node.name] = value
            try:
                self.walk(node.body)
            except _LeavingError as leaving:
                if leaving.word not in ("break", "continue"):
                    raise
                if leaving.word == "break":
                    break
        return True

    def _while(self, node: WhileLoop) -> bool | None:
        for _ in range(MAX_TURNS):
            status = self.walk(node.condition)
            if status is None:
                self._in_doubt([node.body])
                return None
            if status is node.is_until:
                return True
            try:
                self.walk(node.body)
            except _LeavingError as leaving:
                if leaving.word not in ("break", "continue"):
                    raise
                if leaving.word == "break":
                    return True
        raise ShellSyntaxError(f"a loop goes on for more than {MAX_TURNS:,} turns")

    def _case(self, node: CaseChoice) -> bool | None:
        value = self.expander.text(node.word)
        if is_unknown(value):
            self._in_doubt([body for _, body in node.branches])
            return None
        for patterns, body in node.branches:
            if any(fnmatch.fnmatchcase(value, self.expander.pattern(pattern)) for pattern in patterns):
                return self.walk(body)
        return True

    def _in_doubt(self, bodies: Sequence[ShellBody]) -> None:
        """Walk through all of several ways; what one of them sets is not known afterwards."""
        before = dict(self.variables)
        changed: set[str] = set()
        self.doubts += 1
        for body in bodies:
            with contextlib.suppress(_LeavingError):
                self.walk(body)
            changed |= {name for name in {*before, *self.variables} if before.get(name) != self.variables.get(name)}
            self._set_variables(before)
        self.doubts -= 1
        for name in changed:
            self.variables[name] = unknown(f"${{{name}}}")

    def _set_variables(self, values: Mapping[str, ShellValue]) -> None:
        self.variables.clear()
        self.variables.update(values)

    def _simple(self, node: SimpleCommand) -> bool | None:
        if not node.words:
            for assignment in node.assignments:
                self._assign(assignment)
            return True
        name = node.words[0].plain
        if name in _DECLARING:
            return self._declare(node)
        if name == "((" and len(node.words) == 2:
            value = self.expander.arithmetic(node.words[1].parts[0].text)
            return None if is_unknown(value) else value != "0"
        if name == "[[":
            return self._double_bracket(node.words[1:-1])
        words = [field for word in node.words for field in self.expander.fields(word)]
        return self._run(words, node) if words else True

    def _double_bracket(self, words: Sequence[ShellWord]) -> bool | None:
        texts: list[str] = []
        for word in words:
            is_pattern = bool(texts) and texts[-1] in ("=", "==", "!=")
            texts.append(self.expander.pattern(word) if is_pattern else self.expander.text(word))
        return holds(texts, has_patterns=True)

    def _run(self, words: list[str], node: SimpleCommand) -> bool | None:
        name, arguments = words[0], words[1:]
        if name in ("[", "test"):
            return holds(arguments[:-1] if name == "[" else arguments)
        if name in ("exit", "return", "break", "continue"):
            raise _LeavingError(name)
        if name in self.functions:
            return self._call(name, arguments)
        if name == "eval" and not any(map(is_unknown, arguments)):
            return self._eval(arguments, node)
        if name in _UNREAD:
            return self._unread(words, node)
        self._change(name, arguments)
        if name not in _SILENT_NAMES:
            self._emit(words, node)
        return name != "false"

    def _change(self, name: str, arguments: list[str]) -> None:
        """Do what a builtin command does to arguments and variables."""
        if name == "set" and "--" in arguments:
            self.expander.arguments = arguments[arguments.index("--") + 1 :]
        elif name == "shift":
            number = int(arguments[0]) if arguments and arguments[0].isdigit() else 1
            del self.expander.arguments[:number]
        elif name == "unset":
            for argument in arguments:
                self.variables.pop(argument, None)

    def _eval(self, arguments: list[str], node: SimpleCommand) -> bool | None:
        if self.depth >= MAX_DEPTH:
            raise ShellSyntaxError(f"commands are evaluated more than {MAX_DEPTH} deep")
        first = len(self.commands)
        self.depth += 1
        try:
            return self.walk(parse_script(" ".join(arguments)))
        finally:
            self.depth -= 1
            self.commands[first:] = [command._replace(line=node.line) for command in self.commands[first:]]

    def _unread(self, words: list[str], node: SimpleCommand) -> bool | None:
        self.notes.append(f"line {node.line}: {without_marks(' '.join(words))}: not followed")
        if words[0] in ("read", "mapfile", "readarray", "getopts"):
            for word in words[1:]:
                if word.isidentifier():
                    self.variables[word] = unknown(f"${{{word}}}")
            return None
        return True

    def _emit(self, words: list[str], node: SimpleCommand) -> None:
        variables = {name: value for name, value in self.variables.items() if name in self.exported}
        for assignment in node.assignments:
            variables[assignment.name] = self.expander.text(assignment.value)
        added = {
            name: without_marks(value)
            for name, value in variables.items()
            if isinstance(value, str) and self.environ.get(name) != value
        }
        unresolved = tuple(without_marks(word) for word in words if is_unknown(word))
        plain = tuple(map(without_marks, words))
        self.commands.append(ShellCommand(plain, node.line, not self.doubts, unresolved, added))

    def _call(self, name: str, arguments: list[str]) -> bool | None:
        if self.depth >= MAX_DEPTH:
            raise ShellSyntaxError(f"functions call each other more than {MAX_DEPTH} deep")
        before, self.expander.arguments = self.expander.arguments, arguments
        self.depth += 1
        try:
            return self.walk(self.functions[name])
        except _LeavingError as leaving:
            if leaving.word != "return":
                raise
            return None
        finally:
            self.depth -= 1
            self.expander.arguments = before

    def _declare(self, node: SimpleCommand) -> bool:
        is_export = node.words[0].plain == "export"
        for assignment in node.assignments:
            self._assign(assignment)
        for word in node.words[1:]:
            declared = as_assignment(word)
            if declared is not None:
                self._assign(declared)
                names = [declared.name]
            else:
                fields = self.expander.fields(word)
                is_export = is_export or any(re.fullmatch(r"-\w*x\w*", field) for field in fields)
                for field in fields:
                    given, is_pair, value = field.partition("=")
                    if is_pair and given.isidentifier():
                        self.variables[given] = value
                names = [field.partition("=")[0] for field in fields if not field.startswith("-")]
            if is_export:
                self.exported.update(names)
        return True

    def _assign(self, assignment: ShellAssignment) -> None:
        name, value = assignment.name, assignment.value
        held = self.variables.get(name)
        if value.array is not None:
            elements = self.expander.elements(value.array)
            before = held if isinstance(held, list) else [held] if held else []
            self.variables[name] = [*before, *elements] if assignment.appends else elements
        elif assignment.index:
            self._assign_element(assignment)
        elif isinstance(held, list):
            text = self.expander.text(value)
            first = (held[0] if held else "") + text if assignment.appends else text
            self.variables[name] = [first, *held[1:]]
        else:
            text = self.expander.text(value)
            self.variables[name] = (held or "") + text if assignment.appends else text

    def _assign_element(self, assignment: ShellAssignment) -> None:
        held = self.variables.get(assignment.name, [])
        elements = list(held) if isinstance(held, list) else [held]
        index = self.expander.arithmetic(assignment.index)
        if is_unknown(index) or not 0 <= int(index) <= len(elements):  # with gaps, or by name
            self.variables[assignment.name] = [unknown(f"${{{assignment.name}[@]}}")]
            return
        number = int(index)
        before = elements[number] if number < len(elements) and assignment.appends else ""
        elements[number : number + 1] = [before + self.expander.text(assignment.value)]
        self.variables[assignment.name] = elements
