"""What a driver says of one accelerator at one moment, and how it passes from the process that asks to the agent."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any


class ReaderError(Exception):
    """An accelerator's driver cannot be asked on this node; the message says why."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AcceleratorReading:
    """One accelerator at one moment; NaN where its driver does not tell.

    Attributes:
        uuid: The driver's own name of it (`GPU-…`, `MIG-…`), or its address on the bus.
        index: Its number in the driver's order; -1: it has none (a slice of a GPU).
        model: Name of the product.
        pids: Processes that compute on it, as far as the driver tells them.
        utilization: Share of the driver's last sampling period in which it computed at all, 0 to 1.
        memory_used_bytes: Memory in use, by all processes.
        memory_size_bytes: Memory that it has.
        power_watts: What it draws.
        temperature_celsius: Of the chip.
        clock_hertz: Of its cores.
        throttled: 1 while heat or the power supply slows it down, else 0; its own power limit does not count.
        uncorrected_errors: Errors of its memory that could not be corrected, since the driver was loaded.
        xid: Number of the newest error (NVIDIA's Xid) that the driver reported since the agent began to look.
    """

    uuid: str
    index: int
    model: str = ""
    pids: tuple[int, ...] = ()
    utilization: float = math.nan
    memory_used_bytes: float = math.nan
    memory_size_bytes: float = math.nan
    power_watts: float = math.nan
    temperature_celsius: float = math.nan
    clock_hertz: float = math.nan
    throttled: float = math.nan
    uncorrected_errors: float = math.nan
    xid: float = math.nan

    @property
    def memory_ratio(self) -> float:
        """Share of its memory that is in use, 0 to 1; NaN: not known."""
        return self.memory_used_bytes / self.memory_size_bytes if self.memory_size_bytes else math.nan


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AcceleratorSample:
    """All accelerators of a node at one moment, or the reason why there will be no readings.

    Attributes:
        time_s: Unix time of the reading.
        readings: One for each accelerator.
        problem: Why none can be read; '' if they can.
    """

    time_s: float
    readings: Sequence[AcceleratorReading] = ()
    problem: str = ""


def encode(sample: AcceleratorSample) -> str:
    """Return the sample as one line of JSON; NaN, which JSON does not have, is null."""
    readings = [{k: _plain(v) for k, v in dataclasses.asdict(r).items()} for r in sample.readings]
    return json.dumps({"time_s": sample.time_s, "readings": readings, "problem": sample.problem})


def decode(line: str) -> AcceleratorSample:
    """Return the sample that `encode` wrote.

    Raises:
        ValueError: It is none.
    """
    try:
        plain = json.loads(line)
        readings = tuple(AcceleratorReading(**_typed(reading)) for reading in plain["readings"])
        return AcceleratorSample(time_s=float(plain["time_s"]), readings=readings, problem=str(plain["problem"]))
    except (LookupError, TypeError) as error:
        raise ValueError(f"no sample of accelerators: {error}") from error


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _typed(plain: Mapping[str, Any]) -> dict[str, Any]:
    known: dict[str, Any] = {name: math.nan if value is None else value for name, value in plain.items()}
    return {**known, "pids": tuple(plain["pids"])}
