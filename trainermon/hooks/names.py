"""Names as the user's model has them, whatever it was wrapped in, and the patterns that choose among them."""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Sequence

from trainermon.core.values import well_formed

# What DDP, torch.compile, FSDP and activation checkpointing put into the path of a module.
WRAPPERS = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
NAMES_TOLD = 5


def plain_name(name: str) -> str:
    """Return `name` without the path parts that wrappers add.

    A leading `module` and any part that starts with an underscore and belongs to a known wrapper are dropped; a
    `module` in the middle may be the user's own and stays. What UTF-8 cannot hold is written out.

    >>> plain_name("module.h.0._orig_mod.attn.weight")
    'h.0.attn.weight'
    """
    parts = name.split(".")
    while parts and parts[0] in WRAPPERS:
        parts = parts[1:]
    return well_formed(".".join(part for part in parts if part == "module" or part not in WRAPPERS))


def chosen(name: str, targets: Sequence[str], stage: int = 0, exclude: Sequence[str] = ()) -> bool:
    r"""Return whether one of `targets` is `name`, a path prefix or a `*` pattern of it, and none of `exclude` is.

    No targets mean all. One that begins with `~` is a regular expression, which is found anywhere in the name. One that
    begins with `1:` chooses on virtual pipeline stage 1 only. Parts that wrappers add are no part of it.

    >>> chosen("h.1.mlp.fc", ["h.1"]), chosen("h.10.mlp", ["h.1"]), chosen("h.10.mlp", ["h.*.mlp"])
    (True, False, True)
    >>> chosen("h.1.mlp", ["1:h.1"]), chosen("h.1.mlp", ["1:h.1"], stage=1), chosen("h.1.mlp", ["1:"], stage=1)
    (False, True, True)
    >>> chosen("h.1.mlp", ["module.module.h.1"]), chosen("h.1.mlp", ["0:module.h"])
    (True, True)
    >>> chosen("h.1.mlp", [r"~h\.[01]\."]), chosen("h.1.mlp", ["h"], exclude=["h.1"]), chosen("h.2.mlp", [], 0, ["h.1"])
    (True, False, True)
    """
    if exclude and chosen(name, exclude, stage):
        return False
    own = f"{stage}:"
    return not targets or any(_matches(name, target.removeprefix(own)) for target in targets)


def advice(wanted: str, names: Sequence[str]) -> str:
    """Return a hint for a name that is not among `names`: the one that was probably meant, or some that exist.

    >>> advice("h.0.atn", ["h.0.attn", "head"]), advice("decoder", ["h.0", "head"])
    ("did you mean 'h.0.attn'?", 'there are h.0, head')
    """
    near = difflib.get_close_matches(wanted, names, n=1)
    if near:
        return f"did you mean {near[0]!r}?"
    some = [name for name in names if name][:NAMES_TOLD]
    return f"there are {', '.join(some)}{' …' if len(names) > len(some) else ''}" if some else "there are none"


def _matches(name: str, target: str) -> bool:
    if target.startswith("~"):
        return re.search(target[1:], name) is not None
    target = plain_name(target)
    return not target or name == target or name.startswith(f"{target}.") or fnmatch.fnmatchcase(name, target)
