"""How often `trainermon check` takes a sound result for a wrong one, and which faults it finds.

python -m benchmarks.bench_check                   # the operator database, wrong kernels and models; print
python -m benchmarks.bench_check --write           # and write docs/check_quality.md
python -m benchmarks.bench_check --part kernels    # one part, see --help
"""

from __future__ import annotations

import argparse
import os
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TypeVar

import torch

from benchmarks.checks.database import DTYPES
from benchmarks.checks.gradients import broken_gradients, sound_gradients
from benchmarks.checks.grid import Verdict, compiled_verdicts, faulty_verdicts, healthy_verdicts, wrong_kernel_verdicts
from benchmarks.checks.held_back_kernels import held_back_kernels
from benchmarks.checks.held_back_models import HELD_BACK, sound_steps
from benchmarks.checks.models import CheckedModel, checked_models
from benchmarks.families.catalogue import COMPARED, FAMILIES

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "check_quality.md"
MARK = "<!-- The rest is written by `make bench-check`. -->\n"
SAMPLES = 3
SEEDS = 5
EVERY = 16
_Key = TypeVar("_Key")
_Item = TypeVar("_Item")
PARTS = ("healthy", "faults", "gradients", "kernels", "models", "compiled", "held_back")


def main() -> None:
    arguments = _parse()
    lines = []
    with ProcessPoolExecutor(arguments.jobs, initializer=_prepare) as pool:
        for part in arguments.part or PARTS:
            started_s = time.monotonic()
            lines += [*_REPORTS[part](pool), ""]
            print(f"{part}: {time.monotonic() - started_s:.0f} s", flush=True)
    print("\n".join(lines))
    if arguments.write:
        before, mark, after = PAGE.read_text(encoding="utf-8").partition(MARK)
        sections = _sections(after) | _sections("\n".join(lines))
        PAGE.write_text(before + mark + "\n" + "\n\n".join(sections.values()) + "\n", encoding="utf-8")


def _sections(text: str) -> dict[str, str]:
    """Return the sections of a page by their titles: a part that was not run keeps what it said."""
    found = [f"## {section.strip()}" for section in ("\n" + text).split("\n## ")[1:]]
    return {section.partition("\n")[0]: section for section in found}


def healthy_report(pool: ProcessPoolExecutor) -> Iterator[str]:
    """Yield how many sound results of the operator database are errors and warnings."""
    verdicts = _joined(pool.map(_healthy, DTYPES))
    yield "## Sound results of the operator database"
    yield ""
    yield from _sound_table(verdicts)
    yield ""
    yield "Errors:"
    yield ""
    for one in verdicts:
        if one.status == "error":
            way = f"by {one.what} ({_half(one)})"
            yield f"* `{one.name}` in {one.dtype} {way}: {one.reason}, {one.worst:.3g} × what is allowed"


def _sound_table(verdicts: Sequence[Verdict]) -> Iterator[str]:
    yield "| type | way to compute | half | judged | errors | warnings |"
    yield "|---|---|---|---|---|---|"
    for (dtype, what, half), found in _grouped(verdicts, lambda one: (one.dtype, one.what, _half(one))).items():
        wrong, coarse = (_of(_count(found, status), len(found)) for status in ("error", "warning"))
        yield f"| {dtype} | {what} | {half} | {len(found)} | {wrong} | {coarse} |"


def faults_report(pool: ProcessPoolExecutor) -> Iterator[str]:
    """Yield how many faults in results of the operator database are found."""
    verdicts = _joined(pool.map(_faulty, DTYPES[:3]))
    yield "## Faults in results of the operator database"
    yield ""
    yield "| fault | type | half | results | error | error or warning |"
    yield "|---|---|---|---|---|---|"
    gross = [one for one in verdicts if one.kind == "gross"]
    yield from _found(gross, lambda _: "all of the following")
    yield from _found(gross, lambda one: one.what)
    yield ""
    placed = [one for one in gross if one.is_placed is not None]
    yield f"The worst element is one that the fault changed: {_of(sum(map(_is_placed, placed)), len(placed))}."
    yield ""
    yield "Every element is off by this number of roundoffs of its type, up or down at random, or all by one factor:"
    yield ""
    yield "| roundoffs | type | half | results | error | error or warning |"
    yield "|---|---|---|---|---|---|"
    small = [one for one in verdicts if one.kind != "gross"]
    yield from _found(small, lambda one: f"{one.roundoffs}, {'factor' if one.kind == 'scale' else 'at random'}")


