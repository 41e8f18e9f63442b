"""Write what mindstudio-probe makes of two devices' results to recorded/msprobe_<version>/.

`target.csv` and `golden.csv` are its files of details of the calls in `against_cases.py`, `result.csv` and
`details.csv` what its `api_precision_compare` says of them; `ours_…` is the same with our files of details. Run from
the root of the repository as `python -m tests.analysis.check.record_against`, with an environment that has it and
torch: once with version 26.2.0, once with 8.3.3.
"""

import sys
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

from msprobe.pytorch.api_accuracy_checker.compare.api_precision_compare import CompareConfig, api_precision_compare
from msprobe.pytorch.api_accuracy_checker.compare.compare import Comparator

from tests.accuracy.legacy_cases import golden
from tests.analysis.check.against_cases import CALLS, GOLDEN, TARGET, results, write_ours
from trainermon.accuracy.rules import Rules


def write_theirs(folder, side, name):
    scratch = folder / "scratch.csv"
    comparator = Comparator(str(scratch), str(folder / name), False)
    for case in CALLS:
        if case[side]:
            call, _, direction = case[0].rpartition(".")
            pairs = results(case, side)
            expected = tuple(golden(exact, given.dtype) for exact, given in pairs)
            given = tuple(given for _, given in pairs)
            if direction == "forward":
                comparator.compare_output(call, info(bench_output=expected, device_output=given))
            else:
                comparator.compare_output(call, info(bench_grad=expected, device_grad=given))
    scratch.unlink()


def info(*, bench_output=(), device_output=(), bench_grad=None, device_grad=None):
    return SimpleNamespace(
        bench_output=bench_output,
        device_output=device_output,
        bench_grad=bench_grad,
        device_grad=device_grad,
        backward_message="",
        is_fp8=False,
        rank=0,
    )


def main():
    is_v8 = version("mindstudio-probe").startswith("8.")
    folder = Path(__file__).parent / "recorded" / f"msprobe_{'8' if is_v8 else '26'}"
    folder.mkdir(exist_ok=True)
    for path in folder.glob("*.csv"):
        path.unlink()
    write_theirs(folder, TARGET, "target.csv")
    write_theirs(folder, GOLDEN, "golden.csv")
    write_ours(folder, Rules.MSPROBE8 if is_v8 else Rules.MSPROBE)
    for prefix in ("", "ours_"):
        names = ("target", "golden", "result", "details")
        api_precision_compare(CompareConfig(*(str(folder / f"{prefix}{name}.csv") for name in names)))
    sys.stdout.write(f"wrote {folder}\n")


if __name__ == "__main__":
    main()
