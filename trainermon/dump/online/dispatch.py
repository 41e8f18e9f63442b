"""`AccuracyDispatch`: judges the operators of a block of code, forward and backward, below autograd."""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from trainermon.accuracy.calls import OperationCall, plain
from trainermon.accuracy.judge import Judgement, Status, judge_call
from trainermon.core.errors import ConfigError
from trainermon.core.strict import require
from trainermon.dump.files.records import BACKWARD, FORWARD
from trainermon.dump.online.blocks import FILES, SAVED_CALLS, DispatchedBlocks
from trainermon.dump.online.differences import passed
from trainermon.dump.online.findings import CallFinding
from trainermon.dump.online.observed_calls import ObservedCall, reason_to_skip, unobserved
from trainermon.dump.online.places import innermost_place
from trainermon.dump.online.trials import is_surely_right
from trainermon.dump.online.turns import Turns
from trainermon.hooks.guard import ContainedCall

logger = logging.getLogger("trainermon")

REFERENCES = ("cpu", "device64")
DUMPS = ("off", "failed", "all")
MAX_SAVED = 100
MAX_KEPT = 1000
_FUSED_ATTENTION = "_scaled_dot_product"


class AccuracyDispatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Judges what operators give, in a `with` block around forward, backward and optimizer, or any of them.

        with AccuracyDispatch(sample=100, dump_path="dispatch") as dispatch:
            train_step()
        print(dispatch.failed)

    The block computes what it computes without: operators run once, as they are, and are judged on copies. Views, and
    operators that draw random numbers or return memory as it is, are left out by what their schema says. What goes
    wrong in here is counted, and costs that verdict. Inside compiled regions operators are not seen.

    Args:
        reference: `device64`: a finer run on the same device comes first, and only what it does not settle is judged on
            the CPU; `cpu`: everything is judged there.
        sample: One operator in this many is judged, another one in the next block; from 20 on, all of ten blocks in
            the first of them, and the others cost nothing.
        budget_ms: A block spends about this much; the next one continues where it ended. 0: no limit.
        only: Parts of operators' names (`aten.mm`); none: all.
        dump: Which calls' inputs and results are saved as files for `torch.load`: `off`, `failed`, `all`; 100 at most.
        dump_path: Folder of `rank<R>`, in which `accuracy_dispatch.csv`, `.json` and `calls/` are, with all blocks of
            this process; what an earlier run left there is replaced.
        report: `failed` writes rows for what is not a pass, `all` for every result.
        max_elements: Operators whose tensors have more elements together are left out.

    Attributes:
        failed: Errors and warnings, 1 000 at most.

    Raises:
        ConfigError: An argument is none of the possible ones.
    """

    supports_higher_order_operators = True

    def __init__(  # noqa: PLR0913  # keywords that users write out
        self,
        reference: str = "device64",
        *,
        sample: int = 1,
        budget_ms: float = 0.0,
        only: Sequence[str] = (),
        dump: str = "failed",
        dump_path: str | Path = "accuracy_dispatch",
        report: str = "failed",
        max_elements: int = 1 << 26,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        require(reference in REFERENCES, "reference", reference, " or ".join(REFERENCES))
        require(dump in DUMPS, "dump", dump, ", ".join(DUMPS))
        require(report in ("failed", "all"), "report", report, "failed or all")
        require(sample > 0, "sample", sample, "a whole number above 0")
        require(budget_ms >= 0, "budget_ms", budget_ms, "0 (no limit) or more milliseconds")
        self.failed: list[CallFinding] = []
        self.tripped = False
        self._has_told = False
        self._reference, self._only, self._dump = reference, tuple(only), dump
        self._max_elements, self._takes_all = max_elements, report == "all"
        self._rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        self._folder = Path(dump_path) / f"rank{self._rank}"
        self._turns = Turns(every=sample, budget_ms=budget_ms)
        self._pid = os.getpid()
        self._blocks = DispatchedBlocks.of(self._folder, self._rank)
        self._findings, self._num_wrong = self._blocks.findings, 0
        self._begins, self._ends = ContainedCall(self, self._begin), ContainedCall(self, self._end)

    def __enter__(self) -> AccuracyDispatch:
        """Begin a block; several may follow one another."""
        self._turns.begin_step()
        ContainedCall(self, partial(self._blocks.begin, takes_all=self._takes_all))()
        self._num_wrong = self._findings.counts[Status.ERROR.value]
        if not self._turns.is_idle:
            super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        """End the block, write the summary, and say in the log if something was wrong."""
        if not self._turns.is_idle:
            super().__exit__(*error)  # type: ignore[no-untyped-call]
            ContainedCall(self, self._close)()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func` once, and judge what it gives."""
        kwargs = kwargs or {}
        written = self._begins(func, args, kwargs)
        result = func(*args, **kwargs)
        if written is not None:
            self._ends(written, result)
        return result

    def trip(self, error: BaseException) -> None:
        """Count an operator that could not be judged or written because of `error`; the first is told."""
        if not self._has_told:
            self._has_told = True
            logger.warning("AccuracyDispatch: a result is not judged, or not written into %s: %s", self._folder, error)
        self._findings.skipped[f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:120]}"] += 1

    def _begin(self, func: Any, args: Any, kwargs: Any) -> _RunningOperator | None:
        schema = getattr(func, "_schema", None)
        if schema is None or os.getpid() != self._pid or not self._is_wanted(func) or not self._turns.next():
            return None
        begun = time.perf_counter()
        number = self._blocks.numbers[str(func)]
        self._blocks.numbers[str(func)] += 1
        leaves = pytree.tree_leaves((args, kwargs))
        reason = _reason(func) or reason_to_skip(_name(func), func, leaves, self._max_elements)
        if reason:
            self._findings.skipped[reason] += 1
            return None
        call = OperationCall(func, args, kwargs, func.namespace != "aten")
        writes = _written_by(schema) if schema.is_mutable else ()
        observed = ObservedCall.begin(f"{func}.{number}", _name(func), call, is_written=schema.is_mutable)
        self._spend(begun)
        return _RunningOperator(observed, writes, args, kwargs)

    def _is_wanted(self, func: Any) -> bool:
        return not self._only or any(part in str(func) for part in self._only)

    def _end(self, running: _RunningOperator, result: Any) -> None:
        begun = time.perf_counter()
        self._findings.num_calls += 1
        observed, output = running.finished(result)
        place = innermost_place()
        with unobserved(observed.device), torch.no_grad(), observed.generators.repeated():
            judgements = self._judged(observed, output)
        stage = FORWARD if torch._C._current_graph_task_id() == -1 else BACKWARD
        found = [
            CallFinding(
                key=observed.key, mode=self._reference, stage=stage, number=number, judgement=judgement, line=place
            )
            for number, judgement in enumerate(judgements)
        ]
        is_failed = any(one.judgement.status in (Status.ERROR, Status.WARNING) for one in found)
        if is_failed and len(self.failed) < MAX_KEPT:
            self.failed += [one for one in found if one.judgement.status in (Status.ERROR, Status.WARNING)]
        self._spend(begun)
        begun = time.perf_counter()
        if self._dump == "all" or (self._dump == "failed" and is_failed):
            self._save(observed, output)
        for one in found:
            self._findings.add(one)
        self._spend(begun)

    def _judged(self, observed: ObservedCall, output: Any) -> list[Judgement]:
        call = observed.call
        if self._reference == "cpu":
            call, output = _on_cpu(call), pytree.tree_map(_plain_leaf, output)
        if not self._takes_all and is_surely_right(observed.name, call, output):
            return [passed(leaf) for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
        return judge_call(observed.name, call, output)

    def _save(self, observed: ObservedCall, output: Any) -> None:
        if self._blocks.num_saved >= MAX_SAVED:
            return
        self._blocks.num_saved += 1
        folder = self._folder / SAVED_CALLS
        folder.mkdir(parents=True, exist_ok=True)
        kept = {"args": list(observed.call.args), "kwargs": dict(observed.call.kwargs), "output": output}
        name = observed.key.replace("/", "_")
        torch.save(pytree.tree_map(_plain_leaf, kept), folder / f"{name}.pt")

    def _spend(self, begun: float) -> None:
        duration_s = time.perf_counter() - begun
        self._findings.duration_s += duration_s
        self._turns.spend(duration_s)

    def _close(self) -> None:
        self._findings.close()
        wrong = self._findings.counts[Status.ERROR.value] - self._num_wrong
        if wrong:
            logger.warning("AccuracyDispatch: %d wrong results; see %s", wrong, self._folder / FILES[0])


@dataclasses.dataclass(frozen=True, slots=True)
class _RunningOperator:
    """An operator that runs. What it writes to is named by positions and keywords, and judged as what it gives."""

    observed: ObservedCall
    writes: tuple[int | str, ...]
    args: Any
    kwargs: Any

    def finished(self, result: Any) -> tuple[ObservedCall, Any]:
        """Return the call, and all that it gave."""
        if not self.writes:
            output = result[0] if self.observed.name.startswith(_FUSED_ATTENTION) and _is_forward(self) else result
            return self.observed, output
        function = _Written(self.observed.call.function, self.writes)
        call = self.observed.call._replace(function=function)
        return dataclasses.replace(self.observed, call=call), function.of(self.args, self.kwargs)


@dataclasses.dataclass(frozen=True, slots=True)
class _Written:
    """An operator that returns what it has written to."""

    operator: Callable[..., Any]
    writes: tuple[int | str, ...]

    def __call__(self, *args: Any, **kwargs: Any) -> list[Any]:
        self.operator(*args, **kwargs)
        return self.of(args, kwargs)

    def of(self, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
        found = [args[one] if len(args) > one else None for one in self.writes if isinstance(one, int)]
        return [*found, *(kwargs.get(one) for one in self.writes if isinstance(one, str))]


def _written_by(schema: Any) -> tuple[int | str, ...]:
    """Return the positions and keywords of the arguments that an operator writes to."""
    found: list[int | str] = []
    for place, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found += [argument.name] if argument.kwarg_only else [place, argument.name]
    return tuple(found)


def _reason(func: Any) -> str:
    """Return why an operator is not judged, as far as its schema tells; "" if it is."""
    if torch.Tag.nondeterministic_seeded in func.tags:
        return "random or undefined"
    if func.is_view:
        return "a view"
    return ""


def _name(func: Any) -> str:
    return str(func._schema.name).partition("::")[2]


def _is_forward(running: _RunningOperator) -> bool:
    return not running.observed.name.endswith("backward")


def _on_cpu(call: OperationCall) -> OperationCall:
    args, kwargs = pytree.tree_map(_plain_leaf, (list(call.args), dict(call.kwargs)))
    return call._replace(args=args, kwargs=kwargs)


def _plain_leaf(value: Any) -> Any:
    if isinstance(value, torch.device):
        return torch.device("cpu")
    return plain(value) if isinstance(value, Tensor) else value


class PtdbgDispatch(AccuracyDispatch):  # type: ignore[no-untyped-call]
    """`AccuracyDispatch` with msprobe's arguments.

    Args:
        dump_mode: `off`; `all`; `list`, the operators of `api_list`; `auto`, those that failed.
        api_list: Names of aten operators, with dump_mode `list`.
        debug: Rows for every result, not only for what failed.
        dump_path: A folder that exists; results go to `msprobe_<tag>_<time>/rank<R>` in it.
        tag: Part of that name.
        process_num: Without effect: nothing is handed to other processes.

    Raises:
        ConfigError: An argument is none of the possible ones.
    """

    def __init__(  # noqa: PLR0913, PLR0917  # msprobe's
        self,
        dump_mode: str = "off",
        api_list: Sequence[str] | None = None,
        debug: bool = False,  # noqa: FBT001, FBT002  # msprobe's
        dump_path: str | Path | None = None,
        tag: str | None = None,
        process_num: int = 0,
    ) -> None:
        require(dump_mode in ("off", "all", "list", "auto"), "dump_mode", dump_mode, "off, all, list or auto")
        listed: Any = api_list if api_list is not None else []
        number: Any = process_num
        text: Any = tag
        texts = isinstance(listed, list) and all(isinstance(one, str) for one in listed)
        require(texts, "api_list", listed, "a list of operators' names")
        require(isinstance(debug, bool), "debug", debug, "True or False")
        require(text is None or (isinstance(text, str) and text.replace("_", "").isalnum()), "tag", tag, "a plain text")
        is_number = isinstance(number, int) and not isinstance(number, bool) and number >= 0
        require(is_number, "process_num", process_num, "0 or more")
        if dump_path is None or not Path(dump_path).is_dir():
            raise ConfigError(f"dump_path: found {dump_path!r}, expected a folder that exists")
        unknown = [one for one in listed if not hasattr(torch.ops.aten, one)]
        require(not unknown, "api_list", unknown, "names of torch.ops.aten")
        if process_num:
            logger.info("PtdbgDispatch: process_num has no effect: nothing is handed to other processes")
        folder = Path(dump_path) / "_".join(["msprobe", *([tag] if tag else []), _stamp()])
        kinds = {"off": "off", "all": "all", "list": "all", "auto": "failed"}
        super().__init__(dump=kinds[dump_mode], dump_path=folder, report="all" if debug else "failed")
        self._listed = frozenset(listed) if dump_mode == "list" else None

    def _save(self, observed: ObservedCall, output: Any) -> None:
        if self._listed is None or observed.name in self._listed:
            super()._save(observed, output)


def _stamp() -> str:
    """Return the present time down to the microsecond, so that two blocks of one second have folders of their own."""
    now = time.time()
    return time.strftime("%Y%m%d%H%M%S", time.localtime(now)) + f"{int(now % 1 * 1e6):06d}"
