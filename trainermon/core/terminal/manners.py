"""What a person asks of every command alike: colour, and how much is said."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TextIO

from trainermon.core.log import logger, make_log_visible

AUTO, ALWAYS, NEVER = "auto", "always", "never"


@dataclass(frozen=True, slots=True, kw_only=True)
class TerminalManners:
    """How a process behaves in a terminal.

    Attributes:
        colour: `AUTO`, `ALWAYS` or `NEVER`.
        shows_progress: Whether bars may be drawn, where standard error is a terminal.
        is_quiet: Whether notes are left out.
    """

    colour: str = AUTO
    shows_progress: bool = False
    is_quiet: bool = False


_manners = TerminalManners()  # of a process that uses the package as a library


def add_options(parser: argparse.ArgumentParser, *, is_command: bool = True) -> None:
    """Add `--color`, `--quiet` and `--verbose` to a command, or (`is_command` false) to the program, before its name.

    One that a command has itself keeps its meaning. What is not given to a command is as it was given there.
    """
    group = parser.add_argument_group("output")
    known = parser._option_string_actions  # argparse has no other way to ask
    group.add_argument(
        "--color",
        choices=(AUTO, ALWAYS, NEVER),
        default=argparse.SUPPRESS if is_command else AUTO,
        help="colour what is printed; auto (default): in a terminal, unless NO_COLOR is set",
    )
    for words, text in (
        (("-q", "--quiet"), "no progress and no notes: only results and errors"),
        (("-v", "--verbose"), "say what is being done, and where an error was raised"),
    ):
        default = argparse.SUPPRESS if is_command else False
        own = [known[word] for word in words if word in known]
        for action in own:
            action.default = default
        if not own:
            group.add_argument(*words, action="store_true", default=default, help=text)


def take(arguments: argparse.Namespace, *, shows_log: bool) -> None:
    """Behave from now on as `arguments` ask.

    `shows_log` shows the package's log on standard error; False: the command has a log of its own.
    """
    global _manners  # one terminal per process
    _manners = TerminalManners(colour=arguments.color, shows_progress=not arguments.quiet, is_quiet=arguments.quiet)
    if shows_log:
        make_log_visible(quiet=True)
    if arguments.verbose:
        logger.setLevel(logging.DEBUG)
    elif arguments.quiet:
        logger.setLevel(logging.ERROR)


def forget() -> None:
    """Behave as a library again."""
    global _manners
    _manners = TerminalManners()


def has_colour(stream: TextIO | None = None, environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether what is written to `stream` (None: standard output) is coloured.

    `--color` counts first; then NO_COLOR, if not empty, forbids it (https://no-color.org), as `TERM=dumb` does;
    FORCE_COLOR asks for it; else a terminal has it.
    """
    if _manners.colour != AUTO:
        return _manners.colour == ALWAYS
    if environment.get("NO_COLOR") or environment.get("TERM") == "dumb":
        return False
    return bool(environment.get("FORCE_COLOR")) or (stream or sys.stdout).isatty()


def shows_progress(stream: TextIO) -> bool:
    """Return whether a bar may be drawn on `stream`: it is a terminal, and nobody asked for quiet."""
    return _manners.shows_progress and stream.isatty() and os.environ.get("TERM") != "dumb"


def say_interrupted(command: str | None, more: str = "") -> None:
    """Write that Ctrl-C has ended a command, in the place of the `^C` that the terminal shows, and `more`."""
    erase = "\r\033[K" if sys.stderr.isatty() and os.environ.get("TERM") != "dumb" else ""
    sys.stderr.write(f"{erase}trainermon {command or ''}".rstrip() + f": interrupted{more}\n")


def note(text: str) -> None:
    """Write a line to standard error that nobody needs to read, unless quiet was asked for."""
    if text and not _manners.is_quiet:
        sys.stderr.write(f"{text}\n")
