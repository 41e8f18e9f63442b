"""A collective as a script: as many processes as its group had ranks communicate what these gave.

Decides what the script says for each kind of collective; no text of the dump gets into it.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainermon.accuracy.calls import plain
from trainermon.accuracy.judge import Judgement
from trainermon.accuracy.products import RankSum
from trainermon.analysis.check.collectives import COLLECTIVE, CollectiveChecker, RankShare
from trainermon.core.errors import DumpError
from trainermon.dump.files.reader import load_raw
from trainermon.dump.files.records import FORWARD

TEMPLATE = Path(__file__).with_name("reproduce_collective.py.txt")
# What each rank does with `given`; `made` is what it has then.
_STEPS: Mapping[str, str] = {
    "all_reduce": "made = [given]\n    dist.all_reduce(given, $op)",
    "broadcast": "made = [given]\n    dist.broadcast(given, $root)",
    "reduce": "made = [given] if rank == $root else []\n    dist.reduce(given, $root, $op)",
    "all_gather": "made = [torch.empty_like(given) for _ in range($size)]\n    dist.all_gather(made, given)",
    "all_gather_into_tensor": "made = [given.new_empty($size * given.numel())]\n"
    "    dist.all_gather_into_tensor(made[0], given.flatten())",
    "gather": "made = [torch.empty_like(given) for _ in range($size)] if rank == $root else []\n"
    "    dist.gather(given, made or None, $root)",
    "reduce_scatter": "made = [torch.empty_like(given[rank])]\n    dist.reduce_scatter(made[0], given, $op)",
    "reduce_scatter_tensor": "made = [given.new_empty(given.numel() // $size)]\n"
    "    dist.reduce_scatter_tensor(made[0], given.flatten(), $op)",
    "all_to_all": "made = [torch.empty_like(one) for one in given]\n    dist.all_to_all(made, given)",
}
_OPERATIONS = frozenset(["SUM", "AVG", "MAX", "MIN", "PRODUCT"])


class ReproducedCollective(NamedTuple):
    """A collective to be written as a script.

    Attributes:
        key: Its key in the dump that was named.
        name: `all_reduce`.
        shares: What each rank of the group gave and got, in the order of the group.
        judgements: The verdicts on what each rank got; () for one that got nothing.
    """

    key: str
    name: str
    shares: tuple[RankShare, ...]
    judgements: tuple[tuple[Judgement, ...], ...]


def recorded_collective(directory: Path, key: str) -> ReproducedCollective:
    """Return the collective `key` (`Distributed.all_reduce.0`) with what all ranks gave and got.

    Raises:
        DumpError: There is no such call, a dump of a rank is missing, or it is none that a script can repeat.
    """
    data = load_raw(directory).data
    keys = [one for one in data if one.startswith(COLLECTIVE) and one.endswith(FORWARD)]
    whole = key if key in keys else f"{key}.{FORWARD}"
    if whole not in keys:
        near = difflib.get_close_matches(whole, keys, n=1)
        raise DumpError(
            f"{directory} has no collective {key}; " + (f"did you mean {near[0]}?" if near else "none at all")
        )
    name = whole.split(".")[1]
    if name not in _STEPS:
        raise DumpError(f"{whole}: a script can repeat {', '.join(sorted(_STEPS))}, and no {name}")
    checker = CollectiveChecker(directory, data)
    shares = tuple(checker.shares(whole))
    return ReproducedCollective(whole, name, shares, tuple(tuple(share.judgements) for share in shares))


def collective_text(reproduced: ReproducedCollective, file: str, title: str) -> str:
    """Return the source of the script; `file` is its name, `title` what stands on its first line."""
    first = reproduced.shares[0]
    operation = first.operation or "SUM"
    if operation not in _OPERATIONS:
        raise DumpError(f"{reproduced.key} reduces by an operation that a script cannot name")
    size = len(reproduced.shares)
    # gloo has no mean: the sum over the number of ranks is one
    op = "dist.ReduceOp.SUM" if operation == "AVG" else f"dist.ReduceOp.{operation}"
    step = Template(_STEPS[reproduced.name]).substitute(op=op, root=first.root, size=size)
    if operation == "AVG":
        step += f"\n    made = [one / {size} for one in made]"
    return Template(TEMPLATE.read_text(encoding="utf-8")).substitute(title=title, file=file, step=step, size=size)


def collective_files(reproduced: ReproducedCollective) -> tuple[list[Any], list[dict[str, Any]]]:
    """Return what stands in inputs.pt and expected.pt: an entry for each rank of the group."""
    inputs = [_copied(share.given) for share in reproduced.shares]
    return inputs, [_expected(share) for share in reproduced.shares]


def _copied(given: Any) -> Any:
    return [plain(one).clone() for one in given] if isinstance(given, list | tuple) else plain(given).clone()


def _expected(share: RankShare) -> dict[str, Any]:
    found: dict[str, Any] = {"recorded": [plain(one).clone() for one in share.got], "exact": [], "allowed": []}
    for got, parts in zip(share.got, share.parts, strict=True):
        exact, allowed = _exact(got, parts, share.operation)
        found["exact"].append(exact.reshape(got.shape))
        found["allowed"].append(allowed.reshape(got.shape))
    return found


def _exact(got: Tensor, parts: Sequence[Tensor], operation: str) -> tuple[Tensor, Tensor]:
    if operation in ("SUM", "AVG") and got.is_floating_point():
        total = RankSum(parts, 1 / len(parts) if operation == "AVG" else 1.0)
        return total.results[0], total.allowed(0, got.dtype, 0.0)
    reduced: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "MAX": torch.maximum,
        "MIN": torch.minimum,
        "SUM": torch.add,
        "PRODUCT": torch.mul,
    }
    whole = functools.reduce(reduced[operation], parts) if operation else parts[0]
    return whole, torch.zeros(whole.shape)
