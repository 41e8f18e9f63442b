"""`trainermon script`: write a folder that reproduces one recorded call with torch alone."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from torch import Tensor

from trainermon.accuracy.calls import OperationCall, call_on
from trainermon.accuracy.judge import Judgement, Status, judge_call, judge_gradient
from trainermon.accuracy.products import GradientSum, VectorProduct, gradients_on
from trainermon.analysis.check.backward import GradientChecker
from trainermon.analysis.script.emit import ReproducedCall, tensors_of, write_folder
from trainermon.analysis.script.shrink import shrink
from trainermon.core.errors import ConfigError, DumpError
from trainermon.dump.files.reader import load_raw, parse_dump
from trainermon.dump.files.records import BACKWARD, DUMP_FILE, FORWARD
from trainermon.replay.dumped_calls import rebuild

# Of msprobe's op_generate; what it asks for beyond this is refused by name.
_THEIR_KEYS = frozenset(
    ["dump_json_path", "api_name", "extract_api_path", "propagation", "data_mode", "random_seed", "iter_times"]
)

_WITHOUT_EFFECT = ("extract_api_path", "random_seed", "iter_times")
_ADVICE = "the recorded tensors are used, and --iters of the script repeats the call"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `trainermon script`."""
    parser.add_argument("dump", type=Path, nargs="?", help="a dump with tensors of one rank and step, or its dump.json")
    parser.add_argument("api", nargs="?", help="key of the call in it, Functional.linear.0 or with .forward, .backward")
    parser.add_argument(
        "--stage", choices=(FORWARD, BACKWARD), help="what is reproduced (default: what the key says, else forward)"
    )
    parser.add_argument("-o", "--output", type=Path, metavar="DIR", help="the folder (default: named after the call)")
    parser.add_argument("--device", default="cpu", help="where the call is tried here (default: %(default)s)")
    parser.add_argument(
        "--shrink", action="store_true", help="make the call smaller while it stays wrong on the device"
    )
    parser.add_argument("--pytest", action="store_true", help="write the script as a test case")
    parser.add_argument("-i", "--config", type=Path, metavar="FILE", help="msprobe's config_op.json instead of both")


def main(args: argparse.Namespace) -> int:
    """Write the folder, print what the call gives, and return 0.

    Raises:
        DumpError: There is no such call, or it cannot be called again.
        ConfigError: The options do not say which call, or there is no such device.
    """
    if args.config is not None:
        args.dump, args.api, args.stage = _of_config(args.config)
    if args.dump is None or args.api is None:
        raise ConfigError("expected a dump and the key of a call, or -i config_op.json")
    directory = args.dump.parent if args.dump.name == DUMP_FILE else args.dump
    is_backward = (args.stage or args.api.rpartition(".")[2]) == BACKWARD
    if is_backward and args.shrink:
        raise ConfigError("--shrink: only a forward call can be made smaller")
    reproduced = _recorded(directory, args.api.removesuffix(f".{FORWARD}").removesuffix(f".{BACKWARD}"))
    if is_backward:
        reproduced = _recorded_backward(directory, reproduced)
    sys.stdout.write("".join(f"{line}\n" for line in _verdicts(reproduced, args.device)))
    if args.shrink:
        reproduced = _shrunk(reproduced, args.device)
    folder = args.output if args.output is not None else Path(reproduced.key.replace("/", "_"))
    script = write_folder(reproduced, folder, as_test=args.pytest)
    sys.stdout.write(f"wrote {script}\n")
    return 0


def _recorded(directory: Path, key: str) -> ReproducedCall:
    raw = load_raw(directory)
    entries = {entry.key: entry for entry in parse_dump(directory, raw).entries if entry.direction == FORWARD}
    entry = entries.get(key) or entries.get(f"{key}.{FORWARD}")
    if entry is None:
        near = difflib.get_close_matches(f"{key}.{FORWARD}", entries, n=1)
        advice = f"did you mean {near[0]}?" if near else "`trainermon check run` lists its calls"
        raise DumpError(f"{directory} has no forward call {key}; {advice}")
    dumped = rebuild(directory, raw.data, entry)
    operator = f"{entry.class_name}.{entry.module}" if dumped.call.is_custom else ""
    return ReproducedCall(
        key=entry.key, name=dumped.name, operator=operator, call=dumped.call, recorded=tensors_of(dumped.result)
    )


