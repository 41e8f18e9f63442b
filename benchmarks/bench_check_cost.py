"""What `trainermon check run` costs beside mindstudio-probe's checker, and what both say of torch's operator database.

    python -m benchmarks.bench_check_cost                    # every part; one after the other, an hour of one core
    python -m benchmarks.bench_check_cost --part small --calls 200 --pairs 3
    python -m benchmarks.bench_check_cost --write            # and write the tables of docs/check_quality.md

Both read the same dump, the whole command each time, one thread, in turn. CPU time counts, so that other load does not.
mindstudio-probe has an environment of its own (`make bench-check-cost` makes it), and its checker runs on the CPU.
"""

from __future__ import annotations

import argparse
import csv
import re
import statistics
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import torch

from benchmarks.bench_compare import measure
from benchmarks.checks.recorded import block, database, dumped, product, small_calls

ROOT = Path(__file__).parents[1]
OTHER = ROOT / ".venv-bench" / "bin" / "python"
PAGE = ROOT / "docs" / "check_quality.md"
MARK = "<!-- Up to the next mark it is written by `make bench-check-cost`. -->\n"
END = "<!-- The rest is written by `make bench-check`. -->\n"
_NOTHING = "–"


def main() -> None:
    arguments = _parse()
    torch.set_num_threads(1)
    lines = []
    for part in arguments.part or _PARTS:
        found = list(_PARTS[part](arguments))
        print("\n".join(found), flush=True)
        lines += [*found, ""]
    if arguments.write:
        before, _, rest = PAGE.read_text(encoding="utf-8").partition(MARK)
        PAGE.write_text(before + MARK + "\n" + "\n".join(lines) + "\n" + END + rest.partition(END)[2], encoding="utf-8")


def commands(dump: Path, output: Path, arguments: argparse.Namespace) -> Mapping[str, list[object]]:
    """Return the command of either tool that checks `dump`; the other's only where it is installed."""
    ours = [sys.executable, "-m", "trainermon", "check", "run", dump, "-o", output / "ours"]
    script = Path(__file__).parent / "checks" / "msprobe_on_cpu.py"
    theirs = [arguments.other_python, script, dump / "dump.json", output / "theirs"]
    return {"ours": ours, "theirs": theirs} if arguments.other_python.exists() else {"ours": ours}


def cost_report(
    title: str, step: Callable[[], object], arguments: argparse.Namespace, *, is_alone: bool = False
) -> Iterator[str]:
    """Yield a row of the table of costs: CPU seconds and memory of both, and how many times as much theirs is.

    `is_alone` leaves the other out, where its device, this CPU in the recorded type, would take hours.
    """
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        dump = dumped(Path(folder) / "dump", step)
        for pair in range(arguments.pairs):
            for tool, command in commands(dump, Path(folder) / f"out{pair}", arguments).items():
                if is_alone and tool == "theirs":
                    continue
                found[tool].append(measure(command))
    cells = []
    for tool in ("ours", "theirs"):
        runs = found[tool]
        seconds, peak = statistics.median([one for one, _ in runs] or [0]), max([one for _, one in runs] or [0])
        cells += [f"{seconds:.1f} s", f"{peak:,.0f} MB"] if runs else [_NOTHING] * 2
    ratios = sorted(theirs / ours for (ours, _), (theirs, _) in zip(found["ours"], found["theirs"], strict=False))
    ratio = f"{statistics.median(ratios):.1f} [{ratios[0]:.1f}–{ratios[-1]:.1f}]" if ratios else _NOTHING
    yield f"| {title} | {' | '.join(cells)} | {ratio} |"


def small_report(arguments: argparse.Namespace) -> Iterator[str]:
    """Yield the head of the table of costs, and the row of many small calls."""
    yield "| dump | ours | memory | msprobe | memory | msprobe ÷ ours |"
    yield "|---|---|---|---|---|---|"
    title = f"{arguments.calls:,} small calls with their backwards, float32"
    yield from cost_report(title, partial(small_calls, arguments.calls), arguments)


