"""Collectives and messages of a dump: does each rank have what the dumps of all ranks say it should?"""

from __future__ import annotations

import functools
import operator
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

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
from trainermon.dump.followed_calls import MESSAGES
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
    "reduce": (0, "tensor"),
    "gather": (0, "tensor"),
    "scatter": (1, "scatter_list"),
}
# The place and name of what it gets, where that is not the first.
_GOT = {"gather": (1, "gather_list")}
# The place and name of the rank that alone sends, or alone gets something.
_SENDER = {"broadcast": (1, "src"), "scatter": (2, "src")}
_RECEIVER = {"reduce": (1, "dst"), "gather": (2, "dst")}
# The place of the operation of those that reduce.
_OPERATION = {"all_reduce": 1, "reduce": 2, "reduce_scatter": 2, "reduce_scatter_tensor": 2}
_EXACT: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {"MAX": torch.maximum, "MIN": torch.minimum}
# By collective what the rank at a place in the group is to have: for each tensor its parts.
_MADE: Mapping[str, Callable[[Sequence[Any], int], list[list[Tensor]]]] = {
    "all_reduce": lambda given, _: [list(given)],
    "reduce": lambda given, _: [list(given)],
    "gather": lambda given, _: [[one] for one in given],
    "all_gather": lambda given, _: [[one] for one in given],
    "all_gather_into_tensor": lambda given, _: [[torch.cat([one.flatten() for one in given])]],
    "reduce_scatter": lambda given, index: [[parts[index] for parts in given]],
    "reduce_scatter_tensor": lambda given, index: [[one.flatten().chunk(len(given))[index] for one in given]],
    "all_to_all": lambda given, index: [[parts[index]] for parts in given],
    "all_to_all_single": lambda given, index: [[torch.cat([parts[index] for parts in given])]],
}
_BATCH = "batch_isend_irecv"


class _Message(NamedTuple):
    """What one rank sent to another, or got from it.

    `form` is the JSON form of the tensor, `channel` group and tag: in each, messages of two ranks keep their order.
    `peer` is None where any rank may have sent it.
    """

    key: str
    is_sent: bool
    peer: int | None
    channel: tuple[Any, Any]
    form: Any


class RankShare(NamedTuple):
    """What one rank of a group has to do with a collective.

    Attributes:
        given: What it gives: a tensor, or a list of them.
        got: The tensors that it got.
        parts: For each of these the tensors that are reduced to it, or the one that it is to be.
        operation: `SUM`, `MAX` … of collectives that reduce; else "".
        root: The rank that alone sends, or alone gets something, by its place in the group; 0 if there is none.
    """

    given: Any
    got: list[Tensor]
    parts: list[list[Tensor]]
    operation: str
    root: int

    @property
    def judgements(self) -> list[Judgement]:
        """A judgement for each tensor that it got."""
        pairs = zip(self.got, self.parts, strict=True)
        return [_judged(result, parts, self.operation) for result, parts in pairs]


