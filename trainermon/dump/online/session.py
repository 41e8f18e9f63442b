"""A free benchmark of one rank in one step, with the methods of a dump's recording, so that a debugger can start it."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from trainermon.dump.debugger_config import DebuggerConfig
from trainermon.dump.files.records import DumpInfo
from trainermon.dump.online.findings import CSV_FILE, FindingsFile
from trainermon.dump.online.fixed_calls import FixedCalls
from trainermon.dump.online.free_benchmark import FreeBenchmark
from trainermon.dump.online.preheat import PeerErrors
from trainermon.dump.online.turns import Turns

logger = logging.getLogger("trainermon")


class FreeBenchmarkStep:
    """Tries calls between `begin` and `end`, and writes what it finds into `directory`.

    `config` says what is tried, `info` has step and rank, `turns` and `peers` go on from step to step.
    """

    num_overflows = 0

    def __init__(
        self, directory: Path, config: DebuggerConfig, info: DumpInfo, turns: Turns, peers: PeerErrors
    ) -> None:
        self._config, self._turns, self._peers = config, turns, peers
        self._baseline = directory.parent.parent / f"free_benchmark_baseline_rank{info.rank or 0}.json"
        takes_all = config.free_benchmark.report == "all"
        self._findings = FindingsFile(directory, rank=info.rank or 0, step=info.step or 0, takes_all=takes_all)
        fixes = config.free_benchmark.fixes
        self._mode = (
            FixedCalls(config, self._findings) if fixes else FreeBenchmark(config, turns, peers, self._findings)
        )
        self._directory = directory
        self._stance: Any = None
        self._is_on = False
        turns.begin_step()
        peers.begin_step()
        self._is_idle = turns.is_idle and not fixes

    @property
    def is_on(self) -> bool:
        """Whether calls are tried now."""
        return self._is_on

    def begin(self, _models: Any = None, _custom: Sequence[Any] = (), **_how: Any) -> None:
        """Start to try calls, whichever module makes them."""
        if self._is_on:
            return
        self._is_on = True
        if self._is_idle:
            return
        if "torch._dynamo" in sys.modules:  # compiled code runs past function modes, or with a mode compiled in
            self._stance = torch.compiler.set_stance("force_eager")
        self._mode.attach()

    def end(self) -> None:
        """Stop, and write the summary."""
        if not self._is_on:
            return
        self._is_on = False
        if not self._is_idle:
            self._mode.detach()
        if self._stance is not None:
            self._stance.__exit__(None, None, None)
            self._stance = None
        self._findings.close()
        self._peers.write(self._baseline)

    def close(self) -> None:
        """Stop for good; say in the log if something is wrong."""
        self.end()
        counts = self._findings.counts
        if counts["error"]:
            place = self._directory / CSV_FILE
            logger.warning("free_benchmark: %d wrong results, %d calls tried; see %s",
                           counts["error"], self._findings.num_calls, place)  # fmt: skip

    def stop_in_child(self) -> None:
        """Try nothing in a forked child, and write nothing there: the files belong to another process."""
        self._mode.stop_in_child()

    def save(self, variable: Any, name: str, with_gradient: bool) -> None:  # noqa: FBT001  # as a recording has it
        """Do nothing: variables belong to level debug."""
