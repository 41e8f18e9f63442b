"""`trainermon controller`: from the command line to a controller that runs until SIGTERM."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainermon.core.errors import ConfigError
from trainermon.usage import port_number

if TYPE_CHECKING:
    from trainermon.agent.controller.settings import ControllerSettings

SUMMARY = "find the agents of a job, show it as a whole, and bring escalations to all of them"
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"

_log = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `trainermon controller`."""
    parser.add_argument("--config", type=Path, metavar="FILE", help="settings, YAML or JSON; options override them")
    parser.add_argument("--agents", nargs="+", metavar="HOST:PORT", help="agents by address")
    parser.add_argument("--dns", nargs="+", metavar="NAME:PORT", help="every address of the name is an agent")
    parser.add_argument("--run-directory", metavar="DIR", help="agents have written their addresses in it")
    parser.add_argument("--kubernetes", metavar="SELECTOR", help="agents are in the pods with these labels")
    parser.add_argument("--state", dest="state_dir", metavar="DIR", help="folder of the journal of escalations")
    parser.add_argument("--host", help="address to listen on (default 127.0.0.1)")
    parser.add_argument("--port", type=port_number, help="port to listen on (default 9462)")
    parser.add_argument(
        "--plain-http", action="store_true", default=None, help="speak plain HTTP to agents on other machines too"
    )
    parser.add_argument("--token-file", metavar="FILE", help="file with the token of orders, shared with the agents")


def main(args: argparse.Namespace) -> int:
    """Run the controller until SIGTERM or SIGINT; return 0.

    Raises:
        ConfigError: The settings are wrong, a port or folder cannot be used, or the extra is not installed.
    """
    try:
        import aiohttp as _  # noqa: F401 - asked for here, where its absence can be explained
    except ModuleNotFoundError:
        raise ConfigError("the controller needs aiohttp: pip install aiohttp") from None
    from trainermon.agent.controller.settings import load_settings
    from trainermon.agent.lifecycle.open_files import raise_file_limit

    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT, stream=sys.stderr)
    raise_file_limit()
    words = _words(args)
    if args.config is None and "discovery" not in words:
        raise ConfigError(
            "found nothing that says where agents are: give --agents, --dns, --run-directory or --kubernetes"
        )
    asyncio.run(serve(load_settings(args.config, words)))
    return 0


async def serve(settings: ControllerSettings) -> None:
    """Run the controller with its page, metrics and webhook until SIGTERM or SIGINT.

    Raises:
        ConfigError: A port, a folder or a certificate cannot be used.
    """
    from trainermon.agent.controller.controller import Controller
    from trainermon.agent.controller.http import build_application
    from trainermon.agent.controller.journal import EscalationJournal
    from trainermon.agent.lifecycle.open_files import LoopFaults
    from trainermon.agent.web.access import TOKEN_VARIABLE, open_access, read_secret
    from trainermon.agent.web.server import WebServer, certificate_of

    asyncio.get_running_loop().set_exception_handler(LoopFaults())
    access = settings.access.completed()
    gate = open_access(access)
    token = read_secret(settings.agents.token_file) or read_secret(access.token_file, os.environ.get(TOKEN_VARIABLE))
    journal = EscalationJournal(Path(settings.state_dir), now_s=time.time())
    controller = Controller(settings, journal, token=token or "")
    application = build_application(controller, access=gate, hosts=settings.allowed_hosts)
    try:
        server = WebServer(application, host=settings.host, ports=(settings.port,), certificate=certificate_of(access))
    except OSError as error:
        raise ConfigError(f"cannot serve on {settings.host} port {settings.port}: {error}") from error
    _log.info("page %s", server.url)
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    work = asyncio.ensure_future(controller.run())
    await asyncio.wait((work, asyncio.ensure_future(stopping.wait())), return_when=asyncio.FIRST_COMPLETED)
    await server.close()  # first: nothing is accepted any more that would not be begun
    work.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await work
    await loop.shutdown_default_executor()  # what is being written is written before its file is closed
    journal.close()


def _words(args: argparse.Namespace) -> dict[str, Any]:
    """Return what the command line says, nested as in the file."""
    discovery: dict[str, Any] = {
        "agents": args.agents,
        "dns": args.dns,
        "run_directory": args.run_directory,
        "kubernetes": {"label_selector": args.kubernetes} if args.kubernetes else None,
    }
    words: dict[str, Any] = {
        "discovery": {name: value for name, value in discovery.items() if value is not None},
        "agents": {"plain_http": True} if args.plain_http else None,
        "access": {"token_file": args.token_file} if args.token_file else None,
        "state_dir": args.state_dir,
        "host": args.host,
        "port": args.port,
    }
    return {name: value for name, value in words.items() if value not in (None, {})}
