"""Options of `trainermon check run` about what calls are given: `--data`, `--seed`, `--samples`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from trainermon.core.errors import ConfigError
from trainermon.core.values import TextEnum
from trainermon.dump.files.reader import load_raw
from trainermon.dump.files.records import EntryRecord


class InputData(TextEnum):
    """What calls are given: `--data`."""

    AUTO = "auto"
    REAL = "real"
    RANDOM = "random"


class CallInputs(NamedTuple):
    """What calls are given that are run on a device.

    Attributes:
        data: Recorded tensors, random ones, or the latter where there are none of the former.
        seed: Of random ones.
        samples: How many of them a call is tried with, one after the other; the worst verdict counts.
    """

    data: InputData = InputData.AUTO
    seed: int = 0
    samples: int = 1

    def are_random(self, entry: EntryRecord) -> bool:
        """Return whether a call gets random numbers."""
        if self.data is not InputData.AUTO:
            return self.data is InputData.RANDOM
        return any(one.count and one.data_path is None for one in (*entry.inputs, *entry.outputs))


DEFAULT_INPUTS = CallInputs()


def add_input_options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument(
        "--data",
        choices=[data.value for data in InputData],
        default=InputData.AUTO.value,
        help="what calls are given on the device: recorded tensors, random ones with the recorded statistics, "
        "or these where there are no tensors (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of random inputs (default: %(default)s)")
    parser.add_argument(
        "--samples", type=int, default=1, metavar="N", help="seeds that each call is tried with; the worst counts"
    )


def chosen_inputs(args: argparse.Namespace, devices: Sequence[str], dumps: Sequence[Path]) -> CallInputs:
    """Return what calls are given.

    Raises:
        ConfigError: A number is too small, or there are no results: random inputs need a device that makes some.
        DumpError: A dump cannot be read.
    """
    for name, least in (("seed", 0), ("samples", 1)):
        if getattr(args, name) < least:
            raise ConfigError(f"--{name}: found {getattr(args, name)}, expected {least} or more")
    found = CallInputs(InputData(args.data), args.seed, args.samples)
    if devices or found.data is InputData.REAL:
        return found
    if found.data is InputData.RANDOM:
        raise ConfigError(f"--data random: {_NEEDS_DEVICE}")
    if dumps and all(_has_no_tensors(path) for path in dumps):
        raise ConfigError(f"{dumps[0]} has statistics and no tensors: {_NEEDS_DEVICE}; or dump with task tensor")
    return found


_NEEDS_DEVICE = "what was recorded belongs to other inputs than random ones: name a --device that runs the calls"


def _has_no_tensors(directory: Path) -> bool:
    return load_raw(directory).task == "statistics"
