"""`trainermon script`: write a folder that reproduces one recorded call with torch alone."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from torch import Tensor

from trainermon.accuracy.calls import OperationCall, call_on
from trainermon.accuracy.judge import Judgement, Status, judge_call, judge_gradient
from trainermon.accuracy.products import BackwardCall, GradientSum, VectorProduct, gradients_on
from trainermon.analysis.check.backward import GradientChecker
from trainermon.analysis.check.checking import dumps_below
from trainermon.analysis.check.collectives import COLLECTIVE
from trainermon.analysis.check.inputs.options import InputData
from trainermon.analysis.script.collective import recorded_collective
from trainermon.analysis.script.emit import ReproducedCall, tensors_of, write_collective, write_folder
from trainermon.analysis.script.shrink import shrink
from trainermon.core.errors import ConfigError, DumpError
from trainermon.core.terminal.progress import ProgressBar
from trainermon.dump.files.reader import RawDump, load_raw, parse_dump
from trainermon.dump.files.records import BACKWARD, DUMP_FILE, FORWARD, EntryRecord
from trainermon.replay.dumped_calls import rebuild
from trainermon.replay.dumped_modules import UnknownModuleError
from trainermon.replay.inputs.random_calls import rebuild_random
from trainermon.replay.mindspore_calls import is_of_mindspore

# Of msprobe's op_generate; what it asks for beyond this is refused by name.
_THEIR_KEYS = frozenset(
    ["dump_json_path", "api_name", "extract_api_path", "propagation", "data_mode", "random_seed", "iter_times"]
)

# What a dump has of the backward of a module.
_OF_MODULE = re.compile(r"Module\..*\.(backward|parameters_grad)(\.\d+)?")
_MAX_NAMED = 5
_WITHOUT_EFFECT = ("extract_api_path", "iter_times")
_ADVICE = "--iters of the script repeats the call"
_DATA = {"real_data": InputData.REAL, "random_data": InputData.RANDOM}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `trainermon script`."""
    parser.add_argument("dump", type=Path, nargs="?", help="a dump with tensors of one rank and step, or its dump.json")
    parser.add_argument("api", nargs="?", help="key of the call in it, Functional.linear.0 or with .forward, .backward")
    parser.add_argument(
        "--stage", choices=(FORWARD, BACKWARD), help="what is reproduced (default: what the key says, else forward)"
    )
    parser.add_argument("-o", "--output", type=Path, metavar="DIR", help="the folder (default: named after the call)")
    parser.add_argument(
        "--data",
        choices=(InputData.REAL.value, InputData.RANDOM.value),
        default=InputData.REAL.value,
        help="recorded tensors, or random ones with the recorded statistics (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of random inputs (default: %(default)s)")
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
        _take_config(args, args.config)
    if args.dump is None or args.api is None:
        raise ConfigError("expected a dump and the key of a call, or -i config_op.json")
    directory = _only_dump(args.dump)
    if args.api.startswith(COLLECTIVE):
        return _write_collective(args, directory)
    is_backward = (args.stage or args.api.rpartition(".")[2]) == BACKWARD
    if _OF_MODULE.fullmatch(args.api) or (is_backward and args.api.startswith("Module.")):
        raise ConfigError(f"{args.api}: of modules only forwards can be run again; name a function that it calls")
    key = args.api.removesuffix(f".{FORWARD}").removesuffix(f".{BACKWARD}")
    is_random = args.data == InputData.RANDOM.value
    if is_random and args.seed < 0:
        raise ConfigError(f"--seed: found {args.seed}, expected 0 or more")
    reproduced = _recorded(directory, key, args.seed if is_random else None)
    if is_backward and is_random:
        raise ConfigError("--data random: only a forward call can be given random inputs")
    if is_backward:
        reproduced = _recorded_backward(directory, reproduced)
    with ProgressBar("running the call"):
        lines = list(_verdicts(reproduced, args.device))
    if is_random:  # nothing was recorded for these inputs: what the device gives now is expected of others
        lines[0] = f"random inputs of seed {args.seed}"
        reproduced = dataclasses.replace(reproduced, recorded=tensors_of(call_on(reproduced.call, args.device)))
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    if args.shrink:
        reproduced = _shrunk(reproduced, args.device)
    folder = args.output if args.output is not None else Path(reproduced.key.replace("/", "_"))
    script = write_folder(reproduced, folder, as_test=args.pytest)
    sys.stdout.write(f"wrote {script}\n")
    return 0


