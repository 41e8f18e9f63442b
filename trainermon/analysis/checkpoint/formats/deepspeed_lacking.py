"""What DeepSpeed's files say that a checkpoint holds and none of them has, and what they do not say.

Source: deepspeed/runtime/engine.py (`_common_checkpoint_state`, `_save_checkpoint`), 0.19.8: the names of trained
parameters are saved at stages 1 to 3, those of frozen ones at 2 and 3, unless these are left out.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

FROZEN_SHAPES = "frozen_param_shapes"
_FIRST_WITH_FROZEN = 2  # the stage
NO_MODEL_STATES = "which parameters there should be: no *_model_states.pt beside them says it"


class Lacking(NamedTuple):
    """Sentences on what is in no file, on what no file says, and on parameters that no optimizer has."""

    missing: tuple[str, ...] = ()
    unsaid: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def lacking(states: Collection[Mapping[str, Any]], held: Iterable[str], stage: Any) -> Lacking:
    """Return what is missing of a checkpoint whose files hold tensors of these names.

    Args:
        states: What `*_model_states.pt` has, of the first rank of every part of the model.
        held: The names of all weights that were found.
        stage: Of ZeRO; None if it is not known. Stage 0 says of no parameter that it should be there.
    """
    if stage == 0:
        return Lacking()
    found = set(held)
    trained = dict(item for state in states for group in state.get("param_shapes") or () for item in group.items())
    frozen = dict(item for state in states for item in (state.get(FROZEN_SHAPES) or {}).items())
    others = {
        str(name) for state in states for key in ("buffer_names", "shared_params") for name in state.get(key) or ()
    }
    no_file = [name for name, shape in {**trained, **frozen}.items() if name not in found and math.prod(shape)]
    no_state = found - trained.keys() - others
    says_frozen = any(state.get(FROZEN_SHAPES) is not None for state in states)
    missing, unsaid = [], []
    if no_file:
        of_all = f"{len(no_file):,} of {len({**trained, **frozen}):,} parameters are in no file"
        missing.append(f"{of_all}, {sum(name in frozen for name in no_file):,} of them frozen: first {no_file[0]}")
    if not says_frozen and not no_state:
        is_chosen = stage is not None and stage >= _FIRST_WITH_FROZEN and all(FROZEN_SHAPES in s for s in states)
        if is_chosen:
            missing.append("it was saved without frozen parameters, and does not say how many there are")
        else:
            unsaid.append(f"whether frozen parameters were left out: {_why(stage)}")
    return Lacking(tuple(missing), tuple(unsaid), _stateless(no_state, frozen, says_frozen=says_frozen))


def _why(stage: Any) -> str:
    return "its DeepSpeed saved no names of them" if stage != 1 else "ZeRO 1 saves no names of them, and none is there"


def _stateless(names: Collection[str], frozen: Collection[str], *, says_frozen: bool) -> tuple[str, ...]:
    if not names:
        return ()
    have = "1 parameter has" if len(names) == 1 else f"{len(names):,} parameters have"
    of_them = f"{sum(name in frozen for name in names):,} of them frozen" if says_frozen else "which may be frozen"
    return (f"{have} no state of the optimizer, {of_them}: first {min(names)}",)