def gradients_report(pool: ProcessPoolExecutor) -> Iterator[str]:
    """Yield how many sound backwards of the operator database are errors and warnings, and which faults are found."""
    verdicts = _joined(pool.map(_gradients, DTYPES))
    yield "## Gradients of the operator database"
    yield ""
    yield from _sound_table(verdicts)
    yield ""
    for one in verdicts:
        if one.status == "error":
            yield f"* `{one.key}` by {one.what} ({_half(one)}): {one.reason}, {one.worst:.3g} × what is allowed"
    yield ""
    yield "| fault | type | half | gradients | error | error or warning |"
    yield "|---|---|---|---|---|---|"
    broken = _joined(pool.map(_broken_gradients, DTYPES[:3]))
    yield from _found(broken, lambda _: "all of the following")
    yield from _found(broken, lambda one: one.what)


def kernels_report(pool: ProcessPoolExecutor) -> Iterator[str]:
    """Yield what is said of kernels that compute something else."""
    verdicts = _joined(pool.map(_kernels, DTYPES[:3]))
    yield f"## Kernels that compute something else, {SEEDS} times each"
    yield ""
    yield "| type | right verdict | noticed |"
    yield "|---|---|---|"
    for dtype, found in _grouped(verdicts, lambda one: one.dtype).items():
        noticed = sum(one.kind == "right" or one.status != "pass" for one in found)
        yield f"| {dtype} | {_of(sum(one.kind == 'right' for one in found), len(found))} | {_of(noticed, len(found))} |"
    yield ""
    wrong = [one for one in verdicts if one.kind != "right"]
    for (what, name, dtype), found in _grouped(wrong, lambda one: (one.what, one.name, one.dtype)).items():
        yield f"* {what} (`{name}`, {dtype}): {found[0].status} {found[0].reason}, {len(found)} of {SEEDS}"


def models_report(pool: ProcessPoolExecutor) -> Iterator[str]:
    """Yield what is said of whole models, sound and with one wrong call."""
    found = [each for models in pool.map(_models, COMPARED) for each in models]
    yield "## Steps of whole models"
    yield ""
    yield f"{len(COMPARED)} models. Allowances of backwards, no others, were mended on their sound steps."
    yield ""
    yield "| precision | sound steps | calls judged | of backwards | skipped | errors | warnings |"
    yield "|---|---|---|---|---|---|---|"
    for precision, sound in _grouped((one for one in found if not one.kind), lambda one: one.precision).items():
        counts = [(one.judged, one.backward, one.skipped, len(one.errors), one.warnings) for one in sound]
        yield f"| {precision} | {len(sound)} | {' | '.join(str(sum(column)) for column in zip(*counts, strict=True))} |"
    yield ""
    yield "| what is wrong | precision | steps | that, and nothing else, is an error | it has an error or a warning |"
    yield "|---|---|---|---|---|"
    faulty = _grouped((one for one in found if one.kind), lambda one: (one.kind, one.precision))
    for (kind, precision), models in faulty.items():
        right = _of(sum(one.is_right for one in models), len(models))
        noticed = _of(sum(one.is_noticed for one in models), len(models))
        yield f"| {kind} | {precision} | {len(models)} | {right} | {noticed} |"
    yield ""
    for one in found:
        if not one.is_right:
            said = ", ".join(one.errors) or "nothing"
            yield f"* {one.family}, {one.variant}: `{one.truth or 'nothing'}` is wrong, errors: {said}"


def compiled_report(pool: ProcessPoolExecutor) -> Iterator[str]:
    """Yield how many results of compiled operations are errors and warnings."""
    verdicts = _joined(pool.map(_compiled, DTYPES[:2]))
    yield f"## Compiled for the CPU: every {EVERY}th operation"
    yield ""
    yield "| type | judged | errors | warnings |"
    yield "|---|---|---|---|"
    for dtype, found in _grouped(verdicts, lambda one: one.dtype).items():
        yield f"| {dtype} | {len(found)} | {_count(found, 'error')} | {_count(found, 'warning')} |"
    yield ""
    for one in verdicts:
        if one.status == "error":
            yield f"* `{one.name}` in {one.dtype}: {one.reason}, {one.worst:.3g} × what is allowed"


