"""Collectives of a dump: does each rank have what the dumps of all ranks together say it should?"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from trainermon.accuracy.calls import OperationCall
from trainermon.accuracy.families import Family
from trainermon.accuracy.judge import Judgement, judge_call, judge_gradient
from trainermon.accuracy.products import RankSum
from trainermon.accuracy.reference import unit_roundoff
from trainermon.core.errors import DumpError
from trainermon.dump.files.reader import load_raw
from trainermon.dump.files.records import EXTRA, FORWARD
from trainermon.replay.dumped_calls import load_value

_RANK = re.compile(r"rank(\d+)")
COLLECTIVE = "Distributed."
"""What the keys of collectives begin with."""
# By collective the place and name of what each rank gives.
_GIVEN = {
    "all_reduce": (0, "tensor"),
    "broadcast": (0, "tensor"),
    "all_gather": (1, "tensor"),
    "all_gather_into_tensor": (1, "input_tensor"),
    "reduce_scatter": (1, "input_list"),
    "reduce_scatter_tensor": (1, "input"),
    "all_to_all": (1, "input_tensor_list"),
    "all_to_all_single": (1, "input"),
}
# The place of the operation of those that reduce.
_OPERATION = {"all_reduce": 1, "reduce_scatter": 2, "reduce_scatter_tensor": 2}
_EXACT: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {"MAX": torch.maximum, "MIN": torch.minimum}
# By collective what the rank at a place in the group is to have: for each tensor its parts.
_MADE: Mapping[str, Callable[[Sequence[Any], int], list[list[Tensor]]]] = {
    "all_reduce": lambda given, _: [list(given)],
    "all_gather": lambda given, _: [[one] for one in given],
    "all_gather_into_tensor": lambda given, _: [[torch.cat([one.flatten() for one in given])]],
    "reduce_scatter": lambda given, index: [[parts[index] for parts in given]],
    "reduce_scatter_tensor": lambda given, index: [[one.flatten().chunk(len(given))[index] for one in given]],
    "all_to_all": lambda given, index: [[parts[index]] for parts in given],
    "all_to_all_single": lambda given, index: [[torch.cat([one.chunk(len(given))[index] for one in given])]],
}


class CollectiveChecker:
    """Judges the collectives in the dump of one rank; the dumps of the others lie beside it.

    Args:
        directory: The dump's folder, `rank3`.
        data: What dump.json has, by key.
    """

    def __init__(self, directory: Path, data: Mapping[str, Any]) -> None:
        self._directory = directory
        found = _RANK.fullmatch(directory.name)
        self._rank = int(found[1]) if found else -1
        self._dumps: dict[int, Mapping[str, Any]] = {self._rank: data}

    def judgements(self, key: str) -> list[Judgement]:
        """Return a judgement for each tensor that the collective `key` gave this rank.

        Raises:
            DumpError: It cannot be judged.
        """
        name, value = key.split(".")[1], self._dumps[self._rank][key]
        if name not in _GIVEN:
            raise DumpError("it communicates")
        ranks = _ranks_of(value)
        if self._rank not in ranks:
            raise DumpError("the dump does not say which ranks took part")
        number = self._calls(self._rank, name, ranks).index(key)
        given = [self._given(rank, name, ranks, number) for rank in ranks]
        output = load_value(self._directory, value["output"][0])
        expected = _expected(name, value, given, ranks.index(self._rank), ranks)
        results = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
        if len(results) != len(expected):
            raise DumpError("the ranks have collectives of other sizes")
        kind = _argument(value, _OPERATION[name], "op", "SUM") if name in _OPERATION else ""
        pairs = zip(results, expected, strict=True)
        return [_judged(result, parts, str(kind).rpartition(".")[2]) for result, parts in pairs]

    def _given(self, rank: int, name: str, ranks: Sequence[int], number: int) -> Any:
        """Return what `rank` gave to the collective that is `number` among those of this name and group."""
        keys = self._calls(rank, name, ranks)
        if number >= len(keys):
            raise DumpError(f"the dump of rank {rank} lacks it")
        place, word = _GIVEN[name]
        value = self._dumps[rank][keys[number]]
        given = value.get("input_args", [])
        form = given[place] if len(given) > place else value.get("input_kwargs", {}).get(word)
        return load_value(self._beside(rank), form)

    def _calls(self, rank: int, name: str, ranks: Sequence[int]) -> list[str]:
        if rank not in self._dumps:
            if not self._beside(rank).is_dir():
                raise DumpError(f"the dump of rank {rank} is not beside it")
            self._dumps[rank] = load_raw(self._beside(rank)).data
        found = [key for key in self._dumps[rank] if key.startswith(f"{COLLECTIVE}{name}.") and key.endswith(FORWARD)]
        return [key for key in found if _ranks_of(self._dumps[rank][key]) == ranks]

    def _beside(self, rank: int) -> Path:
        return self._directory if rank == self._rank else self._directory.parent / f"rank{rank}"


def _ranks_of(value: Mapping[str, Any]) -> list[int]:
    """Return the ranks of the group of a collective, in its order; [] if the dump does not say."""
    for form in (*value.get("input_args", []), *value.get("input_kwargs", {}).values()):
        if isinstance(form, dict) and "group_ranks" in form:
            return [int(rank) for rank in form["group_ranks"]]
    return list(range(int(value.get(EXTRA, {}).get("world_size", 0))))


def _argument(value: Mapping[str, Any], place: int, name: str, default: Any) -> Any:
    given = value.get("input_args", [])
    form = given[place] if len(given) > place else value.get("input_kwargs", {}).get(name)
    return form.get("value", default) if isinstance(form, dict) else default


def _expected(
    name: str, value: Mapping[str, Any], given: Sequence[Any], index: int, ranks: Sequence[int]
) -> list[list[Tensor]]:
    """Return, for each tensor that a rank is to have, the parts that are reduced to it, or the one that it is."""
    if name == "broadcast":
        source = _argument(value, 1, "src", None)
        if source not in ranks:
            raise DumpError("it does not say which rank sends")
        return [[given[ranks.index(source)]]]
    if name == "all_to_all_single" and _is_split(value):
        raise DumpError("it splits by sizes of its own")
    return _MADE[name](given, index)


def _is_split(value: Mapping[str, Any]) -> bool:
    named = value.get("input_kwargs", {})
    sizes = [*value.get("input_args", [])[2:4], named.get("output_split_sizes"), named.get("input_split_sizes")]
    return any(isinstance(one, list) and one for one in sizes)


def _judged(result: Tensor, parts: Sequence[Tensor], kind: str) -> Judgement:
    parts = [part.view(result.shape) if part.numel() == result.numel() else part for part in parts]
    if any(part.shape != result.shape or part.dtype != result.dtype for part in parts):
        raise DumpError("the ranks have tensors of other shapes or types")
    if kind in ("SUM", "AVG") and (result.is_floating_point() or result.is_complex()):
        total = RankSum(parts, 1 / len(parts) if kind == "AVG" else 1.0)
        return judge_gradient(result, total, unit_roundoff(result.dtype), family=Family.SUM)
    if kind in _EXACT:
        whole = functools.reduce(_EXACT[kind], parts)
    elif kind == "SUM":
        whole = functools.reduce(operator.add, parts)
    elif not kind:
        [whole] = parts
    else:
        raise DumpError(f"it reduces by {kind}")
    [judgement] = judge_call("clone", OperationCall(torch.clone, [whole], {}), result)
    return judgement