def _write_collective(args: argparse.Namespace, directory: Path) -> int:
    """Write the script of a collective, and print the verdict on what each rank got.

    Raises:
        ConfigError: It was asked for what only calls of functions have.
    """
    for name, is_given in (("--shrink", args.shrink), ("--data random", args.data == InputData.RANDOM.value)):
        if is_given:
            raise ConfigError(f"{name}: only calls of functions, not {args.api}")
    if args.stage == BACKWARD or args.api.endswith(f".{BACKWARD}"):
        raise ConfigError(f"{args.api}: a collective has no backward that could be run again")
    reproduced = recorded_collective(directory, args.api)
    for place, judgements in enumerate(reproduced.judgements):
        sys.stdout.write(f"recorded, rank {place} of its group: {_said(judgements)}\n")
    folder = args.output if args.output is not None else Path(reproduced.key)
    sys.stdout.write(f"wrote {write_collective(reproduced, folder, as_test=args.pytest)}\n")
    return 0


def _only_dump(path: Path) -> Path:
    """Return the folder of the one dump at or below `path`.

    Raises:
        DumpError: There is none, or more than one.
    """
    found = [path] if (path / DUMP_FILE).is_file() else dumps_below(path)
    if len(found) > 1:
        raise DumpError(f"{path} holds {len(found)} dumps, of steps and ranks: name one of them, {found[0]}")
    return found[0]


def _recorded(directory: Path, key: str, seed: int | None = None) -> ReproducedCall:
    """Return the call as it was recorded; with a seed, with random inputs and no results."""
    raw = load_raw(directory)
    entries = {entry.key: entry for entry in parse_dump(directory, raw).entries if entry.direction == FORWARD}
    entry = entries.get(key) or entries.get(f"{key}.{FORWARD}")
    if entry is None:
        near = difflib.get_close_matches(f"{key}.{FORWARD}", entries, n=1)
        advice = f"did you mean {near[0]}?" if near else "`trainermon check run` lists its calls"
        raise DumpError(f"{directory} has no forward call {key}; {advice}")
    if is_of_mindspore(raw.data[entry.key]):
        raise DumpError(
            f"{entry.key}: a call of MindSpore, and scripts are made of torch's calls; `trainermon check run` judges it"
        )
    given = (directory, raw.data, entry)
    try:
        dumped = rebuild(*given) if seed is None else rebuild_random(*given, seed)
    except UnknownModuleError as error:
        raise DumpError(f"{entry.key}: {error}; {_instead(raw, entry)}") from error
    except DumpError as error:
        raise DumpError(f"{entry.key}: {error}") from error
    operator = f"{entry.class_name}.{entry.module}" if dumped.call.is_custom else ""
    return ReproducedCall(
        key=entry.key,
        name=dumped.name,
        operator=operator,
        call=dumped.call,
        recorded=tensors_of(dumped.result),
        generator=dumped.generator,
    )


def _instead(raw: RawDump, module: EntryRecord) -> str:
    """Return what can be named in place of a module: a function that it calls, if the dump has functions."""
    called = [key for key, parent in raw.construct.items() if parent in (module.key, [module.key])]
    functions = [key for key in called if key in raw.data and not key.startswith("Module.")]
    if functions:
        return f"name a function that it calls: {', '.join(functions[:_MAX_NAMED])}"
    if raw.level == "L0":
        return "name a function that it calls, of a dump of level mix or L1: this one has level L0, modules alone"
    return f"name a function that it calls; in this dump of level {raw.level} it calls none by itself"


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
        again = _judged(reproduced.name, reproduced.call, device)
    else:
        again = _judged_gradients(reproduced.product, _gradients(reproduced.product, device))
    then = _said(_then(reproduced)) if reproduced.recorded else "only summed with what other calls give back"
    yield f"recorded: {then}"
    yield f"again on {device}: {_said(again)}"


def _then(reproduced: ReproducedCall) -> list[Judgement]:
    """Return the verdicts on what was recorded."""
    if reproduced.product is None:
        return judge_call(reproduced.name, reproduced.call, reproduced.recorded)
    return _judged_gradients(reproduced.product, reproduced.recorded)