def product_report(arguments: argparse.Namespace, *, backward: bool) -> Iterator[str]:
    """Yield the row of a large product, with its gradients or without."""
    title = f"product of 8192³{' and its gradients' if backward else ''}, bfloat16"
    yield from cost_report(title, product(backward=backward), arguments, is_alone=True)


def database_report(arguments: argparse.Namespace) -> Iterator[str]:
    """Yield the row of the operator database."""
    share = "" if arguments.every == 1 else f", one operation in {arguments.every}"
    yield from cost_report(f"operator database, float32{share}", database(torch.float32, arguments.every), arguments)


def operations_report(arguments: argparse.Namespace) -> Iterator[str]:
    """Yield what both tools say of torch's own results for the operator database, by operation."""
    for dtype in (torch.float32, torch.bfloat16):
        with tempfile.TemporaryDirectory() as folder:
            dump = dumped(Path(folder) / "dump", database(dtype, arguments.every))
            said = {}
            for tool, command in commands(dump, Path(folder), arguments).items():
                measure(command)
                said[tool] = _verdicts(Path(folder) / tool)
        yield from _beside(str(dtype).removeprefix("torch."), said)


def _verdicts(folder: Path) -> dict[str, str]:
    """Return the verdict on each call that the result file in `folder` has."""
    [path] = folder.rglob("accuracy_checking_result_*.csv")
    with path.open(encoding="utf-8-sig", newline="") as file:
        return {row[0]: row[1].strip() for row in list(csv.reader(file))[1:]}


def _beside(dtype: str, said: Mapping[str, Mapping[str, str]]) -> Iterator[str]:
    """Yield how many errors and warnings both have, and of which operations; each call of the database is sound."""
    tools = {"trainermon": said["ours"], "msprobe": said.get("theirs", {})}
    yield f"### {dtype}"
    yield ""
    yield "| | judged | errors | warnings |"
    yield "|---|---|---|---|"
    for tool, found in tools.items():
        counts = Counter(found.values())
        judged = counts["pass"] + counts["warning"] + counts["error"]
        yield f"| {tool} | {judged} | {_of(counts['error'], judged)} | {_of(counts['warning'], judged)} |"
    yield ""
    yield "| operation | calls | our errors | our warnings | msprobe's errors | msprobe's warnings |"
    yield "|---|---|---|---|---|---|"
    by_name = defaultdict(list)
    for key in sorted(set().union(*tools.values())):
        by_name[re.sub(r"\.\d+$", "", key)].append(key)
    for name, keys in by_name.items():
        counted = [Counter(found.get(key, "") for key in keys) for found in tools.values()]
        cells = [counts[word] for counts in counted for word in ("error", "warning")]
        if any(cells):
            yield f"| `{name}` | {len(keys)} | {' | '.join(map(str, cells))} |"
    yield ""


def _of(number: int, total: int) -> str:
    return f"{number} of {total}, {number / total:.1%}" if total else _NOTHING


_PARTS: dict[str, Callable[[argparse.Namespace], Iterator[str]]] = {
    "small": small_report,
    "block": partial(cost_report, "transformer block, bfloat16, hidden size 1024, 2048 tokens", block),
    "product": partial(product_report, backward=False),
    "product-backward": partial(product_report, backward=True),
    "database": database_report,
    "operations": operations_report,
}


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", action="append", choices=_PARTS, help="only this one; may be repeated")
    parser.add_argument("--calls", type=int, default=1000, help="of the part small (default: %(default)s)")
    parser.add_argument("--every", type=int, default=1, help="of the database one operation in this many")
    parser.add_argument("--pairs", type=int, default=1, help="runs of both tools in turn (default: %(default)s)")
    parser.add_argument("--other-python", type=Path, default=OTHER, help="of an environment with mindstudio-probe")
    parser.add_argument("--write", action="store_true", help=f"write the tables into {PAGE.relative_to(ROOT)}")
    return parser.parse_args()


if __name__ == "__main__":
    main()
