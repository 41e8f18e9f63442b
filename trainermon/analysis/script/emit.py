"""Writes the folder that reproduces a call: the script, what it takes, and what it should give."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import platform
import re
from pathlib import Path
from string import Template
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import trainermon
from trainermon.accuracy.calls import OperationCall, plain
from trainermon.accuracy.families import Family
from trainermon.accuracy.judge import coarsest_roundoff, family_of_call
from trainermon.accuracy.reference import Reference, unit_roundoff
from trainermon.analysis.script.literals import call_text, function_text
from trainermon.core.errors import DumpError
from trainermon.core.private_files import open_private

INPUTS_FILE, EXPECTED_FILE, ENVIRONMENT_FILE = "inputs.pt", "expected.pt", "environment.json"
TEMPLATE = Path(__file__).with_name("reproduce.py.txt")
# Of these no element is prescribed.
_NOT_JUDGED = (Family.RANDOM, Family.UNDEFINED, Family.GAUGE)
_NO_NAME = re.compile(r"[^A-Za-z0-9_.]")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReproducedCall:
    """A call to be written as a script.

    Attributes:
        key: Its key in the dump.
        name: The operation's name, `linear` or `linalg.svd`.
        operator: Namespace and name if it is a custom operator, `mylib.scale`; else "".
        call: The function and its arguments.
        recorded: The tensors that it gave.
    """

    key: str
    name: str
    operator: str
    call: OperationCall
    recorded: tuple[Tensor, ...]


def write_folder(reproduced: ReproducedCall, folder: Path, *, as_test: bool = False) -> Path:
    """Write the script, `inputs.pt`, `expected.pt` and `environment.json` into `folder`; return the script's path.

    `as_test` names it and gives it a function such that pytest runs it. Folder and files are the user's own (0700,
    0600). Nothing of the dump's text is written into the script but checked names.

    Raises:
        DumpError: An argument or the function cannot be written as text, or the folder cannot be written.
    """
    tensors: list[Tensor] = []
    name = function_text(reproduced.call.function, reproduced.operator)
    call = call_text(name, reproduced.call.args, reproduced.call.kwargs, tensors)
    stem = _NO_NAME.sub("_", reproduced.key)
    script = folder / (f"test_{stem.replace('.', '_')}.py" if as_test else f"{stem}.py")
    text = Template(TEMPLATE.read_text(encoding="utf-8")).substitute(title=stem, call=call, file=script.name)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _save([plain(tensor).clone() for tensor in tensors], folder / INPUTS_FILE)
        _save(_expected(reproduced), folder / EXPECTED_FILE)
        _write(json.dumps(_environment(), indent=1) + "\n", folder / ENVIRONMENT_FILE)
        _write(text + (_TEST if as_test else _MAIN), script)
    except OSError as error:
        raise DumpError(f"cannot write into {folder}: {error}") from error
    return script


_MAIN = '\n\nif __name__ == "__main__":\n    raise SystemExit(main())\n'
_TEST = "\n\ndef test_the_result_is_right():\n    assert main([]) == 0\n" + _MAIN


def _expected(reproduced: ReproducedCall) -> dict[str, Any]:
    """Return what the call gave, what it should give in float64, and how far off each element may be."""
    recorded = [plain(tensor).clone() for tensor in reproduced.recorded]
    found: dict[str, Any] = {"recorded": recorded, "exact": [], "allowed": [], "norms": []}
    family = family_of_call(reproduced.name, reproduced.call)
    if family in _NOT_JUDGED:
        return found
    try:
        reference = Reference(reproduced.call, family, reproduced.name)
    except Exception:  # noqa: BLE001  # whatever a foreign kernel raises: there is none in float64 to compare with
        return found
    unit = coarsest_roundoff([*reproduced.call.tensors, *recorded])
    for number, (exact, given) in enumerate(zip(reference.results, recorded, strict=False)):
        found["exact"].append(exact)
        is_exact = family is Family.EXACT or not (given.is_floating_point() or given.is_complex())
        allowed = torch.zeros(exact.shape) if is_exact else reference.allowed(number, given.dtype, unit)
        found["allowed"].append(allowed.expand(exact.shape).contiguous())
        found["norms"].append(reference.allowed_norm(number, unit) if unit > unit_roundoff(torch.float32) else math.inf)
    return found


def _environment() -> dict[str, Any]:
    return {
        "trainermon": trainermon.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cuda": torch.version.cuda,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "cpu",
    }


def tensors_of(output: Any) -> tuple[Tensor, ...]:
    """Return the tensors in what a call returned, in order."""
    return tuple(leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor))


def _save(value: Any, path: Path) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        torch.save(value, file)


def _write(text: str, path: Path) -> None:
    with open(path, "w", encoding="utf-8", opener=open_private) as file:
        file.write(text)
