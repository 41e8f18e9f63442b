"""The process groups of this rank: what each is for, by a name that is the same on every rank, and its sequence number.

A purpose (`tp`, `dp`, `pp` …) comes, in this order, from what the caller says, the dimension of a device mesh, the
group's own description, or is `world`. The name that torch gives a group is of no use: it is a number that differs from
rank to rank.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

# Backends of torch that send what they are given; another one may pack it into fewer bits on the way.
_PLAIN_BACKENDS = frozenset({"gloo", "nccl"})

WORLD = "world"
OTHER = "other"

# How Megatron-Core and torch describe their groups, in short; in this order, the longer before what it contains.
_SHORT = (
    ("expert_tensor_parallel", "etp"),
    ("expert_data_parallel", "edp"),
    ("expert_model_parallel", "ep"),
    ("tensor_model_parallel", "tp"),
    ("pipeline_model_parallel", "pp"),
    ("context_parallel", "cp"),
    ("data_parallel", "dp"),
    ("model_parallel", "mp"),
)


def purposes_of(
    groups: Mapping[str, ProcessGroup | None], meshes: Iterable[DeviceMesh] = ()
) -> dict[ProcessGroup | str, str]:
    """Return what each process group is for (`dp`, `tp` …), as given, or as a named dimension of `meshes`.

    A group with several purposes keeps the first. None, and what this rank is no member of, are left out. No
    communication: the groups exist already.
    """
    purposes: dict[ProcessGroup | str, str] = {}
    for purpose, group in (*groups.items(), *_dimensions(meshes)):
        if isinstance(group, dist.ProcessGroup):
            purposes.setdefault(group, purpose)
    return purposes


def purpose_from(description: str) -> str:
    """Return the purpose that a group's description tells, "" if it tells nothing.

    >>> purpose_from("mesh_tp"), purpose_from("TENSOR_MODEL_PARALLEL_GROUP"), purpose_from("undefined")
    ('tp', 'tp', '')
    """
    text = re.sub(r"[^a-z0-9]+", "_", description.lower()).strip("_")
    if text in ("", "undefined", "mesh_default"):
        return ""
    if text == "default_pg":
        return WORLD
    text = re.sub(r"_group(?=_|$)", "", text.removeprefix("mesh_"))
    for long, short in _SHORT:
        text = text.replace(long, short)
    return text


class GroupPurposes:
    """Gives each process group of this rank a name: its purpose, and a number where several have the same one.

    Args:
        known: Purpose by group, or by the name that torch gives a group.
    """

    def __init__(self, known: Mapping[ProcessGroup | str, str]) -> None:
        self._known = {(key if isinstance(key, str) else key.group_name): purpose for key, purpose in known.items()}
        self._names: dict[str, str] = {}
        self._taken: dict[str, int] = {}

    def name(self, group: ProcessGroup) -> str:
        """Return the purpose of `group`, or `dp-2` for the second group of purpose dp that was asked for."""
        name = self._names.get(group.group_name)
        if name is None:
            purpose = (
                self._known.get(group.group_name)
                or purpose_from(getattr(group, "group_desc", ""))
                or (WORLD if group.size() == dist.get_world_size() else OTHER)
            )
            number = self._taken[purpose] = self._taken.get(purpose, 0) + 1
            name = self._names[group.group_name] = purpose if number == 1 else f"{purpose}-{number}"
        return name


class WatchedGroup:
    """A process group whose collectives are watched, with what was counted since `begin()`.

    Attributes:
        name: Its purpose.
        torch_name: The name that torch gives it on this rank.
        rank: Number of this rank in it.
        is_plain: Its backends are known to send what they are given, and leave it as it is.
        is_alone: This rank is its only member, and it is plain.
        sequence: Call it for the number of the last collective that was begun; always 0 where `is_numbered` is false.
            0.2 µs.
        is_numbered: The backend numbers its collectives.
        first: The number at the beginning.
        accounted: By how much watched calls have moved the number on.
        size_bytes: Size of the watched calls.
        unfinished: Watched calls whose result was not taken.
    """

    __slots__ = (
        "accounted", "first", "is_alone", "is_numbered", "is_plain", "name", "rank", "sequence", "size_bytes",
        "torch_name", "unfinished",
    )  # fmt: skip

    def __init__(self, group: ProcessGroup, name: str) -> None:
        self.name = name
        self.torch_name = group.group_name
        self.rank = group.rank()
        self.is_plain = _backends(group) <= _PLAIN_BACKENDS
        self.is_alone = self.is_plain and group.size() == 1
        self.is_numbered = True
        self.sequence = group._get_sequence_number_for_group  # type: ignore[attr-defined]  # not in the stub
        try:
            self.sequence()
        except RuntimeError:  # "does not yet support sequence numbers"
            self.is_numbered = False
            self.sequence = int
        self.first = 0  # a group that is met in the middle of a step was made in it
        self.accounted = self.size_bytes = self.unfinished = 0

    def begin(self) -> None:
        """Begin to count from zero."""
        self.first = self.sequence()
        self.accounted = self.size_bytes = self.unfinished = 0


class WatchedGroups:
    """Keeps a `WatchedGroup` for each process group that this rank is a member of."""

    def __init__(self, purposes: GroupPurposes) -> None:
        self._purposes = purposes
        self._found: dict[ProcessGroup, WatchedGroup] = {}

    def of(self, group: ProcessGroup) -> WatchedGroup:
        """Return the counts kept of the process group `group`; they are made on the first call."""
        return self._found.get(group) or self._add(group)

    def all(self) -> list[WatchedGroup]:
        """Return every group of this rank, in the order in which they were made; destroyed ones are released."""
        if not (dist.is_available() and dist.is_initialized()):
            self.reset()
            return []
        alive = list(dist.distributed_c10d._world.pg_names)
        self._found = {group: self.of(group) for group in alive}
        return list(self._found.values())

    def reset(self) -> None:
        """Release every process group and its counts; the names given to groups are kept."""
        self._found.clear()

    def _add(self, group: ProcessGroup) -> WatchedGroup:
        watched = self._found[group] = WatchedGroup(group, self._purposes.name(group))
        return watched


def _backends(group: ProcessGroup) -> set[str]:
    config = dist.distributed_c10d._world.pg_backend_config.get(group, "")
    return {part.rpartition(":")[2] for part in config.split(",")}


def _dimensions(meshes: Iterable[DeviceMesh]) -> Iterator[tuple[str, ProcessGroup]]:
    for mesh in meshes:
        for dimension in mesh.mesh_dim_names or ():
            yield dimension, mesh.get_group(dimension)