def _judged_gradients(product: VectorProduct, gradients: Sequence[Tensor]) -> list[Judgement]:
    return [
        judge_gradient(given, GradientSum([(product, number)], given), product.backward.coarsest)
        for given, number in zip(gradients, sorted(product.backward.wanted), strict=False)
    ]


def _gradients(product: VectorProduct, device: str) -> list[Tensor]:
    try:
        return gradients_on(product.backward, device)
    except Exception as error:  # torch raises anything at arguments that a dump says
        why = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"the backward cannot be run on {device}: {why}") from error


def _judged(name: str, call: OperationCall, device: str) -> list[Judgement]:
    """Return the verdicts on what `device` gives for the call now."""
    try:
        result = call_on(call, device)
    except Exception as error:  # torch raises anything at arguments that a dump says
        why = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"the call cannot be made on {device}: {why}") from error
    return judge_call(name, call, result)


def _said(judgements: Sequence[Judgement]) -> str:
    return (
        ", ".join(f"{one.status.value}{f' ({one.reason})' if one.reason else ''}" for one in judgements) or "no tensor"
    )


def _shrunk(reproduced: ReproducedCall, device: str) -> ReproducedCall:
    """Return the call made smaller; the results that belong to it are those of `device`."""

    def changed(call: OperationCall) -> ReproducedCall:
        if reproduced.product is None:
            return dataclasses.replace(reproduced, call=call, recorded=tensors_of(call_on(call, device)))
        backward = _unpacked(reproduced.product.backward, call)
        given = tuple(gradients_on(backward, device))
        return dataclasses.replace(reproduced, call=backward.call, recorded=given, product=VectorProduct(backward))

    def is_wrong(call: OperationCall) -> bool:
        return any(one.status is Status.ERROR for one in _then(changed(call)))

    whole = reproduced.call if reproduced.product is None else _packed(reproduced.product.backward)
    if not is_wrong(whole):
        sys.stdout.write(f"not made smaller: the call is not wrong on {device}, only a wrong one can be\n")
        return reproduced
    call = shrink(whole, is_wrong)
    before, after = (sum(tensor.numel() for tensor in each.tensors) for each in (whole, call))
    shapes = ", ".join(str(tuple(tensor.shape)) for tensor in call.tensors)
    sys.stdout.write(f"still wrong with {after:,} of {before:,} numbers: {shapes}\n")
    return changed(call)


def _packed(backward: BackwardCall) -> OperationCall:
    """Return a call that takes the gradients of the results, too, behind what the forward takes."""
    call = backward.call
    return call._replace(args=[list(call.args), dict(call.kwargs), list(backward.gradients)], kwargs={})


def _unpacked(backward: BackwardCall, packed: OperationCall) -> BackwardCall:
    """Return `backward` with the tensors of a call that `_packed` made."""
    args, kwargs, gradients = packed.args
    return backward._replace(call=backward.call._replace(args=args, kwargs=kwargs), gradients=gradients)


def _take_config(args: argparse.Namespace, path: Path) -> None:
    """Put the dump, the key, the stage and the inputs that msprobe's config_op.json names into `args`."""
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(given, Mapping) or not isinstance(given.get("dump_json_path"), str):
        raise ConfigError(f"{path}: dump_json_path: expected the path of a dump.json")
    unknown = sorted(set(map(str, given)) - _THEIR_KEYS)
    if unknown:
        raise ConfigError(f"{path}: {unknown[0]}: unknown key; known keys: {', '.join(sorted(_THEIR_KEYS))}")
    wanted = {"propagation": (FORWARD, BACKWARD, ""), "data_mode": (*_DATA, "")}
    for key, words in wanted.items():
        if given.get(key, "") not in words:
            raise ConfigError(f"{path}: {key}: found {given[key]!r}, expected {' or '.join(map(repr, words[:-1]))}")
    passed_over = [key for key in _WITHOUT_EFFECT if given.get(key)]
    if passed_over:
        sys.stderr.write(f"trainermon script: {path}: passed over: {', '.join(passed_over)}; {_ADVICE}\n")
    if not isinstance(given.get("api_name"), str):
        raise ConfigError(f"{path}: api_name: expected the key of a call, as Functional.linear.0")
    args.dump, args.api = Path(given["dump_json_path"]), given["api_name"]
    args.stage = given.get("propagation") or FORWARD
    args.data = _DATA.get(given.get("data_mode", ""), InputData.REAL).value
    if type(given.get("random_seed")) is int:
        args.seed = given["random_seed"]
