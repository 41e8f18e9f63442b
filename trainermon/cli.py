"""The command line. Each subcommand is a module of its own; only the one that is asked for is imported."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import traceback
from collections.abc import Collection, Iterator, Sequence

import trainermon
from trainermon import usage
from trainermon.core.errors import TrainermonError
from trainermon.core.terminal import manners
from trainermon.msprobe import checker_words

COMMANDS = {
    "run": (
        "trainermon.agent.lifecycle.launch",
        "run a training command with an agent, and wait until every record is stored",
    ),
    "query": ("trainermon.exporters.store.query", "query a run's statistics with SQL, during or after the run"),
    "serve": ("trainermon.agent.runs.command", "show the runs of a folder in the browser: list, pages, comparison"),
    "diagnose": ("trainermon.analysis.diagnosis.command", "find the first bad module of a step, and explain it"),
    "replay": ("trainermon.analysis.diagnosis.replay_command", "re-run a step that was saved to disk, in this process"),
    "compare": ("trainermon.analysis.compare.command", "compare two dumps, and report the operation at fault"),
    "graph": ("trainermon.analysis.graph.command", "show the calls of a dump as a tree, and where it goes wrong"),
    "source": ("trainermon.analysis.source.command", "show which lines of code made the calls that go wrong"),
    "check": ("trainermon.analysis.check.command", "judge the operations of a dump, or of a device, against float64"),
    "script": ("trainermon.analysis.script.command", "write a script that reproduces one recorded call"),
    "env": ("trainermon.analysis.environment.command", "collect and compare what trainings run on and with"),
    "restore": ("trainermon.dump.files.restore", "finish dump files left behind by a killed process"),
    "gradients": ("trainermon.analysis.gradients.command", "compare the signs of two runs' gradients"),
    "tensor": ("trainermon.analysis.tensor.command", "inspect dumped tensors: show, diff, top, hist, convert"),
    "checkpoint": ("trainermon.analysis.checkpoint.command", "inspect, verify or compare checkpoints of any format"),
    "rl": ("trainermon.analysis.rl.command", "tell whether a rollout engine is the policy that is trained"),
    "anomalies": ("trainermon.msprobe.anomaly_order", "list the anomalies of all ranks in training order"),
    "alerts": ("trainermon.agent.orders.alerts_command", "list a run's alerts, acknowledge or silence them"),
    "rules": ("trainermon.alerts.rules_command", "list, check or test alert rules"),
    "dashboards": ("trainermon.dashboards.command", "install the dashboards in Grafana, or write them to files"),
    "export": ("trainermon.exporters.export_command", "write a stored run to InfluxDB, csv or TensorBoard"),
    "convert": ("trainermon.msprobe.convert", "convert csv files to TensorBoard event files or a database"),
    "node": (
        "trainermon.agent.lifecycle.service",
        "serve as the agent of every run on this node (containers, systemd, Slurm)",
    ),
    "agent": ("trainermon.agent.daemon", "run the agent of one run on this node (usually started for you)"),
    "controller": ("trainermon.agent.controller.command", "show a job of several nodes, and send orders to its agents"),
    "completion": ("trainermon.completion", "print a script that completes commands and options in a shell"),
}
WITH_A_LOG = frozenset({"run", "node", "agent", "controller", "serve"})
"""Commands that run until they are told to end, and keep a log of their own."""
USUAL_ACTIONS = {"rl": "show"}
"""What a command with actions does with a folder alone."""
FAILED, INTERRUPTED = 1, 130
_DATABASE = ("duckdb", "_duckdb")
_DUCKDB_INTERRUPTED = "Query interrupted"  # what DuckDB makes of Ctrl-C


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status.

    0: done, 1: refused or failed, 2: wrong usage, 130: interrupted. A command may have statuses of its own.
    """
    words = checker_words.translated(sys.argv[1:] if argv is None else argv)
    asked_for = next((word for word in words if word in COMMANDS), None)
    try:
        return _run(words, asked_for)
    except KeyboardInterrupt:
        manners.say_interrupted(asked_for)
        return INTERRUPTED
    except BrokenPipeError:  # `| head`: what is still buffered cannot be written either, and Python would say so
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except TrainermonError as error:
        message = str(error)
    except OSError as error:
        message = f"{error.filename}: {error.strerror}" if error.filename else str(error)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "trainermon":
            raise
        message = f"this needs the package {error.name}, which is not installed in {sys.prefix}"
    except Exception as error:  # of the database, where no command has put it into words; all else is a fault of ours
        if type(error).__module__ not in _DATABASE:
            raise
        said = str(error).partition("\n")[0]
        message = f"what is stored cannot be read ({said}); --verbose says where that was found"
    finally:
        manners.forget()
    print(f"trainermon {asked_for}: {message}", file=sys.stderr)
    return FAILED


def build_parser(commands: Collection[str]) -> argparse.ArgumentParser:
    """Return the parser of the command line, with all the arguments of `commands`, of the others the names alone."""
    parser = argparse.ArgumentParser(
        prog="trainermon",
        description="Watches distributed PyTorch training from the inside.",
        epilog=usage.OVERVIEW,
        formatter_class=usage.HelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"trainermon {trainermon.__version__}")
    manners.add_options(parser, is_command=False)
    subparsers = parser.add_subparsers(dest="subcommand", required=True, metavar="COMMAND")
    for name, (module_name, summary) in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
        if name in commands:
            importlib.import_module(module_name).add_arguments(subparser)
            for leaf in leaves(subparser):
                manners.add_options(leaf)
                leaf.set_defaults(parser=leaf)
            usage.add_examples(subparser)
    return parser


def leaves(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Yield the parsers below `parser` that have no subcommands, or itself."""
    below = usage.subcommands(parser)
    if not below:
        yield parser
    for one in below:
        yield from leaves(one)


def _with_action(words: Sequence[str], asked_for: str | None, actions: Collection[str]) -> list[str]:
    """Return `words` with the usual action of the command in front of a folder that stands where an action would."""
    given = list(words)
    at = given.index(asked_for) + 1 if asked_for in USUAL_ACTIONS else len(given)
    if at < len(given) and given[at] not in actions and os.path.isdir(given[at]):
        given.insert(at, USUAL_ACTIONS[asked_for or ""])
    return given


def _run(words: Sequence[str], asked_for: str | None) -> int:
    parser = build_parser((asked_for,) if asked_for else ())
    if asked_for is None and words and not words[0].startswith("-"):
        usage.refuse_command(parser, words[0], COMMANDS)
    actions = {below.prog.split()[-1] for leaf in usage.subcommands(parser) for below in usage.subcommands(leaf)}
    arguments, unknown = parser.parse_known_args(_with_action(words, asked_for, actions))
    if unknown:  # argparse would show the usage of `trainermon` itself, which has none of the options that were meant
        usage.refuse(vars(arguments).get("parser", parser), unknown)
    manners.take(arguments, shows_log=asked_for not in WITH_A_LOG)
    try:
        status: int = importlib.import_module(COMMANDS[arguments.subcommand][0]).main(arguments)
        sys.stdout.flush()
    except Exception as error:  # whatever it was is told as `--verbose` wants it, and goes on
        if isinstance(error, RuntimeError) and str(error) == _DUCKDB_INTERRUPTED:
            raise KeyboardInterrupt from error
        if arguments.verbose:
            traceback.print_exc()
        raise
    return status
