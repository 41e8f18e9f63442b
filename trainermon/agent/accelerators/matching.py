"""Which of a node's accelerators a rank trains on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trainermon.agent.accelerators.readings import AcceleratorReading


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RankAccelerator:
    """What a rank has written of the device that it trains on.

    Attributes:
        type: torch's name of the kind of device: `cuda`, `npu`.
        index: Its number among those that the rank sees.
        visible: What the environment lets the rank see: `CUDA_VISIBLE_DEVICES`, `ASCEND_RT_VISIBLE_DEVICES`; '': all.
        uuid: What torch says that it is, without a prefix; '': not known.
        pid: The rank's process id.
    """

    type: str
    index: int
    visible: str = ""
    uuid: str = ""
    pid: int = 0

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> RankAccelerator | None:
        """Return the device from what the rank's file says; None: the rank trains on none.

        Raises:
            TypeError, ValueError, LookupError, AttributeError: The file does not have that form.
        """
        device = plain.get("accelerator")
        if device is None:
            return None
        return cls(
            type=str(device["type"]),
            index=int(device["index"]),
            visible=str(device.get("visible", "")),
            uuid=str(device.get("uuid", "")),
            pid=int(plain.get("pid", 0)),
        )

    @property
    def name(self) -> str:
        """What the environment calls the device: an index as text, a UUID, or the beginning of one."""
        names = [name.strip() for name in self.visible.split(",")] if self.visible else []
        return names[self.index] if 0 <= self.index < len(names) else str(self.index)


def find_accelerator(device: RankAccelerator, readings: Sequence[AcceleratorReading]) -> AcceleratorReading | None:
    """Return the reading of the accelerator that a rank trains on; None where it is not certain which that is.

    The most certain evidence counts: what the environment names by UUID; what torch says; the one accelerator on which
    the driver sees the rank's process; and only then the number, whose order is the driver's.
    """
    name = device.name
    ways: list[Callable[[AcceleratorReading], bool]] = []
    if name.startswith(("GPU-", "MIG-")):  # CUDA takes the beginning of one, too
        ways.append(lambda reading: reading.uuid.startswith(name))
    if device.uuid:
        ways.append(lambda reading: reading.uuid.removeprefix("GPU-") == device.uuid.removeprefix("GPU-"))
    if device.pid:
        ways.append(lambda reading: device.pid in reading.pids)
    if name.isdecimal():
        ways.append(lambda reading: reading.index == int(name))
    for is_it in ways:
        found = [reading for reading in readings if is_it(reading)]
        if len(found) == 1:
            return found[0]
    return None
