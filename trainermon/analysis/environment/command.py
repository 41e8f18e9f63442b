"""`trainermon env`: what a training runs on and with, collected, shown and compared."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from trainermon.analysis.environment.collect import collect_environment
from trainermon.analysis.environment.compare import compare_packs
from trainermon.analysis.environment.differences import DifferenceLevel, EnvironmentComparison
from trainermon.analysis.environment.job import run_job
from trainermon.analysis.environment.output.files import FORMATS, write_files
from trainermon.analysis.environment.packs import read_pack
from trainermon.analysis.environment.rules import LevelRules, read_rules
from trainermon.analysis.environment.screen import render_comparison, render_pack
from trainermon.core.environment.pack import SECTIONS, EnvironmentPack, write_pack
from trainermon.core.environment.secrets import Redactor
from trainermon.core.errors import ConfigError, PackError
from trainermon.core.terminal.manners import has_colour, note
from trainermon.core.terminal.progress import ProgressBar
from trainermon.core.values import as_plain
from trainermon.exporters.store.query import path_or_run

PACK_NAME = "environment.zip"
MIN_KEY_BYTES = 16
DEFAULT_FORMATS = ("json", "html")
DIFFERS, MAY_DIFFER = 3, 4
"""With --exit-code; 1 and 2 stand for what could not be done, as in every command."""


class _ParserWithCommand(argparse.ArgumentParser):
    """Takes what stands behind `--run --` as it is, which argparse has no way to say of an option."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        words = list(args or ())
        at = words.index("--run") if "--run" in words else len(words)
        command = words[at + 1 :]
        command = command[1:] if command[:1] == ["--"] else command
        if at < len(words) and not command:
            self.error("--run: expected a command, as in `--run -- torchrun train.py`")
        found, rest = super().parse_known_args(words[:at], namespace)
        found.command = command
        return found, rest


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `trainermon env`."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION", parser_class=_ParserWithCommand)
    collect = actions.add_parser("collect", help="collect what a training runs on and with into one file")
    collect.add_argument(
        "files", nargs="*", type=Path, metavar="FILE", help="launch script (.sh), configurations (.yaml, .json, .toml)"
    )
    collect.add_argument(
        "-o", "--output", type=Path, default=Path(PACK_NAME), metavar="ZIP", help="(default: %(default)s)"
    )
    collect.add_argument(
        "--secrets-key",
        type=Path,
        metavar="FILE",
        help="a key of both sides: equal secrets can be told by 32 bits of their keyed hash",
    )
    collect.add_argument(
        "--run",
        nargs=argparse.REMAINDER,
        dest="command",
        metavar="-- COMMAND",
        help="run this command, and collect what its processes show at their first forward, too",
    )
    collect.set_defaults(act=_collect)
    compare = actions.add_parser("compare", help="compare two packs, ours or msprobe's, or runs")
    compare.add_argument(
        "first", type=path_or_run, metavar="A", help="the pack, or run, that is right (msprobe: bench)"
    )
    compare.add_argument(
        "second", type=path_or_run, metavar="B", help="the one that is compared with it (msprobe: cmp)"
    )
    compare.add_argument("-o", "--output", type=Path, metavar="DIR", help="write files into this folder")
    compare.add_argument(
        "-f",
        "--format",
        default=",".join(DEFAULT_FORMATS),
        metavar="LIST",
        help=f"what to write, of {','.join(FORMATS)} (default: %(default)s)",
    )
    compare.add_argument("--rules", type=Path, metavar="FILE", help="rules that come before the built-in ones")
    compare.add_argument("--all", action="store_true", help="show what is equal, too")
    compare.add_argument(
        "--exit-code",
        action="store_true",
        help=f"end with status {DIFFERS} if a difference changes numbers, {MAY_DIFFER} if one may, instead of 0",
    )
    compare.set_defaults(act=_compare)
    show = actions.add_parser("show", help="show what was collected")
    show.add_argument("pack", type=Path, metavar="PACK", help="a pack, ours or msprobe's, or a run")
    show.add_argument("section", nargs="?", choices=SECTIONS, metavar="SECTION", help=", ".join(SECTIONS))
    show.add_argument("--json", action="store_true", help="print all of it, or of the section, as JSON")
    show.set_defaults(act=_show)


def main(args: argparse.Namespace) -> int:
    """Collect, compare or show environments (`trainermon env`), and return the exit status.

    Raises:
        PackError, ConfigError: A file cannot be read or written; the message says which, and what to do.
    """
    return int(args.act(args))


def _collect(args: argparse.Namespace) -> int:
    redactor = Redactor(_key(args.secrets_key))
    with ProgressBar("collecting"):
        pack = collect_environment(args.files, os.environ, redactor, Path.cwd())
        write_pack(args.output, pack)
    for text in pack.notes:
        note(f"trainermon env: {text}")
    status = run_job(args.command, args.output) if args.command else 0
    sys.stdout.write(f"wrote {args.output}\n")
    return status


def _key(path: Path | None) -> bytes | None:
    if path is None:
        return None
    try:
        key = path.read_bytes().strip()
    except OSError as error:
        raise PackError(f"--secrets-key: {path} cannot be read ({error.strerror})") from error
    if len(key) < MIN_KEY_BYTES:
        raise PackError(
            f"--secrets-key: {path} has {len(key)} bytes, expected at least {MIN_KEY_BYTES}: it can be guessed"
        )
    return key


def _compare(args: argparse.Namespace) -> int:
    rules = LevelRules(read_rules(args.rules) if args.rules else ())
    comparison = compare_packs(read_pack(args.first), read_pack(args.second), rules)
    sys.stdout.write(render_comparison(comparison, everything=args.all, colour=has_colour()))
    if args.output is not None:
        for path in write_files(comparison, args.output, _formats(args.format), everything=args.all):
            sys.stdout.write(f"wrote {path}\n")
    return _status(comparison) if args.exit_code else 0


def _formats(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    wrong = [name for name in names if name not in FORMATS]
    if wrong or not names:
        raise ConfigError(f"-f: found {', '.join(wrong) or 'nothing'}, expected some of {','.join(FORMATS)}")
    return names


def _status(comparison: EnvironmentComparison) -> int:
    if comparison.of(DifferenceLevel.ERROR):
        return DIFFERS
    return MAY_DIFFER if comparison.of(DifferenceLevel.WARNING) else 0


def _as_json(pack: EnvironmentPack, section: str | None) -> str:
    """Return a pack, or one section of it, as JSON; what ranks showed is under `ranks`."""
    plain: dict[str, Any] = as_plain(pack)
    if section is not None:
        ranks = {rank: shown[section] for rank, shown in plain["ranks"].items() if section in shown}
        plain = {section: plain["sections"].get(section, {}), "ranks": ranks}
    return json.dumps(plain, indent=1, default=str) + "\n"


def _show(args: argparse.Namespace) -> int:
    pack = read_pack(args.pack)
    sys.stdout.write(_as_json(pack, args.section) if args.json else render_pack(pack, args.section))
    return 0
