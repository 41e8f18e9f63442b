"""How many published silent training errors the monitor finds by default, without any reference run.

    python -m benchmarks.bench_silent                                   # what is not judged yet; print the totals
    python -m benchmarks.bench_silent --part ddp --half seen --verbose  # some of them, and what was said of each
    python -m benchmarks.bench_silent --case plain-zero-grad-missing    # one, again
    python -m benchmarks.bench_silent --again --write                   # all again, and write docs/silent.md

Each case and its healthy twin are trained under the real monitor, as a newcomer starts it: with the configuration of
`examples/monitor_config.json` and the default rules. Judgements are kept in `--results`.
Mechanisms may be mended on the `seen` half; of the other one only totals are printed, unless `--reveal` is given.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.silent.case import FRAMEWORKS, HALVES, SilentCase, all_cases
from benchmarks.silent.judge import ROOT, SilentVerdict, judge
from benchmarks.silent.page import lines_of, written

RESULTS = ROOT / "build" / "silent"
PAGE = ROOT / "docs" / "silent.md"


def main() -> None:
    arguments = _parse()
    cases = list(_chosen(arguments))
    arguments.results.mkdir(parents=True, exist_ok=True)
    for case in cases:
        path = arguments.results / f"{case.name}.json"
        if arguments.again or arguments.case or not path.exists():
            _judge(case, path, arguments)
    found = [(case, _read(path)) for case in cases if (path := arguments.results / f"{case.name}.json").exists()]
    print("\n".join(lines_of(found, reveals=arguments.reveal)))
    if arguments.write:
        PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), found, reveals=arguments.reveal), encoding="utf-8")


def _judge(case: SilentCase, path: Path, arguments: argparse.Namespace) -> None:
    began_s = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="silent-") as scratch:
        folder = (arguments.keep or Path(scratch)) / case.name
        verdict = judge(case, folder, keep=arguments.keep is not None)
    path.write_text(json.dumps(dataclasses.asdict(verdict), indent=1) + "\n", encoding="utf-8")
    if arguments.reveal or case.half == "seen" or verdict.error:
        print(f"{case.name} ({time.perf_counter() - began_s:.0f} s): {_said(verdict)}", flush=True)
    else:
        print(f"{case.name} ({time.perf_counter() - began_s:.0f} s): judged", flush=True)


def _said(verdict: SilentVerdict) -> str:
    fields = dataclasses.asdict(verdict)
    return ", ".join(f"{name} {value}" for name, value in fields.items() if name != "name" and value not in ("", {}))


def _read(path: Path) -> SilentVerdict:
    return SilentVerdict(**json.loads(path.read_text(encoding="utf-8")))


def _chosen(arguments: argparse.Namespace) -> Iterator[SilentCase]:
    known = all_cases()
    names: Sequence[str] = arguments.case or list(known)
    for name in names:
        case = known[name]
        if arguments.part in (None, case.framework) and arguments.half in (None, case.half):
            yield case


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=list(FRAMEWORKS), help="only this framework")
    parser.add_argument("--half", choices=HALVES, help="only this half")
    parser.add_argument("--case", action="append", help="only this case, judged again; repeatable")
    parser.add_argument("--again", action="store_true", help="judge also what was judged before")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where judgements are kept")
    parser.add_argument("--keep", type=Path, help="keep the runs, in this folder")
    parser.add_argument("--reveal", action="store_true", help="say of each unseen case, too, whether it was found")
    parser.add_argument("--write", action="store_true", help=f"write the result to {PAGE.relative_to(ROOT)}")
    return parser.parse_args()


if __name__ == "__main__":
    main()
