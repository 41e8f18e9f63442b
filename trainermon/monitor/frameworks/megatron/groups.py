"""Which place this rank has in Megatron's process groups."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import nn

from trainermon.core.errors import AttachError
from trainermon.core.values import Coordinates

PARALLEL_STATE = "megatron.core.parallel_state"
# Purpose -> attribute of the wrapper (0.14 on), function of `parallel_state`, and its arguments.
SOURCES: Mapping[str, tuple[str, str, Mapping[str, bool]]] = MappingProxyType(
    {
        "dp": ("dp_group", "get_data_parallel_group", {}),
        "dp_cp": ("dp_cp_group", "get_data_parallel_group", {"with_context_parallel": True}),
        "tp": ("tp_group", "get_tensor_model_parallel_group", {}),
        "pp": ("pp_group", "get_pipeline_model_parallel_group", {}),
        "cp": ("cp_group", "get_context_parallel_group", {}),
        "ep": ("ep_group", "get_expert_model_parallel_group", {}),
        "etp": ("expt_tp_group", "get_expert_tensor_parallel_group", {}),
        "edp": ("expt_dp_group", "get_expert_data_parallel_group", {}),
    }
)


class GroupPlace(NamedTuple):
    """A rank's number in a process group (`rank`), and how many ranks the group has (`size`)."""

    rank: int = 0
    size: int = 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MegatronGroups:
    """This rank's place in every group that decides what it holds.

    Attributes:
        tp: Tensor parallel.
        pp: Pipeline parallel.
        cp: Context parallel.
        dp: Data parallel, context parallel ranks apart.
        dp_cp: What dense gradients are reduced over.
        ep: Expert parallel.
        etp: Tensor parallel, for experts.
        edp: What the gradients of experts are reduced over.
    """

    tp: GroupPlace
    pp: GroupPlace
    cp: GroupPlace
    dp: GroupPlace
    dp_cp: GroupPlace
    ep: GroupPlace
    etp: GroupPlace
    edp: GroupPlace


def process_groups_of(chunk: nn.Module) -> dict[str, Any]:
    """Return this rank's process groups by purpose: those that the chunk's wrapper was made with, else Megatron's own.

    Raises:
        AttachError: Megatron's model parallel groups do not exist.
    """
    state = _parallel_state()
    if state is None:
        raise AttachError(
            "Megatron: found no model parallel groups; call parallel_state.initialize_model_parallel before set_monitor"
        )
    groups = {}
    for purpose, (attribute, getter, options) in SOURCES.items():
        group = getattr(chunk, attribute, None)
        groups[purpose] = _first(group if group is not None else getattr(state, getter)(**options))
    return groups


def groups_of(chunk: nn.Module) -> MegatronGroups:
    """Return this rank's position and the size of each Megatron process group that decides what the rank holds."""
    return MegatronGroups(**{purpose: _place(group) for purpose, group in process_groups_of(chunk).items()})


def coordinates_of(coordinates: Coordinates) -> Coordinates:
    """Return `coordinates` with the axes as Megatron laid them out; as they are where it is not initialised.

    Imports nothing: a script that uses Megatron has imported it. `dp` counts data parallel ranks without context
    parallelism, so that world size = dp * cp * tp * pp; `ep` divides the data parallel ranks of the experts.
    """
    state = _parallel_state()
    if state is None:
        return coordinates
    axes: dict[str, int] = {}
    for axis in ("dp", "tp", "pp", "cp", "ep"):
        _, getter, options = SOURCES[axis]
        place = _place(_first(getattr(state, getter)(**options)))
        axes |= {axis: place.rank, f"{axis}_size": place.size}
    return dataclasses.replace(coordinates, **axes)


def _parallel_state() -> Any:
    """Return Megatron's `parallel_state` if its groups exist."""
    state = sys.modules.get(PARALLEL_STATE)
    return state if state is not None and state.model_parallel_is_initialized() else None


def _first(group: Any) -> Any:
    """Return the group; of several, for several pipelines, that of the language model."""
    return group[0] if isinstance(group, list) else group


def _place(group: Any) -> GroupPlace:
    return GroupPlace(group.rank(), group.size())
