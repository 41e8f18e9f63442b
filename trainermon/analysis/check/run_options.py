"""Options of `trainermon check run` that msprobe's checker has too, and its configuration file."""

from __future__ import annotations

import argparse
from pathlib import Path

from trainermon.accuracy.rules import ChosenRules, Rules
from trainermon.analysis.check.checker_config import CheckerConfig, read_checker_config
from trainermon.analysis.check.checking import CallsCheck
from trainermon.analysis.check.saved_errors import save_errors
from trainermon.core.terminal.manners import note


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument(
        "--rules",
        choices=[rules.value for rules in Rules],
        default=Rules.TRAINERMON.value,
        help="whose rules give the verdict (default: ours)",
    )
    parser.add_argument(
        "-config",
        "--config",
        "--config_path",
        type=Path,
        metavar="FILE",
        help="msprobe's config.json (acc_check or run_ut) or config.yaml: white_list, black_list, precision and others",
    )
    parser.add_argument(
        "--unique",
        "--filter_api",
        action="store_true",
        help="of calls with the same kinds of arguments, the first",
    )
    parser.add_argument("--save", type=Path, metavar="DIR", help="save inputs and results of wrong calls here")
    parser.add_argument(
        "-save_error_data",
        "--save_error_data",
        action="store_true",
        help="the same, into error_data_path of the configuration (msprobe)",
    )


def checker_config_of(args: argparse.Namespace) -> CheckerConfig:
    """Return the configuration that is named, or msprobe's defaults.

    Raises:
        ConfigError: It is wrong.
    """
    return read_checker_config(args.config) if args.config is not None else CheckerConfig()


def chosen_rules(args: argparse.Namespace, config: CheckerConfig) -> ChosenRules | None:
    """Return the rules, or None where neither they nor msprobe's measures are asked for: these cost time."""
    rules = Rules(args.rules)
    if rules is Rules.TRAINERMON and args.output is None and not args.json and args.config is None:
        return None
    return ChosenRules(rules, config.quantization_api_list)


def save_wrong(check: CallsCheck, args: argparse.Namespace, config: CheckerConfig, place: Path) -> None:
    """Save the wrong calls of one dump where that is asked for, in `place` below the folder, and say how many files.

    Raises:
        DumpError: The folder cannot be written.
    """
    if args.save is None and not args.save_error_data:
        return
    folder = (args.save or config.error_data_path) / place
    paths = save_errors(check, folder)
    if paths:
        note(f"trainermon check: saved {len(paths)} tensors of wrong calls in {folder}")
