"""The eight mergeable moments of tensors: computed in one pass, kept in slabs, merged.

Importing this package loads neither torch nor numpy. README.md describes the flow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainermon.statistics.kernel import kernel_name, moments
    from trainermon.statistics.merge import merge_rows
    from trainermon.statistics.slabs import Slab, SlabRing

__all__ = ["Slab", "SlabRing", "kernel_name", "merge_rows", "moments"]

_HOMES = {"Slab": "slabs", "SlabRing": "slabs", "kernel_name": "kernel", "merge_rows": "merge", "moments": "kernel"}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