def _recorded_backward(directory: Path, forward: ReproducedCall) -> ReproducedCall:
    raw = load_raw(directory)
    stem = forward.key.removesuffix(f".{FORWARD}")
    entries = [entry for entry in parse_dump(directory, raw).entries if entry.direction == FORWARD]
    checker = GradientChecker(directory, raw.data, entries)
    product = checker.product(stem)
    return dataclasses.replace(
        forward,
        key=f"{stem}.{BACKWARD}",
        call=product.backward.call,
        recorded=checker.gradients(stem),
        product=product,
    )


def _verdicts(reproduced: ReproducedCall, device: str) -> Iterator[str]:
    if reproduced.product is None:
        then = judge_call(reproduced.name, reproduced.call, reproduced.recorded)
        again = _judged(reproduced.name, reproduced.call, device)
    else:
        then = _judged_gradients(reproduced.product, reproduced.recorded)
        again = _judged_gradients(reproduced.product, _gradients(reproduced.product, device))
    yield f"recorded: {_said(then) if reproduced.recorded else 'only summed with what other calls give back'}"
    yield f"again on {device}: {_said(again)}"


def _judged_gradients(product: VectorProduct, gradients: Sequence[Tensor]) -> list[Judgement]:
    return [
        judge_gradient(given, GradientSum([(product, number)], given), product.backward.coarsest)
        for given, number in zip(gradients, sorted(product.backward.wanted), strict=False)
    ]


def _gradients(product: VectorProduct, device: str) -> list[Tensor]:
    try:
        return gradients_on(product.backward, device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        why = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"the backward cannot be run on {device}: {why}") from error


def _judged(name: str, call: OperationCall, device: str) -> list[Judgement]:
    """Return the verdicts on what `device` gives for the call now."""
    try:
        return judge_call(name, call, call_on(call, device))
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        why = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"the call cannot be made on {device}: {why}") from error


def _said(judgements: Sequence[Judgement]) -> str:
    return (
        ", ".join(f"{one.status.value}{f' ({one.reason})' if one.reason else ''}" for one in judgements) or "no tensor"
    )


def _shrunk(reproduced: ReproducedCall, device: str) -> ReproducedCall:
    """Return the call made smaller; the results that belong to it are those of `device`."""

    def is_wrong(call: OperationCall) -> bool:
        return any(one.status is Status.ERROR for one in _judged(reproduced.name, call, device))

    if not is_wrong(reproduced.call):
        sys.stdout.write(f"not made smaller: the call is not wrong on {device}, only a wrong one can be\n")
        return reproduced
    call = shrink(reproduced.call, is_wrong)
    before, after = (sum(tensor.numel() for tensor in each.tensors) for each in (reproduced.call, call))
    shapes = ", ".join(str(tuple(tensor.shape)) for tensor in call.tensors)
    sys.stdout.write(f"still wrong with {after:,} of {before:,} numbers: {shapes}\n")
    return dataclasses.replace(reproduced, call=call, recorded=tensors_of(call_on(call, device)))


def _of_config(path: Path) -> tuple[Path, str, str]:
    """Return the dump, the key and the stage that msprobe's config_op.json names."""
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(given, Mapping) or not isinstance(given.get("dump_json_path"), str):
        raise ConfigError(f"{path}: dump_json_path: expected the path of a dump.json")
    unknown = sorted(set(map(str, given)) - _THEIR_KEYS)
    if unknown:
        raise ConfigError(f"{path}: {unknown[0]}: unknown key; known keys: {', '.join(sorted(_THEIR_KEYS))}")
    wanted = {"propagation": (FORWARD, BACKWARD, ""), "data_mode": ("real_data", "")}
    for key, words in wanted.items():
        if given.get(key, "") not in words:
            raise ConfigError(f"{path}: {key}: found {given[key]!r}, expected {' or '.join(map(repr, words[:-1]))}")
    passed_over = [key for key in _WITHOUT_EFFECT if given.get(key)]
    if passed_over:
        sys.stderr.write(f"trainermon script: {path}: passed over: {', '.join(passed_over)}; {_ADVICE}\n")
    if not isinstance(given.get("api_name"), str):
        raise ConfigError(f"{path}: api_name: expected the key of a call, as Functional.linear.0")
    return Path(given["dump_json_path"]), given["api_name"], given.get("propagation") or FORWARD
