"""`task: free_benchmark`: tries the calls of functions while training runs, without a reference run to compare with."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from trainermon.accuracy.calls import OperationCall
from trainermon.dump.debugger_config import DebuggerConfig
from trainermon.dump.files.records import BACKWARD
from trainermon.dump.function_names import unreplaced
from trainermon.dump.online.backward_calls import follow
from trainermon.dump.online.chosen_calls import ChosenCalls
from trainermon.dump.online.findings import FindingsFile
from trainermon.dump.online.observed_calls import RANDOM, ObservedCall, reason_to_skip
from trainermon.dump.online.places import innermost_place
from trainermon.dump.online.preheat import PeerErrors
from trainermon.dump.online.trials import Trials
from trainermon.dump.online.turns import Turns


class FreeBenchmark(ChosenCalls):
    """Tries each call of a torch function that its configuration chooses, after the call, and writes what is wrong.

    Only the outermost call counts, numbered as in a dump; calls in a backward, which repeat others, are not tried.
    Training keeps every bit. What goes wrong in here is counted, and training goes on.

    Args:
        config: The debugger's configuration.
        turns: Which calls are tried; it outlives a step.
        peers: What the CPU is off by; it does, too.
        findings: Where rows go.
    """

    def __init__(self, config: DebuggerConfig, turns: Turns, peers: PeerErrors, findings: FindingsFile) -> None:
        super().__init__(config, findings)
        self._max_elements = config.free_benchmark.max_elements
        self._is_backward = config.free_benchmark.fuzz_stage == BACKWARD
        self._turns = turns
        self._trials, self._peers = Trials(config.free_benchmark), peers
        self._written: set[Any] = set()
        self._begins, self._ends = self.contain(self._begin), self.contain(self._end)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call `func` once, with what it was called with, and return what it returns."""
        kwargs = kwargs or {}
        caller = sys._getframe(1)
        func = unreplaced(func, caller)
        observed = self._begins(func, args, kwargs, caller)
        result = func(*args, **kwargs)
        if observed is not None:
            self._ends(observed, result)
        return result

    def _begin(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], caller: Any
    ) -> ObservedCall | None:
        if torch._C._current_graph_task_id() != -1:
            return None
        chosen = self.chosen(function, args, caller)
        if chosen is None or not self._turns.next():
            return None
        begun = time.perf_counter()
        key, named = chosen
        try:
            return self._observed(key, named.name, OperationCall(function, args, kwargs, not named.is_torchs))
        finally:
            self._spend(begun)

    def _observed(self, key: str, name: str, call: OperationCall) -> ObservedCall | None:
        leaves = pytree.tree_leaves((call.args, call.kwargs))
        reason = reason_to_skip(name, call.function, leaves, self._max_elements)
        if reason:
            self._findings.skipped[reason] += 1
            return None
        return ObservedCall.begin(key, name, call, is_written=call.function in self._written)

    def _end(self, observed: ObservedCall, result: Any) -> None:
        begun = time.perf_counter()
        try:
            self._try(observed, result)
        finally:
            self._spend(begun)

    def _try(self, observed: ObservedCall, result: Any) -> None:
        if not observed.is_intact:
            self._written.add(observed.call.function)
            self._findings.skipped["it wrote to its arguments, which are copied from now on"] += 1
            return
        if observed.generators.have_moved:
            self._findings.skipped[RANDOM] += 1
            return
        line = innermost_place()
        if not self._is_backward:
            self._judge(observed, result, line)
        elif not follow(observed, result, self.contain(self._judge_backward, line)):
            self._findings.skipped["no gradient, or autocast"] += 1

    def _judge_backward(self, line: str, backward: ObservedCall) -> None:
        begun = time.perf_counter()
        try:
            if not backward.is_intact:
                self._findings.skipped["its inputs were overwritten before the backward"] += 1
                return
            self._judge(backward, backward.again(), line)
        finally:
            self._spend(begun)

    def _judge(self, observed: ObservedCall, result: Any, line: str) -> None:
        self._findings.num_calls += 1
        self._peers.watch(observed)
        for finding in self._trials.of_result(observed, result):
            judgement = self._peers.excused(finding.key, finding.judgement)
            self._findings.add(dataclasses.replace(finding, judgement=judgement, line=line))

    def _spend(self, begun: float) -> None:
        duration_s = time.perf_counter() - begun
        self._findings.duration_s += duration_s
        self._turns.spend(duration_s)
