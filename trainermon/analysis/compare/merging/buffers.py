"""Which arguments a call fills or does not look at: what stood in them is chance, as memory that `empty` gave."""

from __future__ import annotations

from trainermon.analysis.compare.items import DumpCall

_FILLED = {
    "all_gather": (0, "tensor_list"),
    "all_gather_into_tensor": (0, "output_tensor"),
    "_all_gather_base": (0, "output_tensor"),
    "all_to_all": (0, "output_tensor_list"),
    "all_to_all_single": (0, "output"),
    "gather": (1, "gather_list"),
    "irecv": (0, "tensor"),
    "recv": (0, "tensor"),
    "reduce_scatter": (0, "output"),
    "reduce_scatter_tensor": (0, "output"),
    "_reduce_scatter_base": (0, "output"),
    "scatter": (0, "tensor"),
}
"""Position and name of the argument that an operation fills. Not `broadcast`'s: that of its root counts."""
_ADDED_TO = frozenset(["addbmm", "addmm", "addmv", "addr", "baddbmm", "sspaddmm", "_addmm_activation"])
"""Functions that multiply their first argument by `beta`, and do not look at it if that is 0."""
_BETA = ("input.beta", "input.3")  # MindSpore takes it by position, too
_BATCH = "batch_isend_irecv"


def fills(call: DumpCall, place: str) -> bool:
    """Return whether a call does not look at the argument at `place` (`input.0`, `input.0.1.tensor`)."""
    if f"{place}.".startswith("input.out."):
        return True
    if call.name.removesuffix("_") in _ADDED_TO and place in ("input.0", "input.input"):
        return any(item.place in _BETA and item.max == 0 and not item.is_tensor for item in call.items)
    if call.family != "Distributed":
        return False
    if call.name == _BATCH:  # some are sent, and stay what they were
        stood = {item.place: (item.max, item.min, item.norm, item.checksum) for item in call.items if item.is_tensor}
        after = stood.get(place.replace("input.", "output.", 1))
        return place.startswith("input.") and after is not None and stood.get(place) != after
    words = place.split(".")
    position, name = _FILLED.get(call.name, (None, ""))
    return words[0] == "input" and len(words) > 1 and words[1] in (str(position), name)