def held_back_report(pool: ProcessPoolExecutor) -> Iterator[str]:
    """Yield what is said of sound steps in seven precisions, and of models and wrong kernels nothing was chosen on."""
    own = {family.name for family in HELD_BACK}
    steps = [step for found in pool.map(sound_steps, [*FAMILIES, *own]) for step in found if step.counts]
    yield "## Held back: sound steps of other models, other wrong kernels"
    yield ""
    yield f"Sound steps of the {len(FAMILIES)} models of all benches and of {len(own)} on which no constant was chosen;"
    yield "scaled: loss × 4 096."
    yield ""
    yield "| models | precision | steps | forwards judged | errors | warnings | backwards judged | errors | warnings |"
    yield "|---|---|---|---|---|---|---|---|---|"
    groups = _grouped(steps, lambda one: ("held back" if one.family in own else "all benches", one.precision))
    for (models, precision), found in groups.items():
        counts = sum((one.counts for one in found), Counter[tuple[bool, str]]())
        cells = [str(number) for backward in (False, True) for number in _judged_of(counts, backward=backward)]
        yield f"| {models} | {precision} | {len(found)} | {' | '.join(cells)} |"
    yield ""
    yield from (f"* {one.family}, {one.precision}: {error}" for one in steps for error in one.errors)
    yield ""
    verdicts = _joined(pool.map(_held_back_kernels, DTYPES[:3]))
    yield f"Wrong kernels on which no constant was chosen, {SEEDS} times each:"
    yield ""
    yield "| type | kernels | error | error or warning |"
    yield "|---|---|---|---|"
    for dtype, kernels in _grouped(verdicts, lambda one: one.dtype).items():
        wrong = _count(kernels, "error")
        noticed = wrong + _count(kernels, "warning")
        yield f"| {dtype} | {len(kernels)} | {_of(wrong, len(kernels))} | {_of(noticed, len(kernels))} |"
    yield ""
    missed = [one for one in verdicts if one.status != "error"]
    for (what, dtype, status), kernels in _grouped(missed, lambda one: (one.what, one.dtype, one.status)).items():
        yield f"* {what} ({dtype}): {status} {kernels[0].reason}, {len(kernels)} of {SEEDS}"


def _judged_of(counts: Counter[tuple[bool, str]], *, backward: bool) -> tuple[int, int, int]:
    """Return how many calls of a direction were judged, and how many of them are errors and warnings."""
    errors, warned, right = (counts[backward, status] for status in ("error", "warning", "pass"))
    return errors + warned + right, errors, warned


_REPORTS = {
    "healthy": healthy_report,
    "faults": faults_report,
    "gradients": gradients_report,
    "kernels": kernels_report,
    "models": models_report,
    "compiled": compiled_report,
    "held_back": held_back_report,
}


def _found(verdicts: Sequence[Verdict], title: Callable[[Verdict], str]) -> Iterator[str]:
    for (name, dtype, half), found in _grouped(verdicts, lambda one: (title(one), one.dtype, _half(one))).items():
        wrong = _count(found, "error")
        noticed = _of(wrong + _count(found, "warning"), len(found))
        yield f"| {name} | {dtype} | {half} | {len(found)} | {_of(wrong, len(found))} | {noticed} |"


def _grouped(items: Iterable[_Item], key: Callable[[_Item], _Key]) -> dict[_Key, list[_Item]]:
    groups: dict[_Key, list[_Item]] = defaultdict(list)
    for item in items:
        groups[key(item)].append(item)
    return groups


def _joined(parts: Iterable[list[Verdict]]) -> list[Verdict]:
    return [verdict for part in parts for verdict in part]


def _half(one: Verdict) -> str:
    return "held out" if one.is_held_out else "fitted on"


def _is_placed(one: Verdict) -> bool:
    return bool(one.is_placed)


def _count(verdicts: Sequence[Verdict], status: str) -> int:
    return sum(one.status == status for one in verdicts)


def _of(number: int, total: int) -> str:
    return f"{number} of {total}, {number / total:.1%}" if total else "–"


def _prepare() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"


def _healthy(dtype: torch.dtype) -> list[Verdict]:
    return healthy_verdicts(dtype, SAMPLES)


def _faulty(dtype: torch.dtype) -> list[Verdict]:
    return faulty_verdicts(dtype)


def _gradients(dtype: torch.dtype) -> list[Verdict]:
    return sound_gradients(dtype, SAMPLES)


def _broken_gradients(dtype: torch.dtype) -> list[Verdict]:
    return broken_gradients(dtype)


def _kernels(dtype: torch.dtype) -> list[Verdict]:
    return wrong_kernel_verdicts(dtype, SEEDS)


def _held_back_kernels(dtype: torch.dtype) -> list[Verdict]:
    return wrong_kernel_verdicts(dtype, SEEDS, held_back_kernels)


def _compiled(dtype: torch.dtype) -> list[Verdict]:
    return compiled_verdicts(dtype, EVERY)


def _models(family: str) -> list[CheckedModel]:
    return list(checked_models(family))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", action="append", choices=PARTS, help="only this one; may be repeated")
    parser.add_argument("--jobs", type=int, default=2, help="processes (default: 2)")
    parser.add_argument("--write", action="store_true", help=f"write the result to {PAGE.relative_to(ROOT)}")
    return parser.parse_args()


if __name__ == "__main__":
    main()