class CollectiveChecker:
    """Judges collectives and messages in the dump of one rank; the dumps of the others lie beside it.

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
        if name in MESSAGES or name == _BATCH:
            return self._received(key)
        ranks = self._group(name, value)
        if name in _RECEIVER and _rank_named(value, _RECEIVER[name], ranks) != self._rank:
            raise DumpError("another rank has its result")
        number = self._calls(self._rank, name, ranks).index(key)
        given = [self._given(rank, name, ranks, number) for rank in ranks]
        return self._share(self._rank, key, ranks, given).judgements

    def shares(self, key: str) -> Iterator[RankShare]:
        """Yield what each rank of its group gave to the collective `key` of this rank, and got, in the group's order.

        Raises:
            DumpError: A dump of a rank is not beside this one, or lacks the call.
        """
        name = key.split(".")[1]
        ranks = self._group(name, self._dumps[self._rank][key])
        number = self._calls(self._rank, name, ranks).index(key)
        given = [self._given(rank, name, ranks, number) for rank in ranks]
        for rank in ranks:
            yield self._share(rank, self._calls(rank, name, ranks)[number], ranks, given)

    def _group(self, name: str, value: Mapping[str, Any]) -> list[int]:
        if name not in _GIVEN:
            raise DumpError("it communicates")
        ranks = _ranks_of(value)
        if self._rank not in ranks:
            raise DumpError("the dump does not say which ranks took part")
        return ranks

    def _share(self, rank: int, key: str, ranks: Sequence[int], given: Sequence[Any]) -> RankShare:
        """Return what `rank` has to do with the collective that its dump calls `key`, and to which all gave `given`."""
        name, value = key.split(".")[1], self._data(rank)[key]
        place = ranks.index(rank)
        alone = _SENDER.get(name) or _RECEIVER.get(name)
        root = _rank_named(value, alone, ranks) if alone else ranks[0]
        if root not in ranks:
            raise DumpError("it does not say which rank sends")
        kind = str(_argument(value, _OPERATION[name], "op", "SUM")).rpartition(".")[2] if name in _OPERATION else ""
        if name in _RECEIVER and root != rank:
            return RankShare(given[place], [], [], kind, ranks.index(root))
        output = load_value(self._beside(rank), _got(name, value))
        expected = _expected(name, value, given, place, ranks)
        results = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
        if len(results) != len(expected):
            raise DumpError("the ranks have collectives of other sizes")
        return RankShare(given[place], results, expected, kind, ranks.index(root))

    def _given(self, rank: int, name: str, ranks: Sequence[int], number: int) -> Any:
        """Return what `rank` gave to the collective that is `number` among those of this name and group."""
        keys = self._calls(rank, name, ranks)
        if number >= len(keys):
            raise DumpError(f"the dump of rank {rank} lacks it")
        place, word = _GIVEN[name]
        value = self._dumps[rank][keys[number]]
        given = load_value(self._beside(rank), _form(value, place, word))
        return _split(given, value, len(ranks)) if name == "all_to_all_single" else given

    def _received(self, key: str) -> list[Judgement]:
        """Return a judgement of each tensor that other ranks sent to this one in the call `key`."""
        mine = self._messages(self._rank)
        got = [one for one in mine if one.key == key and not one.is_sent]
        if not got:
            raise DumpError("it only sends")
        return [self._judged_message(one, mine) for one in got]

    def _judged_message(self, message: _Message, mine: Sequence[_Message]) -> Judgement:
        channel, sender = message.channel, message.peer
        if sender is None or any(one.peer is None and one.channel == channel for one in mine):
            raise DumpError("the dump does not say which rank sends")
        sent_by = [one for one in self._messages(sender) if one.is_sent]
        theirs = _as_begun([one for one in sent_by if (one.peer, one.channel) == (self._rank, channel)])
        ours = _as_begun([one for one in mine if not one.is_sent and (one.peer, one.channel) == (sender, channel)])
        if len(theirs) != len(ours):
            raise DumpError(f"the dump of rank {sender} has not as many messages to this one")
        sent = theirs[next(number for number, one in enumerate(ours) if one is message)]
        return _judged(load_value(self._directory, message.form), [load_value(self._beside(sender), sent.form)], "")

    def _messages(self, rank: int) -> list[_Message]:
        calls = ((key, value) for key, value in self._data(rank).items() if key.startswith(COLLECTIVE))
        return [one for key, value in calls if key.endswith(FORWARD) for one in _messages_of(key, value, rank)]

    def _calls(self, rank: int, name: str, ranks: Sequence[int]) -> list[str]:
        data = self._data(rank)
        found = [key for key in data if key.startswith(f"{COLLECTIVE}{name}.") and key.endswith(FORWARD)]
        return [key for key in found if _ranks_of(data[key]) == ranks]

    def _data(self, rank: int) -> Mapping[str, Any]:
        if rank not in self._dumps:
            if not self._beside(rank).is_dir():
                raise DumpError(f"the dump of rank {rank} is not beside it")
            self._dumps[rank] = load_raw(self._beside(rank)).data
        return self._dumps[rank]

    def _beside(self, rank: int) -> Path:
        return self._directory if rank == self._rank else self._directory.parent / f"rank{rank}"


def _ranks_of(value: Mapping[str, Any]) -> list[int]:
    """Return the ranks of the group of a collective, in its order; [] if the dump does not say."""
    for form in (*value.get("input_args", []), *value.get("input_kwargs", {}).values()):
        if isinstance(form, dict) and "group_ranks" in form:
            return [int(rank) for rank in form["group_ranks"]]
    return list(range(int(value.get(EXTRA, {}).get("world_size", 0))))


def _form(value: Mapping[str, Any], place: int, name: str) -> Any:
    given = value.get("input_args", [])
    return given[place] if len(given) > place else value.get("input_kwargs", {}).get(name)


def _argument(value: Mapping[str, Any], place: int, name: str, default: Any) -> Any:
    form = _form(value, place, name)
    return form.get("value", default) if isinstance(form, dict) else default


def _expected(
    name: str, value: Mapping[str, Any], given: Sequence[Any], index: int, ranks: Sequence[int]
) -> list[list[Tensor]]:
    """Return, for each tensor that a rank is to have, the parts that are reduced to it, or the one that it is."""
    if name not in _SENDER:
        return _MADE[name](given, index)
    sender = _rank_named(value, _SENDER[name], ranks)
    if sender not in ranks:
        raise DumpError("it does not say which rank sends")
    sent = given[ranks.index(sender)]
    return [[sent[index] if name == "scatter" else sent]]


def _rank_named(value: Mapping[str, Any], argument: tuple[int, str], ranks: Sequence[int]) -> Any:
    """Return the rank that a collective names as its only sender or receiver; None: it names none."""
    place, word = argument
    in_group = _argument(value, len(value.get("input_args", [])), f"group_{word}", None)
    return ranks[in_group] if isinstance(in_group, int) else _argument(value, place, word, 0 if word == "dst" else None)


def _got(name: str, value: Mapping[str, Any]) -> Any:
    """Return the JSON form of what a collective left in the tensors that it was given to fill."""
    place, word = _GOT.get(name, (0, ""))
    if not place:
        return value["output"][0]
    given = [*enumerate(value.get("input_args", [])), *value.get("input_kwargs", {}).items()]
    filled = [where for where, form in given if isinstance(form, list) or (isinstance(form, dict) and "dtype" in form)]
    return next(value["output"][number] for number, where in enumerate(filled) if where in (place, word))


def _split(given: Tensor, value: Mapping[str, Any], ranks: int) -> Sequence[Tensor]:
    """Return what a rank sends to each in `all_to_all_single`."""
    sizes = _form(value, 3, "input_split_sizes")
    return torch.split(given, [int(size["value"]) for size in sizes]) if sizes else given.chunk(ranks)


def _as_begun(messages: Sequence[_Message]) -> list[_Message]:
    """Return messages as they began: one that is waited for late stands late in a dump, but its number does not."""
    places = [one.key.split(".")[1:3] for one in messages]
    begun: dict[str, list[_Message]] = defaultdict(list)
    for (name, _), one in sorted(zip(places, messages, strict=True), key=lambda pair: int(pair[0][1]), reverse=True):
        begun[name].append(one)
    return [begun[name].pop() for name, _ in places]


def _messages_of(key: str, value: Mapping[str, Any], rank: int) -> Iterator[_Message]:
    """Yield what a call of `send`, `recv` and their like, or of a batch of these, has sent and got."""
    name = key.split(".")[1]
    if name in MESSAGES:
        group, tag = (value.get("input_kwargs", {}).get(word) or {} for word in ("group", "tag"))
        others = [one for one in group.get("group_ranks", ()) if one != rank]
        peer = _argument(value, 1, "peer", others[0] if len(others) == 1 else None)
        is_sent = name.endswith("send")
        form = value["input_args" if is_sent else "output"][0]
        yield _Message(key, is_sent, peer, (group.get("group_id"), tag.get("value", 0)), form)
    elif name == _BATCH:
        given, got = _form(value, 0, "p2p_op_list"), value["output"][0]
        for before, after in zip(given, got, strict=True):
            is_sent = before["op"] == "isend"
            form = (before if is_sent else after)["tensor"]
            yield _Message(key, is_sent, before["peer"], (before["group_id"], before["tag"]), form)


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
