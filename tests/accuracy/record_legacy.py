"""Write what mindstudio-probe says of the cases of `legacy_cases.py` to recorded/legacy_<version>.json.

Run from the root of the repository as `python -m tests.accuracy.record_legacy`, with the Python of an environment that
has it and torch: once with version 26.2.0, once with 8.3.3.
"""

import json
import math
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from msprobe.pytorch.api_accuracy_checker.compare import algorithm
from msprobe.pytorch.api_accuracy_checker.compare.compare import Comparator

from tests.accuracy.legacy_cases import cases, golden

HERE = Path(__file__).parent
FLOAT8 = (0.0, 0.5, 1.0, -1.0, 3.0, 1e-3, -0.02, 300.0, 2.0**-9, 20000.0)


def plain(value):
    if isinstance(value, float | np.floating):
        number = float(value)
        return number if math.isfinite(number) else str(number)
    if isinstance(value, np.integer):
        return int(value)
    return value if isinstance(value, int | str) else str(value)


def rows(is_v8):
    comparator = Comparator("result.csv", "details.csv", True)
    more = () if is_v8 else (False,)
    for name, operation, exact, given in cases():
        status, [row] = comparator._compare_core_wrapper(operation, golden(exact, given.dtype), given, *more)
        *cells, word, _message = row
        assert word in (status, "SKIP")
        yield name, [*map(plain, cells), word]


def float8_errors():
    numbers = np.array(FLOAT8)
    given = np.roll(numbers, 1)
    return [plain(error) for error in algorithm.get_ulp_err(numbers, given, torch.float8_e4m3fn)]


def main():
    is_v8 = version("mindstudio-probe").startswith("8.")
    document: dict[str, object] = {"version": version("mindstudio-probe")}
    if not is_v8:
        document["float8"] = {"numbers": FLOAT8, "errors": float8_errors()}
    path = HERE / "recorded" / f"legacy_{'8' if is_v8 else '26'}.json"
    lines = [f"{json.dumps(name)}: {json.dumps(row)}" for name, row in rows(is_v8)]
    head = json.dumps(document)[1:-1]
    path.write_text("{" + head + ', "rows": {\n' + ",\n".join(lines) + "\n}}\n", encoding="utf-8")
    sys.stdout.write(f"wrote {path}\n")


if __name__ == "__main__":
    main()
