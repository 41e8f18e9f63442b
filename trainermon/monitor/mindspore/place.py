"""Where this rank stands in a job of MindSpore, and what of its surroundings changes numbers or speed."""

from __future__ import annotations

import importlib.metadata
import os
import sys
from collections.abc import Mapping
from typing import Any

import mindspore
from mindspore.communication import GlobalComm, get_group_size, get_local_rank, get_local_rank_size, get_rank

from trainermon.core.environment.code import script_arguments
from trainermon.core.environment.secrets import Redactor
from trainermon.core.environment.variables import allowed_settings
from trainermon.core.values import Coordinates

_PACKAGES = ("mindformers", "mindspeed", "mindspore", "msadapter", "numpy")


def find_coordinates(groups: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> Coordinates:
    """Return this rank's position, from `mindspore.communication` if it was initialised, else from msrun's variables.

    `groups` maps an axis (`tp`, `dp`, `pp`) to the name of this rank's communication group of it, or None. Without a
    data-parallel group the whole world is one.
    """
    if GlobalComm.INITED:
        rank, world_size = get_rank(), get_group_size()
        local_rank, local_world_size = get_local_rank(), get_local_rank_size()
    else:
        rank, world_size = int(environ.get("RANK_ID", "0")), int(environ.get("RANK_SIZE", "1"))
        local_world_size = int(environ.get("LOCAL_WORLD_SIZE", world_size))
        local_rank = int(environ.get("LOCAL_RANK", rank % local_world_size))
    axes: dict[str, int] = {"dp": rank, "dp_size": world_size}
    for axis, group in groups.items():
        if group is not None and GlobalComm.INITED:
            axes |= {axis: get_rank(group), f"{axis}_size": get_group_size(group)}
    return Coordinates(
        rank=rank, world_size=world_size, local_rank=local_rank, local_world_size=local_world_size, **axes
    )


def kept_settings() -> dict[str, Any]:
    """Return variables of the allow-list, switches of MindSpore, and versions of packages that compute, by section.

    Beside them the arguments of the script, without secrets.
    """
    return {
        "arguments": script_arguments(sys.argv[1:], os.environ),
        "variables": allowed_settings(os.environ, Redactor()),
        "mindspore": {
            "mode": "graph" if mindspore.get_context("mode") == mindspore.GRAPH_MODE else "pynative",
            "device_target": mindspore.get_context("device_target"),
            "deterministic": mindspore.get_context("deterministic"),
            "jit_level": mindspore.get_context("jit_config").get("jit_level", ""),
        },
        "packages": {name: {"version": version} for name in _PACKAGES if (version := _version(name))},
    }


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
