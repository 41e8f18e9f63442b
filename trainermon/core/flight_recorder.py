"""What torch's flight recorder knows of the collectives of this process, read without a hook.

The recorder notes every collective that reaches a backend, whoever called it: Python, DDP's C++ reducer, a compiled
graph. How far each group has come costs 5 to 50 µs; the notes of the single calls cost 0.1 ms for ten and 23 ms for
2 000 of them, and are read only on demand. Nothing here imports torch before a `FlightRecorder` is made, so that an
agent can parse what a rank hands out.

gloo: point-to-point calls are not noted, though they advance the sequence; a reduce-scatter is noted as the all-reduce
that it is carried out as; a call is told complete a little after it is.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

_SIZE_BYTES: Mapping[str, int] = {
    **dict.fromkeys(("Bool", "Byte", "Char"), 1),
    **dict.fromkeys(("Half", "BFloat16", "Short", "UInt16"), 2),
    **dict.fromkeys(("Float", "Int", "UInt32", "ComplexHalf"), 4),
    **dict.fromkeys(("Double", "Long", "UInt64", "ComplexFloat"), 8),
    "ComplexDouble": 16,
}
# The recorder of the accelerator's backend and that of every other one; each is there or not by torch's version.
_READERS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")


class GroupProgress(NamedTuple):
    """How far this rank has come in a process group.

    Attributes:
        enqueued: Sequence number of the last collective begun.
        completed: That of the last one completed.
    """

    enqueued: int
    completed: int

    @property
    def in_flight(self) -> int:
        """How many collectives have begun and are not complete."""
        return max(0, self.enqueued - max(0, self.completed))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RecordedCall:
    """One collective call as torch's flight recorder noted it.

    Attributes:
        group: Name that torch gives the group on this rank.
        description: The group's own description.
        op: Collective as the backend carried it out, as `all_reduce`.
        sequence: Number of the collective in its group; for a point-to-point call the number among those.
        is_p2p: A send or a receive.
        state: `scheduled`, `started` or `completed`; gloo's stay `scheduled`.
        is_in_flight: It was begun and is not complete.
        input_shapes: Shapes of what the rank handed in.
        output_shapes: Shapes of what it got.
        input_dtypes: Data types as C++ names them (`Float`), parallel to the shapes.
        output_dtypes: Likewise.
        created_s: Unix time of the call.
        duration_s: Time on the device; None unless the backend was told to measure it (TORCH_NCCL_ENABLE_TIMING).
    """

    group: str
    description: str
    op: str
    sequence: int
    is_p2p: bool
    state: str
    is_in_flight: bool
    input_shapes: tuple[tuple[int, ...], ...]
    output_shapes: tuple[tuple[int, ...], ...]
    input_dtypes: tuple[str, ...]
    output_dtypes: tuple[str, ...]
    created_s: float
    duration_s: float | None

    @property
    def size_bytes(self) -> int | None:
        """Size in bytes of the larger one of input and output; None if a data type is not known."""
        sizes = (_size(self.input_shapes, self.input_dtypes), _size(self.output_shapes, self.output_dtypes))
        return None if None in sizes else max(size for size in sizes if size is not None)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RecorderReading:
    """The content of torch's flight recorder (its log of collectives) at one moment.

    Attributes:
        progress: By the recorder's own number of a group.
        names: Name that torch gives each of these groups, as far as this reading tells.
        members: Global ranks of each of these groups by its name, as far as this reading tells; gloo's tells nothing.
        entries: The calls, oldest first; empty in a short reading.
    """

    progress: Mapping[str, GroupProgress]
    names: Mapping[str, str]
    members: Mapping[str, tuple[int, ...]]
    entries: tuple[RecordedCall, ...]


def parse(text: bytes | str) -> RecorderReading:
    """Parse the JSON that torch's flight recorder writes.

    Raises:
        ValueError: `text` is no JSON, or not a recorder's.
    """
    found = json.loads(text)
    if not isinstance(found, dict):
        raise ValueError(f"found {type(found).__name__}, expected the object that a flight recorder writes")  # noqa: TRY004
    raw = found.get("entries", ())
    configured = [group for group in found.get("pg_config", {}).values() if group.get("name")]
    names = {number: group["name"] for number, group in found.get("pg_config", {}).items() if group.get("name")}
    names |= {str(entry["pg_id"]): entry["process_group"][0] for entry in raw if "process_group" in entry}
    return RecorderReading(
        progress={
            number: GroupProgress(int(at["last_enqueued_collective"]), int(at["last_completed_collective"]))
            for number, at in found.get("pg_status", {}).items()
        },
        names=names,
        members={group["name"]: ranks for group in configured if (ranks := _ranks(group.get("ranks")))},
        entries=tuple(_entry(entry) for entry in raw),
    )


class FlightRecorder:
    """Reads torch's flight recorders (logs of collectives, one per backend) of this process.

    Attributes:
        reason: Why there is none, "" if there is one.
    """

    def __init__(self) -> None:
        self._readers = _readers()
        self._names: list[dict[str, str]] = [{} for _ in self._readers]
        self.reason = "" if self._readers else "this version of torch has no flight recorder that can be read as JSON"

    def progress(self) -> dict[str, GroupProgress]:
        """Return, by torch's name of a group, how many collectives it has begun and completed, over all backends.

        Costs 10 to 60 µs; when a group is seen for the first time, one full reading, to learn its name. A group that
        has never communicated is not there.
        """
        found: dict[str, GroupProgress] = {}
        for read, names in zip(self._readers, self._names, strict=True):
            recording = parse(read(False, False))  # noqa: FBT003  # C++ functions without keywords in some versions
            if recording.progress.keys() - names.keys():
                names |= dict.fromkeys(recording.progress, "") | {**names, **parse(read(True, False)).names}  # noqa: FBT003
            for number, at in recording.progress.items():
                before = found.get(names[number], GroupProgress(0, 0))
                found[names[number]] = GroupProgress(before.enqueued + at.enqueued, before.completed + at.completed)
        found.pop("", None)
        return found

    def entries(self) -> tuple[RecordedCall, ...]:
        """Return all calls that the recorders still hold (by default the last 2 000), oldest first.

        Costs 0.1 ms for ten and about 25 ms for 2 000: not for every step.
        """
        entries = [entry for read in self._readers for entry in parse(read(True, False)).entries]  # noqa: FBT003
        return tuple(sorted(entries, key=lambda entry: entry.created_s))


def _readers() -> list[Callable[[bool, bool], bytes]]:
    try:
        from torch._C import _distributed_c10d  # only here: an agent has no torch
    except ImportError:
        return []
    return [getattr(_distributed_c10d, name) for name in _READERS if hasattr(_distributed_c10d, name)]


def _entry(raw: Mapping[str, Any]) -> RecordedCall:
    is_p2p = bool(raw.get("is_p2p", False))
    name, description = (*raw.get("process_group", ("", "")), "")[:2]
    duration_ms = raw.get("duration_ms")
    state = str(raw.get("state", ""))
    return RecordedCall(
        group=name,
        description=description,
        op=str(raw.get("profiling_name", "")).rpartition(":")[2],
        sequence=int(raw.get("p2p_seq_id" if is_p2p else "collective_seq_id", 0)),
        is_p2p=is_p2p,
        state=state,
        is_in_flight=state != "completed" and not raw.get("retired", False),
        input_shapes=_shapes(raw.get("input_sizes", ())),
        output_shapes=_shapes(raw.get("output_sizes", ())),
        input_dtypes=tuple(raw.get("input_dtypes", ())),
        output_dtypes=tuple(raw.get("output_dtypes", ())),
        created_s=int(raw.get("time_created_ns", 0)) / 1e9,
        duration_s=None if duration_ms is None else float(duration_ms) / 1e3,
    )


def _ranks(raw: Any) -> tuple[int, ...]:
    """Return the members that a recorder writes as the text of a list, as `"[0, 1]"`."""
    return tuple(int(rank) for rank in json.loads(raw)) if isinstance(raw, str) and raw.startswith("[") else ()


def _shapes(raw: Any) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(shape) for shape in raw)


def _size(shapes: tuple[tuple[int, ...], ...], dtypes: tuple[str, ...]) -> int | None:
    if any(dtype not in _SIZE_BYTES for dtype in dtypes):
        return None
    return sum(math.prod(shape) * _SIZE_BYTES[dtype] for shape, dtype in zip(shapes, dtypes, strict=False))
