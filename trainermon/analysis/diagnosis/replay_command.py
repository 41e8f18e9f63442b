"""`trainermon replay`: run a kept step again, with the model built anew, and tell what it shows."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainermon.analysis.diagnosis.diagnose import diagnose
from trainermon.analysis.diagnosis.report import render_text
from trainermon.core.errors import DumpError
from trainermon.core.terminal.manners import has_colour
from trainermon.core.terminal.progress import ProgressBar
from trainermon.core.topology import OUTPUT_ROOT
from trainermon.core.values import DumpTask, as_plain
from trainermon.dump.files.reader import load_raw, read_dump
from trainermon.dump.files.records import DumpInfo
from trainermon.dump.files.verdicts import Reproducibility
from trainermon.exporters.store.query import find_run

if TYPE_CHECKING:
    from torch import nn

SUMMARY = "run a kept step again"
KEPT_FILE = "kept_step.pt"
_PLACE = re.compile(r"dumps/([^/]+)/attempt(\d+)/step(\d+)/rank(\d+)$")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `trainermon replay`."""
    parser.add_argument(
        "run",
        nargs="?",
        help=f"run directory, or run id under $TRAINERMON_OUTPUT or ./{OUTPUT_ROOT} (default: the newest)",
    )
    parser.add_argument("--step", type=int, help="the step to replay (default: the first that was kept)")
    parser.add_argument("--rank", type=int, help="the rank whose step it was (default: the lowest that kept it)")
    parser.add_argument(
        "--model",
        required=True,
        metavar="MODULE:FUNCTION",
        help="what builds the model, without arguments, as the training script does; or FILE.py:FUNCTION",
    )
    parser.add_argument("--device", help="where to run it, as torch names it (default: where the step ran, else cpu)")
    parser.add_argument(
        "--task",
        choices=[task.value for task in DumpTask],
        default=DumpTask.TENSOR.value,
        help="what is dumped (default: tensor)",
    )
    parser.add_argument("--out", type=Path, help="folder of the new dump (default: below reports/ of the run)")
    parser.add_argument(
        "--json", action="store_true", help="print the report as JSON, see analysis/diagnosis/README.md"
    )


def main(args: argparse.Namespace) -> int:
    """Replay the step, print what its dump tells, and return 0, or 1 if it could not be replayed.

    Raises:
        QueryError: There is no such run.
        DumpError: No such step was kept, or the model cannot be built, or is another one.
    """
    run_dir = find_run(args.run)
    place = find_kept(run_dir, step=args.step, rank=args.rank)
    info = read_dump(place).info
    out = args.out or run_dir / "reports" / f"replay-step{info.step}-rank{info.rank}"
    with ProgressBar(f"running step {info.step} again"):
        result = _replay(place / KEPT_FILE, run_dir, info, args, out)
    if result.dump is None or result.status in ("refused", "failed"):
        sys.stderr.write(f"trainermon replay: {result.status}: {result.reason}\n")
        return 1
    with ProgressBar("reading its dump"):
        diagnosis = diagnose(out, step=info.step)
    if args.json:
        sys.stdout.write(json.dumps(as_plain(diagnosis), indent=1) + "\n")
        return 0
    again = read_dump(result.dump).info
    if result.status == "clean" and again.reproducibility is not Reproducibility.REPRODUCIBLE:
        sys.stdout.write(_finite_now(args.model, info))
    else:
        sys.stdout.write(render_text(diagnosis, colour=has_colour()))
        if diagnosis.reproducibility is None:
            sys.stdout.write(f"again      {again.reproducibility}: {again.reproducibility_reason}\n")
    sys.stdout.write("".join(f"note       {note}\n" for note in again.notes))
    sys.stdout.write(f"dumped to  {result.dump}\n")
    return 0


def find_kept(run_dir: Path, *, step: int | None = None, rank: int | None = None) -> Path:
    """Return the folder of the kept step that is meant: of the newest attempt, the first step, the lowest rank.

    Raises:
        DumpError: There is none; the text says which there are, or why the step was not kept.
    """
    places = {path.parent: _numbers(path.parent) for path in run_dir.glob(f"dumps/*/attempt*/step*/rank*/{KEPT_FILE}")}
    kept = {path: found for path, found in places.items() if found is not None}
    meant = {path: found for path, found in kept.items() if step in (None, found[1]) and rank in (None, found[2])}
    if meant:
        return min(meant, key=lambda path: (-meant[path][0], *meant[path][1:]))
    asked = "".join(f" {name} {number}" for name, number in (("step", step), ("rank", rank)) if number is not None)
    if kept:
        there = ", ".join(sorted({f"step {found[1]} of rank {found[2]}" for found in kept.values()}))
        raise DumpError(f"{run_dir} has not kept{asked}: there is {there}")
    raise DumpError(
        f"{run_dir} has no kept step{asked}: expected dumps/…/{KEPT_FILE}, which a replay of a bad step writes"
        f" within replay.keep_mb{_why_not(run_dir)}"
    )


