"""Recorded calls once more on a device: is a wrong result the kernel's doing, or did it come and go?"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from trainermon.accuracy.calls import OperationCall, call_on, plain
from trainermon.accuracy.judge import Judgement, Status
from trainermon.core.errors import ConfigError
from trainermon.replay.dumped_calls import DumpedCall

RECORDED = "recorded"
TRANSIENT, KERNEL, NONDETERMINISTIC, DEVICE = "transient", "kernel", "nondeterministic", "device"
"""What the cause of a wrong result begins with."""


class CallRerun(NamedTuple):
    """A call that was run again on a device.

    Attributes:
        judgements: One for each tensor that it returned there; () if it could not be run.
        cause: Why a result is wrong, in a word and a sentence; "" if none is.
    """

    judgements: tuple[Judgement, ...]
    cause: str


def chosen_devices(text: str, ids: Sequence[str] | None = None) -> tuple[str, ...]:
    """Return the devices in `text` (`cuda:0,cuda:1`) or of msprobe's `ids` (`0 1`); () for what is recorded only.

    Raises:
        ConfigError: A device is not there, or is named twice.
    """
    numbers = text.split(",")
    if not ids and all(number.strip().isdecimal() for number in numbers):
        ids = [number.strip() for number in numbers]
        if not _accelerator():
            raise ConfigError(f"--device {text}: found a number, and no accelerator: expected cpu, or leave it out")
    names = [f"{_accelerator()}:{number}" for number in ids] if ids and _accelerator() else numbers
    devices = tuple(name.strip() for name in names if name.strip() != RECORDED)
    for device in devices:
        require_device(device)
    if len(set(devices)) < len(devices):
        raise ConfigError(f"--device: found {','.join(devices)}, expected each device once")
    return devices


def _accelerator() -> str:
    """Return what msprobe takes device numbers for: `npu` where torch_npu is, or `cuda`; "" if there is neither."""
    if importlib.util.find_spec("torch_npu") is not None:
        return "npu"
    return "cuda" if torch.cuda.is_available() else ""


def require_device(device: str) -> None:
    """Raise a ConfigError unless torch can use the device."""
    try:
        if torch.ones(1, device=device).is_meta:
            raise ConfigError(f"--device {device}: it computes nothing")
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        why = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"--device {device}: torch cannot use it here: {why}") from error


def run_again(
    dumped: DumpedCall,
    device: str,
    autocast: str,
    recorded: Sequence[Judgement],
    judged: Callable[[object], Sequence[Judgement]],
) -> CallRerun:
    """Return what `device` gives for a recorded call now, under `autocast` (`torch.bfloat16` or "").

    `judged` gives the verdicts on a result, `recorded` are those on the one in the dump; see `rerun`.
    """
    return rerun(device, recorded, lambda: result_on(device, dumped.call, autocast), judged, dumped.generator)


def rerun(
    device: str,
    recorded: Sequence[Judgement],
    run: Callable[[], object],
    judged: Callable[[Any], Sequence[Judgement]],
    generator: Tensor | None = None,
) -> CallRerun:
    """Return what `run` gives on `device` now, beside the verdicts on what was `recorded`.

    Each run draws from the same state of the device's generator: on the CPU from `generator`, the recorded one.
    """
    if all(one.status is Status.SKIP for one in recorded):
        return CallRerun((), "")
    try:
        result = _drawn(run, device, generator)
        found = tuple(judged(result))
        was_wrong, is_wrong = _has_error(recorded), _has_error(found)
        if not was_wrong and not is_wrong:
            return CallRerun(found, "")
        is_steady = _same_bits(result, _drawn(run, device, generator))
    except Exception as error:  # noqa: BLE001  # whatever a device raises: it has no such kernel, or no memory
        why = (str(error).splitlines() or [""])[0][:160]
        return CallRerun((), f"not run again on {device}: {type(error).__name__}: {why}")
    return CallRerun(found, _cause(device, was_wrong=was_wrong, is_wrong=is_wrong, is_steady=is_steady))


def _drawn(run: Callable[[], object], device: str, state: Tensor | None) -> object:
    """Return what `run` gives with the generator of `device` in a known state; that is as before afterwards."""
    place = torch.device(device)
    has_own = place.type != "cpu" and hasattr(getattr(torch, place.type, None), "get_rng_state")
    kind = {"device_type": place.type} if has_own else {}
    with torch.random.fork_rng(devices=[place] if has_own else [], **kind):
        if place.type == "cpu" and state is not None:
            torch.set_rng_state(state)
        else:
            torch.manual_seed(0)
        return run()


def _cause(device: str, *, was_wrong: bool, is_wrong: bool, is_steady: bool) -> str:
    if not is_steady:
        return f"{NONDETERMINISTIC}: {device} gives another result each time"
    if not is_wrong:
        return f"{TRANSIENT}: {device} gives the right result now"
    if not was_wrong:
        return f"{DEVICE}: what was recorded is right, {device} gives something else"
    return f"{KERNEL}: {device} gives a wrong result again"


def result_on(device: str, call: OperationCall, autocast: str) -> object:
    """Return what `device` gives for a call under `autocast` (`torch.bfloat16` or "").

    Raises:
        Exception: Whatever the operation raises.
    """
    with ExitStack() as contexts:
        contexts.enter_context(torch.device(device))
        if autocast:
            dtype = getattr(torch, autocast.removeprefix("torch."))
            contexts.enter_context(torch.autocast(torch.device(device).type, dtype))
        return call_on(call, device)


def _has_error(judgements: Sequence[Judgement]) -> bool:
    return any(one.status is Status.ERROR for one in judgements)


def _same_bits(one: object, other: object) -> bool:
    """Return whether two results have equal tensors; a NaN equals a NaN."""
    sides = [[plain(leaf) for leaf in pytree.tree_leaves(side) if isinstance(leaf, Tensor)] for side in (one, other)]
    return all(
        first.shape == second.shape and bool(((first == second) | (first.isnan() & second.isnan())).all())
        for first, second in zip(*sides, strict=True)
    )
