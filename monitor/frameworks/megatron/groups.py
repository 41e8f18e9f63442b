"""Which place this rank has in Megatron's process groups."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any, NamedTuple

from torch import nn

from trainermon.monitor.errors import AttachError
from trainermon.monitor.values import Coordinates

PARALLEL_STATE = "megatron.core.parallel_state"


class Place(NamedTuple):
    """A rank's place in a group and the group's size."""

    rank: int = 0
    size: int = 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
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

    tp: Place
    pp: Place
    cp: Place
    dp: Place
    dp_cp: Place
    ep: Place
    etp: Place
    edp: Place


def groups_of(chunk: nn.Module) -> Groups:
    """Return this rank's places, from the groups that the chunk's wrapper reduces over, else from `parallel_state`.

    Raises:
        AttachError: Megatron's model parallel groups do not exist.
    """
    state = _parallel_state()
    if state is None:
        raise AttachError(
            "Megatron: found no model parallel groups; call parallel_state.initialize_model_parallel before set_monitor"
        )

    def place(attribute: str, getter: str, **options: bool) -> Place:
        group = getattr(chunk, attribute, None)
        return _place(group if group is not None else getattr(state, getter)(**options))

    return Groups(
        tp=place("tp_group", "get_tensor_model_parallel_group"),
        pp=place("pp_group", "get_pipeline_model_parallel_group"),
        cp=place("cp_group", "get_context_parallel_group"),
        dp=place("dp_group", "get_data_parallel_group"),
        dp_cp=place("dp_cp_group", "get_data_parallel_group", with_context_parallel=True),
        ep=place("ep_group", "get_expert_model_parallel_group"),
        etp=place("expt_tp_group", "get_expert_tensor_parallel_group"),
        edp=place("expt_dp_group", "get_expert_data_parallel_group"),
    )


def coordinates_of(coordinates: Coordinates) -> Coordinates:
    """Return `coordinates` with the axes as Megatron laid them out; as they are where it is not initialised.

    Imports nothing: a script that uses Megatron has imported it. `dp` counts data parallel ranks without context
    parallelism, so that world size = dp * cp * tp * pp; `ep` divides the data parallel ranks of the experts.
    """
    state = _parallel_state()
    if state is None:
        return coordinates
    axes: dict[str, int] = {}
    for axis, getter in (
        ("dp", "get_data_parallel_group"),
        ("tp", "get_tensor_model_parallel_group"),
        ("pp", "get_pipeline_model_parallel_group"),
        ("cp", "get_context_parallel_group"),
        ("ep", "get_expert_model_parallel_group"),
    ):
        place = _place(getattr(state, getter)())
        axes |= {axis: place.rank, f"{axis}_size": place.size}
    return dataclasses.replace(coordinates, **axes)


def _parallel_state() -> Any:
    """Return Megatron's `parallel_state` if its groups exist."""
    state = sys.modules.get(PARALLEL_STATE)
    return state if state is not None and state.model_parallel_is_initialized() else None


def _place(group: Any) -> Place:
    first = group[0] if isinstance(group, list) else group  # several pipelines: the first is the language model's
    return Place(first.rank(), first.size())
