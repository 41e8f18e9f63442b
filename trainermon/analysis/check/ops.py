"""Is this device sound? Torch's own operator database, run on it and judged against float64 on the CPU."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from trainermon.accuracy.calls import OperationCall, call_on
from trainermon.accuracy.judge import Judgement, Status, judge_call
from trainermon.accuracy.rules import ChosenRules
from trainermon.analysis.check.checking import CallsCheck, CheckedCall
from trainermon.analysis.check.devices import require_device
from trainermon.core.errors import ConfigError
from trainermon.core.terminal.progress import Report, no_report

DEFAULT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_DATABASE = "torch.testing._internal.common_methods_invocations"
_PEER = 3.0
"""A result so many times as far off as the CPU's own kernel in the same type is torch's, not the device's fault."""
_HALF_BITS = 16
_AS_CPU = "about as far off as on the CPU"


class _Sample(NamedTuple):
    """A call of an operation of the database, on the device."""

    name: str
    call: OperationCall


class _Judge(NamedTuple):
    """Judges calls on a device.

    Attributes:
        device: Where they are made.
        rules: Whose rules give the verdict, with msprobe's measures; None: ours, without.
    """

    device: str
    rules: ChosenRules | None

    def checked(self, key: str, sample: _Sample) -> CheckedCall:
        """Return the verdict on a call."""
        try:
            result = call_on(sample.call, self.device)
        except Exception as error:  # noqa: BLE001  # whatever a kernel raises: the database says it can be called so
            why = (str(error).splitlines() or [""])[0][:160]
            failed = Judgement(status=Status.ERROR, reason=f"raises {type(error).__name__}: {why}")
            return CheckedCall(key=key, judgements=(failed,))
        review = self.rules.of_call(f"Torch.{sample.name}.0.forward", sample.call.tensors) if self.rules else None
        found = judge_call(sample.name, sample.call, result, review=review)
        if torch.device(self.device).type != "cpu" and any(one.status is Status.ERROR for one in found):
            found = _beside_cpu(sample, found)
        return CheckedCall(key=key, judgements=tuple(found))


def _beside_cpu(sample: _Sample, found: list[Judgement]) -> list[Judgement]:
    """Return the verdicts with errors lowered to warnings where the CPU's own kernel is about as far off."""
    try:
        peers = judge_call(sample.name, sample.call, call_on(sample.call, "cpu"))
    except Exception:  # noqa: BLE001  # the CPU has no kernel for the type: there is no peer
        return found
    return [_excused(one, peer) for one, peer in zip(found, peers, strict=False)]


def check_device(  # noqa: PLR0913  (what is tried, and how it is judged)
    device: str,
    *,
    dtypes: Sequence[torch.dtype] = DEFAULT_DTYPES,
    samples: int | None = 1,
    wanted: Callable[[str], bool] = lambda _: True,
    rules: ChosenRules | None = None,
    report: Report = no_report,
) -> CallsCheck:
    """Return the verdicts on what `device` (`cpu`, `cuda:0`) gives for the operations of torch's operator database.

    `samples` calls of each operation in each of `dtypes`; None: one of each operation of one argument, with every
    number of a type of 16 bits. `wanted` chooses by key, `nn.functional.gelu.bfloat16.0`. An operation that raises is
    an error. A result that is off no more than three times as far as that of the CPU in the same type is a warning at
    most. With `rules`, judgements have msprobe's measures. `report` is told after each operation.

    Cost: about 4 s of one core for each type on a CPU; with every number about 12 s for each of 16 bits.

    Raises:
        ConfigError: There is no such device, or this build of torch has no database.
    """
    require_device(device)
    database = [
        (op, dtype)
        for dtype in dtypes
        for op in _database()
        if dtype in op.supported_dtypes(torch.device(device).type) and not op.name.startswith("jiterator")
    ]
    calls = []
    for number, (op, dtype) in enumerate(database, 1):
        keys = [f"{_title(op, dtype)}.{end}" for end in (["all"] if samples is None else range(samples))]
        if any(map(wanted, keys)):
            with warnings.catch_warnings():  # of functions that are deprecated: they are in the database all the same
                warnings.simplefilter("ignore")
                calls += _of_operation(op, dtype, _Judge(device, rules), [key for key in keys if wanted(key)], samples)
        report(number, len(database), "operations")
    return CallsCheck(source=device, calls=tuple(calls))


def _of_operation(
    op: Any, dtype: torch.dtype, judge: _Judge, keys: Sequence[str], samples: int | None
) -> list[CheckedCall]:
    """Return the verdicts on the calls of one operation that have these keys."""
    try:
        device = judge.device
        made = _every_number(op, dtype, device) if samples is None else _samples(op, dtype, device, samples)
        chosen = [(f"{_title(op, dtype)}.{'all' if samples is None else n}", one) for n, one in enumerate(made)]
    except Exception as error:  # noqa: BLE001  # whatever the database raises where a library of it is not here
        return [CheckedCall(key=keys[0], skipped=f"it has no sample here: {type(error).__name__}")]
    return [judge.checked(key, sample) for key, sample in chosen if key in keys]


def _database() -> list[Any]:
    """Return the entries of the operator database, whose import freezes torch's switches: that is undone."""
    try:
        with torch.backends.__allow_nonbracketed_mutation():
            return list(importlib.import_module(_DATABASE).op_db)
    except ImportError as error:
        missing = f"the package {error.name}: pip install {error.name}" if error.name else str(error)
        raise ConfigError(f"torch {torch.__version__} cannot load its operator database: it needs {missing}") from error


def _samples(op: Any, dtype: torch.dtype, device: str, most: int) -> Iterator[_Sample]:
    torch.manual_seed(0)
    # `op.sample_inputs` looks through the whole stack, with its sources, for every sample
    for sample in itertools.islice(op.sample_inputs_func(op, device, dtype, requires_grad=False), most):
        kwargs = {name: torch.device(value) if name == "device" else value for name, value in sample.kwargs.items()}
        call = OperationCall(op.op, [sample.input, *sample.args], kwargs)
        yield _Sample(op.name, call)


def _every_number(op: Any, dtype: torch.dtype, device: str) -> Iterator[_Sample]:
    """Yield the call of an operation of one argument with all 65 536 numbers; nothing of other operations or types."""
    database = importlib.import_module(_DATABASE)
    if op.name == "polygamma":  # takes many minutes for the largest numbers
        return
    if isinstance(op, database.UnaryUfuncInfo) and dtype.is_floating_point and dtype.itemsize * 8 == _HALF_BITS:
        numbers = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(dtype).to(device)
        kwargs = op.sample_kwargs(device, dtype, numbers)[0]
        yield _Sample(op.name, OperationCall(op.op, [numbers], kwargs))


def _title(op: Any, dtype: torch.dtype) -> str:
    variant = f".{op.variant_test_name}" if op.variant_test_name else ""
    return f"{op.name}{variant}.{str(dtype).removeprefix('torch.')}"


def _excused(one: Judgement, peer: Judgement) -> Judgement:
    is_excused = one.status is Status.ERROR is peer.status and one.worst <= _PEER * peer.worst
    return dataclasses.replace(one, status=Status.WARNING, reason=_AS_CPU) if is_excused else one
