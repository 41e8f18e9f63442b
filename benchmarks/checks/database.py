"""Calls of torch's operator database in two halves: constants may be fitted on one, and are judged on the other."""

from __future__ import annotations

import hashlib
import importlib
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from trainermon.accuracy.calls import OperationCall
from trainermon.accuracy.families import Family
from trainermon.accuracy.judge import family_of_call

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.complex64)


class DatabaseCall(NamedTuple):
    """A call of an operation of the database.

    Attributes:
        name: The operation's name, `nn.functional.gelu`.
        key: Name, variant, type and number of the sample, with bars between.
        call: The operation with a sample of its arguments.
    """

    name: str
    key: str
    call: OperationCall

    @property
    def is_held_out(self) -> bool:
        """Whether no constant may be fitted on it: half of the calls, and all in float16."""
        return "|float16|" in self.key or not hashlib.sha256(self.key.encode()).digest()[-1] & 1


def database_calls(dtype: torch.dtype, samples: int, every: int = 1) -> Iterator[DatabaseCall]:
    """Yield up to `samples` calls of every `every`-th operation in one type, without random and undefined ones."""
    for op in _operations()[::every]:
        if dtype not in op.supported_dtypes("cpu") or op.name.startswith("jiterator"):
            continue
        torch.manual_seed(0)
        try:
            # `op.sample_inputs` looks through the whole stack, with its sources, for every sample
            found = list(itertools.islice(op.sample_inputs_func(op, "cpu", dtype, requires_grad=False), samples))
        except Exception:  # noqa: BLE001  # samples that need a library which is not here, or another device
            continue
        for number, sample in enumerate(found):
            args, kwargs = pytree.tree_map_only(Tensor, torch.clone, ([sample.input, *sample.args], sample.kwargs))
            call = OperationCall(op.op, args, kwargs)
            if family_of_call(op.name, call) not in (Family.RANDOM, Family.UNDEFINED):
                kind = str(dtype).removeprefix("torch.")
                yield DatabaseCall(op.name, f"{op.name}|{op.variant_test_name}|{kind}|{number}", call)


def _operations() -> list[Any]:
    with torch.backends.__allow_nonbracketed_mutation():
        return list(importlib.import_module("torch.testing._internal.common_methods_invocations").op_db)
