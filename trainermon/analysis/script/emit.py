"""Writes the folder that reproduces a call: the script, what it takes, and what it should give."""

from __future__ import annotations

import dataclasses
import json
import math
import platform
import re
from collections.abc import Mapping
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
from trainermon.accuracy.products import GradientSum, VectorProduct
from trainermon.accuracy.reference import Reference, unit_roundoff
from trainermon.analysis.script.collective import ReproducedCollective, collective_files, collective_text
from trainermon.analysis.script.literals import call_text, function_text
from trainermon.core.errors import DumpError
from trainermon.core.private_files import replace_file, replacing

INPUTS_FILE, EXPECTED_FILE, ENVIRONMENT_FILE = "inputs.pt", "expected.pt", "environment.json"
GENERATOR_FILE = "generator.pt"
_MAX_GAPS = 16
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
        recorded: The tensors that it gave; of a backward the gradients, () if the dump has them only in sums.
        generator: The state of the CPU's generator that it drew from; None: it draws nothing, or it is not known.
        product: Of a backward, what it gives in float64; None: it is a forward.
    """

    key: str
    name: str
    operator: str
    call: OperationCall
    recorded: tuple[Tensor, ...]
    product: VectorProduct | None = None
    generator: Tensor | None = None


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
    if reproduced.product is not None:
        results = _backward_results(reproduced.product, tensors)
    else:
        results = _FORWARD.replace("$draws", "" if reproduced.generator is None else _DRAWS)
    text = Template(TEMPLATE.read_text(encoding="utf-8")).substitute(
        title=stem, call=call, file=script.name, results=results
    )
    saved = {INPUTS_FILE: [_compact(tensor) for tensor in tensors], EXPECTED_FILE: _expected(reproduced)}
    if reproduced.generator is not None:
        saved[GENERATOR_FILE] = reproduced.generator
    return _write_files(script, text + (_TEST if as_test else _MAIN), saved)


def write_collective(reproduced: ReproducedCollective, folder: Path, *, as_test: bool = False) -> Path:
    """Write the script of a collective and its files as `write_folder` does; return the script's path.

    Raises:
        DumpError: It cannot be written as text, or the folder cannot be written.
    """
    stem = _NO_NAME.sub("_", reproduced.key)
    script = folder / (f"test_{stem.replace('.', '_')}.py" if as_test else f"{stem}.py")
    inputs, expected = collective_files(reproduced)
    text = collective_text(reproduced, script.name, stem) + (_TEST if as_test else _MAIN)
    return _write_files(script, text, {INPUTS_FILE: inputs, EXPECTED_FILE: expected})


def _write_files(script: Path, text: str, saved: Mapping[str, Any]) -> Path:
    folder = script.parent
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name, value in saved.items():
            _save(value, folder / name)
        _write(json.dumps(_environment(), indent=1) + "\n", folder / ENVIRONMENT_FILE)
        _write(text, script)
    except OSError as error:
        raise DumpError(f"cannot write into {folder}: {error}") from error
    return script


_DRAWS = """
    if device == "cpu":  # another device would draw other numbers
        torch.set_rng_state(torch.load(HERE / "generator.pt", weights_only=True))"""
_FORWARD = '''def results(tensors, device):
    """Return the tensors that a call with copies of the inputs gives, on the CPU."""$draws
    with torch.no_grad():
        output = call([copied(tensor, device) for tensor in tensors], torch.device(device))
    return [leaf.detach().cpu() for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]'''
_BACKWARD = '''WANTED = $wanted  # which tensors have a gradient
GRADED = $graded  # which results have one; these are the last tensors


def results(tensors, device):
    """Return the gradients that the backward of a call with copies of the inputs gives, on the CPU."""
    tensors = [copied(tensor, device) for tensor in tensors]
    taken, gradients = tensors[: -len(GRADED)], tensors[-len(GRADED) :]
    wanted = [taken[number].requires_grad_() for number in WANTED]
    with torch.enable_grad():
        output = call([tensor.clone() for tensor in taken], torch.device(device))
    made = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    found = torch.autograd.grad([made[number] for number in GRADED], wanted, gradients, allow_unused=True)
    return [torch.zeros_like(tensor).cpu() if one is None else one.cpu() for tensor, one in zip(wanted, found)]'''


def _backward_results(product: VectorProduct, tensors: list[Tensor]) -> str:
    """Return the source of what a script of a backward gives; the gradients of the results join `tensors`."""
    gradients = product.backward.gradients
    graded = [number for number, gradient in enumerate(gradients) if gradient is not None]
    tensors += [gradient for gradient in gradients if gradient is not None]
    return Template(_BACKWARD).substitute(wanted=sorted(product.backward.wanted), graded=graded)


_MAIN = '\n\nif __name__ == "__main__":\n    raise SystemExit(main())\n'
_TEST = "\n\ndef test_the_result_is_right():\n    assert main([]) == 0\n" + _MAIN


def _expected(reproduced: ReproducedCall) -> dict[str, Any]:
    """Return what the call gave, what it should give in float64, and how far off each element may be."""
    recorded = [plain(tensor).clone() for tensor in reproduced.recorded]
    found: dict[str, Any] = {"recorded": recorded, "exact": [], "allowed": [], "norms": []}
    if reproduced.product is not None:
        return found | _expected_gradients(reproduced.product)
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


def _expected_gradients(product: VectorProduct) -> dict[str, list[Any]]:
    wanted = sorted(product.backward.wanted)
    tensors = product.backward.call.tensors
    sums = [GradientSum([(product, number)], tensors[number]) for number in wanted]
    unit = max(product.backward.coarsest, unit_roundoff(torch.float32))
    return {
        "exact": [one.results[0] for one in sums],
        "allowed": [one.allowed(0, tensors[number].dtype, unit) for one, number in zip(sums, wanted, strict=True)],
        "norms": [math.inf] * len(sums),
    }


def _environment() -> dict[str, Any]:
    return {
        "trainermon": trainermon.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cuda": torch.version.cuda,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "cpu",
    }


def _compact(tensor: Tensor) -> Tensor:
    """Return a copy with the same strides; where elements share memory, or it has many gaps, in order."""
    tensor = plain(tensor)
    extent = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    if not tensor.numel() or 0 in tensor.stride() or extent > _MAX_GAPS * tensor.numel():
        return tensor.clone()
    return torch.zeros(extent, dtype=tensor.dtype).as_strided(tensor.shape, tensor.stride()).copy_(tensor)


def tensors_of(output: Any) -> tuple[Tensor, ...]:
    """Return the tensors in what a call returned, in order."""
    return tuple(leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor))


def _save(value: Any, path: Path) -> None:
    with replacing(path) as file:
        torch.save(value, file)


def _write(text: str, path: Path) -> None:
    replace_file(path, text.encode())
