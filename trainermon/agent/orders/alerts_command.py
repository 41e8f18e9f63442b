"""`trainermon alerts`: list the alerts of a run, say that one is known, and have a rule be quiet for a while.

A list is read from the run directory. Words go to the agent of the run on this node, as those of the page do.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import getpass
import http.client
import json
import re
import shutil
import socket
import sys
import textwrap
import time
import urllib.error
from pathlib import Path
from typing import Any

from trainermon.alerts.handling import FILE, AlertHandling
from trainermon.alerts.log import AlertLog
from trainermon.core.errors import QueryError, TrainermonError
from trainermon.core.values import Alert, AlertState, as_plain
from trainermon.exporters.node_agent import find_agent
from trainermon.exporters.store.query import find_run

_TIMEOUT_S = 10.0
_MIN_TEXT = 60  # columns of a terminal that the text needs to stand beside the others
_INDENT = 4
_DURATION = re.compile(r"(\d+(?:\.\d+)?)([mhd])")
_MINUTES = {"m": 1.0, "h": 60.0, "d": 1440.0}


class WordRefusedError(TrainermonError):
    """Raised when no agent takes what is said about an alert."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `trainermon alerts`."""
    parser.add_argument("run", nargs="?", help="run directory or run id (default: the newest)")
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--acknowledge", metavar="ID", action="append", help="say that you know of this alert; repeatable"
    )
    what.add_argument("--silence", metavar="RULE", help="mute dumps and notification by this rule for a while")
    what.add_argument("--unsilence", metavar="RULE", help="end that")
    parser.add_argument(
        "--for", dest="duration", default="1h", metavar="TIME", help="30m, 8h, 2d (default: %(default)s)"
    )
    parser.add_argument(
        "--series", default="", metavar="PATTERN", help="mute only alerts whose series match, as 'h.3.*'"
    )
    parser.add_argument("--by", default="", metavar="NAME", help="who says so (default: user and host)")
    parser.add_argument("--note", default="", metavar="TEXT", help="why")
    parser.add_argument("--json", action="store_true", help="print the list as JSON, for another program")


def main(args: argparse.Namespace) -> int:
    """List the alerts of a run, or say something about them (`trainermon alerts`); returns 0.

    Raises:
        QueryError: There is no such run, or the time is none.
        WordRefusedError: No agent of the run on this node takes it.
    """
    run_dir = find_run(args.run)
    by = args.by or f"{getpass.getuser()}@{socket.gethostname()}"
    if args.acknowledge:
        _say(run_dir, "/api/acknowledgements", {"alert": args.acknowledge, "by": by, "note": args.note})
    elif args.silence or args.unsilence:
        minutes = _minutes(args.duration) if args.silence else 0.0
        rule = args.silence or args.unsilence
        order = {"rule": rule, "series": args.series, "minutes": minutes, "by": by, "note": args.note}
        _say(run_dir, "/api/silences", order)
    else:
        sys.stdout.write(as_json(run_dir) if args.json else listed(run_dir))
    return 0


def listed(run_dir: Path) -> str:
    """Return the alerts of all nodes in their last state, those that fire first, with what was said about them."""
    now_s = time.time()
    lines: list[tuple[bool, int, int, str]] = []
    silences: list[str] = []
    for node in _nodes(run_dir):
        handling = AlertHandling(node / FILE)
        latest = {alert.id: alert for alert in AlertLog(node / "alerts.jsonl").read()}
        lines += [
            (alert.state is not AlertState.FIRING, alert.first_step, alert.step, _line(alert, handling, now_s))
            for alert in latest.values()
        ]
        for silence in handling.silences(now_s):
            series = f" on {silence.series}" if silence.series else ""
            silences.append(f"{silence.rule}{series}: silenced until {_clock(silence.until_s)} by {silence.by}")
    text = [line for *_, line in sorted(lines)] or ["no alerts"]
    return "\n".join([*text, *silences, ""])


def as_json(run_dir: Path) -> str:
    """Return the alerts of all nodes in their last state as a JSON list, in the order of their steps.

    Each has the fields of `alerts.jsonl`, its node, `acknowledged` (who knows of it, or null) and `silenced`.
    """
    now_s = time.time()
    found = []
    for node in _nodes(run_dir):
        handling = AlertHandling(node / FILE)
        for alert in {alert.id: alert for alert in AlertLog(node / "alerts.jsonl").read()}.values():
            known, quiet = handling.acknowledgement(alert.id), handling.silence(alert, now_s)
            said = {"acknowledged": known.by if known else None, "silenced": quiet is not None}
            found.append({"node": node.name, **dataclasses.asdict(alert), **said})
    found.sort(key=lambda one: (one["first_step"], one["id"]))
    return json.dumps(as_plain(found), indent=1) + "\n"


def _nodes(run_dir: Path) -> list[Path]:
    return sorted(path for path in run_dir.glob("nodes/*") if path.is_dir())


def _line(alert: Alert, handling: AlertHandling, now_s: float) -> str:
    known, quiet = handling.acknowledgement(alert.id), handling.silence(alert, now_s)
    said = (
        [f"known to {known.by} since {_clock(known.time_s)}{f': {known.note}' if known.note else ''}"] if known else []
    )
    said += [f"silenced until {_clock(quiet.until_s)}"] if quiet else []
    columns = f"{alert.id}  {alert.severity:8}  {alert.state:8}  "
    text = "  ".join([alert.message, *(f"[{one}]" for one in said)])
    return _wrapped(columns, text) if sys.stdout.isatty() else columns + text


def _wrapped(columns: str, text: str) -> str:
    """Return a row for a terminal, the lines of its text below one another; of a narrow one, below the columns."""
    width = shutil.get_terminal_size().columns
    is_wide = width >= len(columns) + _MIN_TEXT
    indent = " " * (len(columns) if is_wide else _INDENT)
    lines = textwrap.wrap(
        text,
        width,
        initial_indent=columns if is_wide else indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(lines if is_wide else [columns.rstrip(), *lines])


def _clock(time_s: float) -> str:
    return datetime.datetime.fromtimestamp(time_s).astimezone().isoformat(sep=" ", timespec="minutes")


def _minutes(text: str) -> float:
    found = _DURATION.fullmatch(text)
    if found is None:
        raise QueryError(f"--for: found {text!r}, expected a time such as 30m, 8h or 2d")
    return float(found[1]) * _MINUTES[found[2]]


def _say(run_dir: Path, path: str, order: dict[str, Any]) -> None:
    agent = find_agent(run_dir)
    if agent is None:
        raise WordRefusedError(f"{run_dir}: no agent of this run is running on this node; ask on a node of the run")
    try:
        headers = {"Content-Type": "application/json"}
        agent.ask(path, timeout_s=_TIMEOUT_S, data=json.dumps(order).encode(), headers=headers)
    except urllib.error.HTTPError as error:
        raise WordRefusedError(_detail(error)) from None
    except (OSError, http.client.HTTPException) as error:
        raise WordRefusedError(f"the agent at {agent.url} does not answer: {error}") from None


def _detail(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.loads(error.read())["detail"])
    except (ValueError, LookupError, TypeError):
        return f"the agent answered {error.code} {error.reason}"
