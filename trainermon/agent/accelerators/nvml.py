"""Reads NVIDIA's GPUs, and slices of them (MIG), through NVML, the library of the driver; for a process of its own."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from trainermon.agent.accelerators.readings import AcceleratorReading, ReaderError

if TYPE_CHECKING:
    from types import ModuleType

MAX_EVENTS = 64
"""Most errors that are fetched at a time; the newest counts."""

_MISSING = "the package nvidia-ml-py, which reads NVIDIA's GPUs, is not installed here: pip install nvidia-ml-py"


class NvmlReader:
    """Asks NVML for every GPU of the node; a GPU that is cut into slices (MIG) is told slice by slice.

    What a GPU or its driver does not tell is NaN; of a slice utilisation is never told, and power, temperature, clock
    and throttling are those of the whole GPU. A call may hang if the driver does.

    Raises:
        ReaderError: The package nvidia-ml-py or the driver's library is missing, or the driver refuses.
    """

    def __init__(self) -> None:
        try:
            import pynvml
        except ImportError:
            raise ReaderError(_MISSING) from None
        self._nvml: ModuleType = pynvml
        self._xids: dict[str, float] = {}
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            raise ReaderError(f"NVIDIA's GPUs cannot be read: {error}") from None
        self._events = self._subscribe()

    def read(self) -> list[AcceleratorReading]:
        """Return a reading of every GPU, or slice of one.

        Raises:
            ReaderError: The driver does not tell which GPUs there are.
        """
        self._take_events()
        try:
            handles = list(self._handles())
        except self._nvml.NVMLError as error:
            raise ReaderError(f"NVIDIA's GPUs cannot be listed: {error}") from None
        return [reading for number, handle in enumerate(handles) for reading in self._read(number, handle)]

    def _handles(self) -> Iterator[Any]:
        for number in range(self._nvml.nvmlDeviceGetCount()):
            yield self._nvml.nvmlDeviceGetHandleByIndex(number)

    def _read(self, number: int, gpu: Any) -> Iterator[AcceleratorReading]:
        nvml = self._nvml
        shared: dict[str, Any] = {
            "model": self._ask(lambda: str(nvml.nvmlDeviceGetName(gpu)), ""),
            "power_watts": self._number(lambda: nvml.nvmlDeviceGetPowerUsage(gpu) / 1e3),
            "temperature_celsius": self._number(lambda: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU)),
            "clock_hertz": self._number(lambda: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM) * 1e6),
            "throttled": self._number(lambda: float(bool(self._slowdowns(gpu)))),
            "uncorrected_errors": self._number(
                lambda: nvml.nvmlDeviceGetTotalEccErrors(
                    gpu, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
                )
            ),
        }
        uuid = self._uuid(gpu)
        shared["xid"] = self._xids.get(uuid, math.nan)
        slices = list(self._slices(gpu))
        for part in slices or [gpu]:
            yield AcceleratorReading(
                uuid=self._uuid(part) if slices else uuid,
                index=-1 if slices else number,
                **self._own(part),
                **shared,
            )

    def _own(self, part: Any) -> dict[str, Any]:
        """Return what a slice has for itself."""
        nvml = self._nvml
        used, size = self._memory(part)
        return {
            "pids": self._ask(lambda: tuple(one.pid for one in nvml.nvmlDeviceGetComputeRunningProcesses_v3(part)), ()),
            "utilization": self._number(lambda: nvml.nvmlDeviceGetUtilizationRates(part).gpu / 100),
            "memory_used_bytes": used,
            "memory_size_bytes": size,
        }

    def _uuid(self, part: Any) -> str:
        return str(self._ask(lambda: self._nvml.nvmlDeviceGetUUID(part), ""))

    def _slices(self, gpu: Any) -> Iterator[Any]:
        nvml = self._nvml
        current = self._ask(lambda: nvml.nvmlDeviceGetMigMode(gpu)[0], nvml.NVML_DEVICE_MIG_DISABLE)
        if current == nvml.NVML_DEVICE_MIG_ENABLE:
            for number in range(self._ask(lambda: nvml.nvmlDeviceGetMaxMigDeviceCount(gpu), 0)):
                with contextlib.suppress(nvml.NVMLError):  # numbers may have gaps
                    yield nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, number)

    def _slowdowns(self, gpu: Any) -> int:
        """Return the bits of the reasons that are a fault of cooling or power supply."""
        nvml = self._nvml
        try:
            reasons = nvml.nvmlDeviceGetCurrentClocksEventReasons(gpu)
        except nvml.NVMLError:  # a driver from before the reasons were renamed
            reasons = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu)
        faults: int = (
            nvml.nvmlClocksThrottleReasonHwSlowdown
            | nvml.nvmlClocksThrottleReasonHwThermalSlowdown
            | nvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown
            | nvml.nvmlClocksThrottleReasonSwThermalSlowdown
        )
        return int(reasons) & faults

    def _memory(self, part: Any) -> tuple[float, float]:
        """Return memory in use and in all; the driver's own part is left out of the former where it is told apart."""
        nvml = self._nvml
        for version in (nvml.nvmlMemory_v2, None):
            with contextlib.suppress(nvml.NVMLError):
                memory = nvml.nvmlDeviceGetMemoryInfo(part, version)
                return float(memory.used), float(memory.total)
        return math.nan, math.nan

    def _subscribe(self) -> Any:
        """Ask the driver to keep errors (Xid) for this process; None: it does not."""
        nvml = self._nvml
        try:
            events = nvml.nvmlEventSetCreate()
            for gpu in self._handles():
                nvml.nvmlDeviceRegisterEvents(gpu, nvml.nvmlEventTypeXidCriticalError, events)
        except nvml.NVMLError:
            return None
        return events

    def _take_events(self) -> None:
        nvml = self._nvml
        with contextlib.suppress(nvml.NVMLError):  # a time-out: there are no more
            for _ in range(MAX_EVENTS if self._events is not None else 0):
                event = nvml.nvmlEventSetWait_v2(self._events, 0)
                self._xids[self._uuid(event.device)] = float(event.eventData)

    def _number(self, ask: Callable[[], float]) -> float:
        return float(self._ask(ask, math.nan))

    def _ask(self, ask: Callable[[], Any], default: Any) -> Any:
        try:
            return ask()
        except self._nvml.NVMLError:
            return default
