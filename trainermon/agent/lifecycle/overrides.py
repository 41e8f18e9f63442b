"""What a site may decide instead of the run: the options that `trainermon agent` and `trainermon node` share.

    python -m trainermon.agent.lifecycle.overrides OPTIONS

says whether an agent could be started with them, for the service, which itself imports the standard library only.
"""

from __future__ import annotations

import argparse
import dataclasses
import errno
import os
import socket
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from trainermon.core.errors import ConfigError
from trainermon.usage import port_number

if TYPE_CHECKING:
    from trainermon.agent.settings import AgentSettings


def add_overrides(parser: argparse.ArgumentParser) -> None:
    """Add the options (host, port, rules, access, node name …) by which a site changes an agent's settings.

    Those that are not given change nothing.
    """
    parser.add_argument("--host", help="address that page and /metrics listen on, instead of the run's")
    parser.add_argument(
        "--port",
        type=port_number,
        help="port of page and /metrics; 0: the usual one of the folder of runs, or a free one",
    )
    parser.add_argument(
        "--allow-host",
        action="append",
        dest="allowed_hosts",
        metavar="NAME",
        help="a further name or address under which the page may be asked for; may be given several times",
    )
    parser.add_argument("--rules", help="file of alert rules, instead of the run's")
    parser.add_argument("--node-name", help="name of this node in the run directory (default: the host's name)")
    parser.add_argument("--log-to-stderr", action="store_true", help="write the log to standard error too")


def override_words(args: argparse.Namespace) -> list[str]:
    """Return the options of `add_overrides` that were given, as words for the command line of an agent."""
    single = {"host": args.host, "port": args.port, "rules": args.rules, "node-name": args.node_name}
    words = [f"--{name}={value}" for name, value in single.items() if value is not None]
    words += [f"--allow-host={name}" for name in args.allowed_hosts or ()]
    return words + ["--log-to-stderr"] * args.log_to_stderr


def overridden(settings: AgentSettings, args: argparse.Namespace) -> AgentSettings:
    """Return the run's settings with the options that the site gave in their place.

    Raises:
        ConfigError: A value is impossible.
    """
    address = {name: value for name in ("host", "port") if (value := getattr(args, name)) is not None}
    return dataclasses.replace(
        settings,
        agent=dataclasses.replace(settings.agent, **address),
        allowed_hosts=(*settings.allowed_hosts, *(args.allowed_hosts or ())),
        rules=settings.rules if args.rules is None else args.rules,
    )


def check_overrides(args: argparse.Namespace) -> None:
    """Raise an error for options with which no agent could start; a port in use is accepted.

    Raises:
        ConfigError: A value is impossible, or nobody can listen at the address.
    """
    from trainermon.agent.settings import AgentSettings

    name = args.node_name
    if name is not None and (not name or name in (".", "..") or "/" in name or "\0" in name):
        raise ConfigError(f"--node-name: found {name!r}, expected the name of a folder")
    agent = overridden(AgentSettings(run_id="any", output="/"), args).agent
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            agent.host, agent.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            reason = error.strerror or os.strerror(error.errno or 0)
            raise ConfigError(f"nobody can listen at {agent.host} port {agent.port} here: {reason}") from error


def main(arguments: Sequence[str] | None = None) -> int:
    """Check the options that a site gives its agents; return 0, or 2 after one line on standard error."""
    parser = argparse.ArgumentParser(prog="python -m trainermon.agent.lifecycle.overrides")
    add_overrides(parser)
    try:
        check_overrides(parser.parse_args(arguments))
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
