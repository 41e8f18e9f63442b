"""The exit statuses of `--exit-code`: what a command found, and whether it has read all that it was given."""

from __future__ import annotations

import argparse

FOUND = 3
UNKNOWN = 4
"""1 and 2 stand for what could not be done, as in every command."""


def add_exit_code(parser: argparse.ArgumentParser, found: str, unknown: str) -> None:
    """Add `--exit-code`: the status is `FOUND` if `found`, else `UNKNOWN` if `unknown`, else 0."""
    parser.add_argument(
        "--exit-code", action="store_true", help=f"end with status {FOUND} if {found}, {UNKNOWN} if {unknown}; else 0"
    )


def exit_status(args: argparse.Namespace, *, found: bool, whole: bool) -> int:
    """Return the status that `--exit-code` asks for: 0 only where nothing is `found` in the `whole`; 0 without it."""
    if not args.exit_code:
        return 0
    return FOUND if found else 0 if whole else UNKNOWN
