"""`trainermon completion`: a script that completes commands and options in a shell, and imports nothing at TAB."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

SHELLS = ("bash", "zsh", "tcsh", "fish")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `trainermon completion`."""
    parser.add_argument("shell", choices=SHELLS, help="the shell whose script to print")


def main(arguments: argparse.Namespace) -> int:
    """Print the script (`trainermon completion`), and return 0."""
    sys.stdout.write(script(arguments.shell))
    return 0


def script(shell: str) -> str:
    """Return what makes `shell` complete the commands of trainermon, their options, choices and file names.

    Of a command that cannot be imported here, for it needs torch, the name alone is completed.
    """
    import shtab

    from trainermon.cli import build_parser, leaves

    parser = build_parser(tuple(_importable()))
    for leaf in leaves(parser):
        for action in leaf._actions:  # argparse has no other way to ask
            if action.type is Path and not hasattr(action, "complete"):
                action.complete = shtab.FILE  # type: ignore[attr-defined]  # where shtab looks for it
    return shtab.complete(parser, shell=shell)


def _importable() -> Iterator[str]:
    from trainermon.cli import COMMANDS, build_parser

    for name in COMMANDS:
        with contextlib.suppress(ModuleNotFoundError):
            build_parser((name,))
            yield name
