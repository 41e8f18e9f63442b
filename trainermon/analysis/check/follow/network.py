"""Options of `check follow` for two hosts, and msprobe's names for them in a config.json."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from trainermon.analysis.check.checker_config import read_network_config
from trainermon.analysis.check.devices import RECORDED, require_device
from trainermon.analysis.check.follow.link import parsed_address, read_token, require_protected, tls_context
from trainermon.analysis.check.follow.listener import CallListener, ListenOptions
from trainermon.analysis.check.follow.push import PushedCalls
from trainermon.core.errors import ConfigError

_MIB = 1 << 20


def add_network_options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("--push", metavar="URL", help="have calls run on another host, too: tls://HOST:PORT")
    parser.add_argument(
        "--listen", metavar="HOST:PORT", help="be that host: run calls on --device, and return the results"
    )
    parser.add_argument("--token-file", type=Path, metavar="FILE", help="a secret that both sides have")
    parser.add_argument(
        "--tls", type=Path, metavar="DIR", help="ca.pem, cert.pem and key.pem of this side; both verify each other"
    )
    parser.add_argument(
        "--call-mb",
        type=int,
        default=256,
        metavar="N",
        help="largest call that is sent or taken (default: %(default)s)",
    )
    parser.add_argument(
        "--queue", type=int, default=4, metavar="N", help="calls that may wait with --listen (default: %(default)s)"
    )
    parser.add_argument(
        "-config", "--config", type=Path, metavar="FILE", help="msprobe's config.json, whose run_ut says is_online"
    )
    parser.set_defaults(rank_list=())


def read_network_file(args: argparse.Namespace) -> None:
    """Take what msprobe's configuration says for what the command line does not.

    Raises:
        ConfigError: It cannot be read, or says too little.
    """
    if args.config is None:
        return
    found = read_network_config(args.config)
    args.rank_list = tuple(found.get("rank_list", ()))
    if "nfs_path" in found:  # the calls come as files, and need no connection
        args.folders = args.folders or [Path(found["nfs_path"])]
    elif "port" not in found:
        raise ConfigError(f"{args.config}: run_ut: expected port, or nfs_path")
    else:
        args.listen = args.listen or f"{found.get('host', '127.0.0.1')}:{found['port']}"
        args.tls = args.tls or (Path(found["tls_path"]) if "tls_path" in found else None)


def pushed_calls(args: argparse.Namespace, say: Callable[[str], None]) -> PushedCalls | None:
    """Return the connection to the other host; None if none is asked for. It is opened with the first call.

    Raises:
        ConfigError: An option is wrong or missing.
    """
    if args.push is None:
        return None
    address = parsed_address("--push", args.push)
    require_protected("--push", address, args.tls, is_asked=args.push.startswith("tls:"))
    context = tls_context(args.tls, is_server=False) if args.tls is not None else None
    token = read_token(args.token_file)
    return PushedCalls(address, token, context, max_bytes=_max_bytes(args), say=say)


def opened_listener(args: argparse.Namespace, say: Callable[[str], None]) -> CallListener:
    """Return the listener, which listens already.

    Raises:
        ConfigError: An option is wrong or missing, or the address cannot be listened on.
    """
    if args.folders or args.push is not None:
        raise ConfigError("--listen: found FOLDER or --push, expected neither: the calls come from followers elsewhere")
    if not 1 <= args.queue <= 1024:
        raise ConfigError(f"--queue: found {args.queue}, expected 1 to 1024")
    address = parsed_address("--listen", args.listen)
    require_protected("--listen", address, args.tls)
    device = "cpu" if args.device == RECORDED else args.device
    require_device(device)
    options = ListenOptions(
        device=device,
        token=read_token(args.token_file),
        context=tls_context(args.tls, is_server=True) if args.tls is not None else None,
        max_bytes=_max_bytes(args),
        max_waiting=args.queue,
        ranks=args.rank_list,
        say=say,
    )
    return CallListener(address, options)


def _max_bytes(args: argparse.Namespace) -> int:
    if not 1 <= args.call_mb <= 1 << 20:
        raise ConfigError(f"--call-mb: found {args.call_mb}, expected 1 to {1 << 20}")
    return int(args.call_mb) * _MIB
