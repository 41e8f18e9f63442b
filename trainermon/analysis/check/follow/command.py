"""`trainermon check follow`: the command line, and from its start to its end."""

from __future__ import annotations

import argparse
import contextlib
import functools
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import FrameType

from trainermon.accuracy.rules import ChosenRules
from trainermon.analysis.check.devices import chosen_devices
from trainermon.analysis.check.dumps import CallChoice, CheckOptions
from trainermon.analysis.check.follow.alerts import AgentAlerts
from trainermon.analysis.check.follow.book import StepVerdict
from trainermon.analysis.check.follow.follower import FollowOptions, StepFollower
from trainermon.analysis.check.follow.network import (
    add_network_options,
    opened_listener,
    pushed_calls,
    read_network_file,
)
from trainermon.analysis.check.follow.steps import StepFolder
from trainermon.analysis.check.inputs.options import CallInputs, InputData
from trainermon.analysis.check.worker_options import add_judging_options, chosen_workers
from trainermon.core.errors import ConfigError, DumpError
from trainermon.core.terminal.statuses import add_exit_code, exit_status

OUTPUT_FOLDER = "checked"
_LONGEST_S = 86_400.0


class StopRequest(KeyboardInterrupt):
    """SIGTERM: the follower is to end."""


def add_follow(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `trainermon check follow`."""
    parser = actions.add_parser("follow", help="judge the steps that a training dumps, as they come")
    parser.add_argument("folders", type=Path, nargs="*", metavar="FOLDER", help="dump_path of a PrecisionDebugger")
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="DIR",
        help=f"write tables here, with several folders below their names (default: {OUTPUT_FOLDER} in the folder)",
    )
    parser.add_argument("--once", action="store_true", help="judge what is there, and end; the training has ended")
    parser.add_argument(
        "--keep", type=int, default=20, metavar="N", help="keep the first N wrong steps (default: %(default)s)"
    )
    parser.add_argument(
        "--tables", choices=("all", "failed"), default="all", help="which steps get tables (default: %(default)s)"
    )
    parser.add_argument("--ranks", type=int, metavar="N", help="ranks that dump (default: as the dumps say)")
    parser.add_argument(
        "--settle",
        type=float,
        default=30.0,
        metavar="S",
        help="wait S seconds for ranks that are missing (default: %(default)g)",
    )
    parser.add_argument(
        "--interval", type=float, default=2.0, metavar="S", help="look every S seconds (default: %(default)g)"
    )
    for name, what in (("--only", "only calls whose keys match"), ("--skip", "leave out calls whose keys match")):
        parser.add_argument(name, action="append", default=[], metavar="PATTERN", help=what)
    add_judging_options(parser)
    parser.add_argument(
        "--run", type=Path, dest="run_directory", metavar="DIR", help="raise alerts through the agents of this run"
    )
    parser.add_argument("--agent-ca", type=Path, metavar="FILE", help="they speak HTTPS, with this authority")
    add_network_options(parser)
    parser.add_argument("--strict", action="store_true", help="a warning counts as wrong")
    add_exit_code(parser, "a step was wrong", "none was, and one was not judged")
    parser.set_defaults(run=_follow)


def _follow(args: argparse.Namespace) -> int:
    read_network_file(args)
    if args.listen is not None:
        return _listen(args)
    _require_possible(args)
    with ExitStack() as stack:
        followers = list(_followers(args, stack))
        alerts = AgentAlerts(args.run_directory, authority=args.agent_ca) if args.run_directory else None
        stack.enter_context(_terminable())
        status = 0
        try:
            status = _turns(args, followers, alerts)
        except KeyboardInterrupt:
            _say("stopped; the same command goes on")
        verdicts = Counter(one.verdict for each in followers for one in each.book.results)
        num_wrong, num_unjudged = verdicts[StepVerdict.FAILED], verdicts[StepVerdict.UNJUDGED]
        unjudged = f"; {num_unjudged} not judged" if num_unjudged else "" if verdicts else "; there was none to judge"
        sys.stdout.write(f"{num_wrong} of {verdicts.total()} steps are wrong{unjudged}\n")
        return status or exit_status(args, found=bool(num_wrong), whole=bool(verdicts) and not num_unjudged)


def _listen(args: argparse.Namespace) -> int:
    listener = opened_listener(args, _say)
    with contextlib.closing(listener), _terminable():
        _say(f"listening on {listener.address}")
        try:
            listener.serve()
        except KeyboardInterrupt:
            counts = ", ".join(f"{number} {name}" for name, number in sorted(listener.counts.items()))
            _say(f"stopped; calls: {counts or 'none'}")
    return 0


def _turns(args: argparse.Namespace, followers: Sequence[StepFollower], alerts: AgentAlerts | None) -> int:
    """Judge what there is, once or until stopped; return the exit status."""
    said = ""
    while True:
        num_judged, trouble = 0, ""
        try:
            for follower in followers:
                num_judged += follower.turn()
                trouble = (alerts and alerts.tell(follower.book)) or trouble
        except DumpError as error:
            if args.once:
                raise
            trouble = str(error)  # a disk that is full, for example: it may have room later
        if trouble != said:
            said = trouble
            _say(trouble or "it works again")
        if args.once:
            left = sum(follower.num_left for follower in followers)
            if left:
                _say(f"{left} steps are left where they are: not finished, or not judged")
            return 1 if left else 0
        if not num_judged:
            time.sleep(args.interval)


def _followers(args: argparse.Namespace, stack: ExitStack) -> Iterator[StepFollower]:
    devices = chosen_devices(args.device, args.device_ids)
    check = CheckOptions(
        choice=CallChoice(tuple(args.only), tuple(args.skip)),
        rules=ChosenRules(),
        max_elements=args.max_elements,
        workers=chosen_workers(args, len(devices)),
        devices=devices,
        inputs=CallInputs(InputData.REAL),
    )
    elsewhere = pushed_calls(args, _say)
    if elsewhere is not None:
        stack.callback(elsewhere.close)
    for path in args.folders:
        prefix = f"{path}: " if len(args.folders) > 1 else ""
        options = FollowOptions(
            check=check,
            max_kept=args.keep,
            with_tables=args.tables == "all",
            is_strict=args.strict,
            elsewhere=elsewhere,
            say=functools.partial(_say, prefix=prefix),
        )
        folder = StepFolder(path, num_ranks=args.ranks, settle_s=args.settle, is_final=args.once)
        follower = StepFollower(folder, _output_of(args, path), options)
        stack.callback(follower.close)
        yield follower


def _output_of(args: argparse.Namespace, folder: Path) -> Path:
    if args.output is None:
        return folder / OUTPUT_FOLDER
    output: Path = args.output
    return output / folder.name if len(args.folders) > 1 else output


def _require_possible(args: argparse.Namespace) -> None:
    if not args.folders:
        raise ConfigError("expected the folder of the dumps: `trainermon check follow FOLDER`")
    names = [folder.name for folder in args.folders]
    if args.output is not None and len(set(names)) < len(names):
        raise ConfigError(f"-o: found folders of the same name ({', '.join(names)}), expected different ones")
    for name, least, most in (("keep", 0, 1e6), ("settle", 0, _LONGEST_S), ("interval", 0.01, _LONGEST_S)):
        if not least <= getattr(args, name) <= most:
            raise ConfigError(f"--{name}: found {getattr(args, name):g}, expected {least:g} to {most:g}")
    if args.ranks is not None and args.ranks < 1:
        raise ConfigError(f"--ranks: found {args.ranks}, expected 1 or more")
    for folder in args.folders:
        if folder.is_symlink() or (folder.exists() and not folder.is_dir()) or (args.once and not folder.exists()):
            raise ConfigError(f"{folder} is no folder: expected the dump_path of a PrecisionDebugger")


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """Return a context in which SIGTERM ends the follower as Ctrl-C does."""

    def stop(_number: int, _frame: FrameType | None) -> None:
        raise StopRequest

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _say(text: str, *, prefix: str = "") -> None:
    sys.stderr.write(f"trainermon check: {prefix}{text}\n")
    sys.stderr.flush()
