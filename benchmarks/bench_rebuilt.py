"""How many recorded calls can be made again from their dump, and give what was recorded.

python -m benchmarks.bench_rebuilt             # torch's operator database in three types, and a step of every model

Random calls count, too: the generator is in the dump. What has no prescribed result (memory never written) does
not count. Equal means every bit, NaN included, on the machine that made the dump.
"""

from __future__ import annotations

import contextlib
import tempfile
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.checks.database import DTYPES
from benchmarks.checks.recorded import database, dumped
from benchmarks.dump_pairs.cases import Variant
from benchmarks.dump_pairs.models import prepare, step
from benchmarks.families.catalogue import COMPARED
from trainermon.accuracy.families import Family
from trainermon.accuracy.judge import family_of_call
from trainermon.core.errors import DumpError
from trainermon.dump.files.reader import load_raw, parse_dump
from trainermon.dump.files.records import FORWARD
from trainermon.replay.drawn_calls import gives_the_same
from trainermon.replay.dumped_calls import rebuild


class CallAgain(NamedTuple):
    """What became of one recorded call: `missing` is why it cannot be made again or differs; "" if it is equal."""

    key: str
    is_built: bool
    missing: str


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    print("| dump | recorded calls | built again | equal |")
    print("|---|---|---|---|")
    lost: list[tuple[str, CallAgain]] = []
    for name, record in _dumps():
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(None):
            found = list(calls_again(dumped(Path(folder), record)))
        lost += [(name, one) for one in found if one.missing]
        equal, built = sum(not one.missing for one in found), sum(one.is_built for one in found)
        print(f"| {name} | {len(found)} | {built / len(found):.1%} | {equal / len(found):.1%} |", flush=True)
    for name, one in lost:
        print(f"* {name}: `{one.key}`: {one.missing}")


def calls_again(directory: Path) -> Iterator[CallAgain]:
    """Yield what becomes of each forward call in a dump of functions with tensors."""
    raw = load_raw(directory)
    for entry in parse_dump(directory, raw).entries:
        if entry.direction != FORWARD:
            continue
        try:
            called = rebuild(directory, raw.data, entry)
        except DumpError as error:
            yield CallAgain(entry.key, is_built=False, missing=str(error)[:120])
            continue
        if family_of_call(called.name, called.call) is Family.UNDEFINED:
            continue
        try:
            is_equal = gives_the_same(called)
        except Exception as error:  # noqa: BLE001  # whatever an operation raises is what is missing
            why = (str(error).splitlines() or [""])[0]
            yield CallAgain(entry.key, is_built=False, missing=f"{type(error).__name__}: {why}"[:120])
        else:
            yield CallAgain(entry.key, is_built=True, missing="" if is_equal else "other bits")


def _dumps() -> Iterator[tuple[str, Callable[[], object]]]:
    for dtype in DTYPES[:3]:
        yield f"operator database, {str(dtype).removeprefix('torch.')}", database(dtype)
    for precision in ("fp32", "bf16"):
        for family in COMPARED:
            variant = Variant(precision=precision)
            yield f"{family}, {precision}", partial(step, family, variant, prepare(family, variant))


if __name__ == "__main__":
    main()