def find_builder(name: str) -> Callable[[], nn.Module]:
    """Return what builds the model: `module:function`, looked up from the current folder first, or `file.py:function`.

    The folder stays in the module search path: what is built may import more from there.

    Raises:
        DumpError: There is no such file, module or function, or it takes arguments.
    """
    module_name, colon, function_name = name.partition(":")
    if not colon or not module_name or not function_name:
        raise DumpError(f"--model is {name!r}, expected MODULE:FUNCTION, such as train:build_model")
    folder = Path.cwd()
    if module_name.endswith(".py"):
        file = folder / module_name
        if not file.is_file():
            raise DumpError(f"--model {name}: there is no file {file}")
        folder, module_name = file.parent, file.stem
    sys.path.insert(0, str(folder))
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise DumpError(f"--model {name}: {module_name} cannot be imported from {folder} ({error})") from error
    function: Callable[[], nn.Module] | None = getattr(module, function_name, None)
    if function is None:
        raise DumpError(
            f"--model {name}: {module.__file__} has no function {function_name}; expected is one of yours that takes no"
            " arguments and returns the model, as training does before it is wrapped"
        )
    _refuse_arguments(name, function)
    return function


def _refuse_arguments(name: str, function: Any) -> None:
    """Raise a DumpError if `function` cannot be called without arguments."""
    if not callable(function):
        raise DumpError(f"--model {name} is of type {type(function).__name__}, expected a function")
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # one of C tells nothing of itself
        return
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [one.name for one in parameters if one.default is one.empty and one.kind not in optional]
    if needed:
        raise DumpError(
            f"--model {name} needs {', '.join(needed)}: expected is a function that takes no arguments and returns the"
            " model; write one that passes what training does"
        )


@contextlib.contextmanager
def _arguments_of(run_dir: Path, rank: int | None, name: str) -> Iterator[None]:
    """Have the script's own arguments in `sys.argv`, as the run kept them, none if it did not; ours are not its.

    Raises:
        DumpError: The script ended, as argparse does that is not given what it needs.
    """
    arguments = kept_arguments(run_dir, rank or 0)
    before, sys.argv = sys.argv, [name.partition(":")[0], *(arguments or [])]
    try:
        yield
    except SystemExit as error:
        given = f"the arguments of the run, {' '.join(arguments)}" if arguments else "no arguments"
        kept = "" if arguments is not None else ", as the run kept none (`environment: false`, or an older version)"
        raise DumpError(
            f"--model {name}: the script ended with status {error.code} when it was imported with {given}{kept}:"
            " put what trains below `if __name__ == '__main__'`"
        ) from error
    finally:
        sys.argv = before


def kept_arguments(run_dir: Path, rank: int) -> list[str] | None:
    """Return the arguments that a rank's script had, without secrets; None if the run kept none."""
    try:
        about = json.loads((run_dir / "ranks" / f"rank{rank:05d}.json").read_bytes())
        found = (about.get("environment") or {}).get("arguments")
    except (OSError, ValueError, AttributeError):
        return None
    return list(map(str, found)) if isinstance(found, list) else None


def _replay(path: Path, run_dir: Path, info: DumpInfo, args: argparse.Namespace, out: Path) -> Any:
    with _arguments_of(run_dir, info.rank, args.model):
        model = find_builder(args.model)()
    from torch import nn  # not before what may be wrong with the option is told

    from trainermon.replay.kept_step import load_step
    from trainermon.replay.replay import StepExamination, StepKeeper

    if not isinstance(model, nn.Module):
        raise DumpError(f"--model {args.model} returned a {type(model).__name__}, expected a torch.nn.Module")
    step = load_step(path, model, args.device)
    keeper = StepKeeper(model, examination=StepExamination())
    keeper.take_over(step)
    fresh = DumpInfo(
        id="replayed", step=info.step, attempt=info.attempt, rank=info.rank, reason=info.reason, notes=step.notes
    )
    place = f"dumps/replayed/attempt{info.attempt or 0}/step{info.step or 0}/rank{info.rank or 0}"
    return keeper.replay(out / place, fresh, task=args.task)


def _finite_now(model: str, info: DumpInfo) -> str:
    """Return what it means that a step is finite which was not in training: only the user knows what has changed."""
    return (
        f"With {model} step {info.step} of rank {info.rank} is finite; in training it was not\n"
        "meaning    if you have changed the code, the fault is mended; if not, it is not in what the model computes:\n"
        "           hardware, a race, or state outside of the model\n"
    )


def _numbers(path: Path) -> tuple[int, int, int] | None:
    match = _PLACE.search(path.as_posix())
    return None if match is None else (int(match[2]), int(match[3]), int(match[4]))


def _why_not(run_dir: Path) -> str:
    """Return what the replays of a run say of why they kept no step."""
    for path in sorted(run_dir.glob("dumps/*/attempt*/step*/rank*")):
        try:
            said = load_raw(path).info.get("kept")
        except DumpError:
            continue
        if said:
            return f"; {path.name} in {path.parent.name}: {said}"
    return ""
