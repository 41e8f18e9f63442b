"""`trainermon serve`: from the command line to a page of runs that is served until Ctrl-C."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import math
import secrets
import signal
import sys
import time
import webbrowser
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from trainermon.core.errors import ConfigError
from trainermon.core.terminal.escapes import printable
from trainermon.core.terminal.tables import aligned
from trainermon.core.topology import OUTPUT_ROOT, output_root
from trainermon.usage import port_number

if TYPE_CHECKING:
    from trainermon.agent.runs.facts import RunFacts

SUMMARY = "show the runs of a folder in the browser: list, pages, comparison"
PORT = 9463
THREADS = 4

_log = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `trainermon serve`."""
    parser.add_argument(
        "paths",
        nargs="*",
        type=Path,
        metavar="DIR|RUN",
        help=f"folders of runs, or runs (default: $TRAINERMON_OUTPUT or ./{OUTPUT_ROOT})",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument(
        "--port", type=port_number, help=f"port to listen on (default: {PORT}, or a free one if it is taken)"
    )
    parser.add_argument(
        "--allowed-host", action="append", default=[], metavar="NAME", help="a further name it may be asked for under"
    )
    parser.add_argument("--list", action="store_true", help="print the runs, newest first, and end")
    parser.add_argument("--json", action="store_true", help="with --list: as JSON, for another program")
    parser.add_argument("--open", action="store_true", help="open the page in the browser")


def main(args: argparse.Namespace) -> int:
    """Serve the runs of folders until SIGTERM or SIGINT; return 0.

    Raises:
        ConfigError: A folder does not exist, or the port cannot be listened on.
    """
    opened = [path.absolute() for path in args.paths] or [output_root().absolute()]
    for path in opened:
        if not path.is_dir():
            raise ConfigError(f"{path} is no folder: give a folder of runs, or the directory of a run")
    if args.list or args.json:
        sys.stdout.write(listed(opened, as_json=args.json))
        return 0
    logging.basicConfig(level=logging.WARNING, format="trainermon: %(message)s", stream=sys.stderr)
    logging.getLogger("trainermon").setLevel(logging.INFO)
    asyncio.run(_serve(opened, args))
    return 0


def listed(opened: Sequence[Path], *, as_json: bool = False) -> str:
    """Return the runs of folders, newest first: a line for each, or a JSON list of what is known of each."""
    from trainermon.agent.runs.run_list import RunList

    runs = RunList(opened)
    runs.scan()
    found = list(runs.facts.values())
    if as_json:
        return json.dumps([facts.as_plain() for facts in found], indent=1) + "\n"
    if not found:
        return f"no runs in {', '.join(map(str, opened))}, nor in the folders directly in it\n"
    lines = aligned([_HEAD, *map(_cells, found)], right=_NUMBERS)
    if any(facts.step is not None and facts.loss is None for facts in found):
        lines.append("loss –: none is recorded; call monitor.record(loss=loss) in each step")
    return "\n".join(lines) + "\n"


_HEAD = ("state", "started", "step", "loss", "alerts", "run")
_NUMBERS = frozenset({2, 3, 4})


def _cells(facts: RunFacts) -> tuple[str, ...]:
    """Return the line of a run in the terminal, by column."""
    started = "–" if facts.started_s is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(facts.started_s))
    step = "–" if facts.step is None else f"{facts.step:,}"
    loss = "–" if facts.loss is None else f"{facts.loss:.5g}" if math.isfinite(facts.loss) else "not finite"
    return facts.state, started, step, loss, f"{facts.alerts}", printable(facts.name)


async def _serve(opened: Sequence[Path], args: argparse.Namespace) -> None:
    from trainermon.agent.lifecycle.open_files import LoopFaults
    from trainermon.agent.runs.http import RunDesk, build_application
    from trainermon.agent.runs.run_list import RunList
    from trainermon.agent.web.access import AccessSettings, open_access
    from trainermon.agent.web.server import WebServer, certificate_of

    loop = asyncio.get_running_loop()
    loop.set_exception_handler(LoopFaults())
    access = AccessSettings().completed()
    gate = open_access(access, own_token=secrets.token_urlsafe(32))  # nothing can be ordered here
    executor = ThreadPoolExecutor(THREADS, "trainermon-serve")
    desk = RunDesk(RunList(opened), executor)
    application = build_application(desk, access=gate, hosts=tuple(args.allowed_host))
    ports = (PORT, 0) if args.port is None else (args.port,)
    try:
        server = WebServer(application, host=args.host, ports=ports, certificate=certificate_of(access))
    except OSError as error:
        raise ConfigError(f"cannot serve on {args.host} port {ports[-1]}: {error}") from error
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    await desk.look()
    count = len(desk.runs.facts)
    runs = "1 run" if count == 1 else f"{count} runs"
    _log.info("%s of %s: %s", runs, ", ".join(map(str, opened)), server.url)
    if args.open:
        webbrowser.open(server.url)
    await stopping.wait()
    await desk.close()
    await server.close()
    executor.shutdown(wait=False, cancel_futures=True)
