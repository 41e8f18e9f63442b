"""The configuration of a `PrecisionDebugger`: msprobe's config.json, read strictly."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainermon.core.errors import ConfigError
from trainermon.core.strict import build, require
from trainermon.core.values import DumpTask, GradientLevel, SourceMode
from trainermon.dump.online.options import JUDGING, FreeBenchmarkConfig, Perturbation

FREE_BENCHMARK = "free_benchmark"
GRAD_PROBE = "grad_probe"
TASKS = (*DumpTask, "structure", "overflow_check", FREE_BENCHMARK, GRAD_PROBE)
LEVELS = ("L0", "L1", "mix", "debug")
DATA_MODES = ("all", "forward", "backward", "input", "output")
SUMMARY_MODES = ("statistics", "md5", "crc32", "xor")
RISK_LEVELS = ("ALL", "CORE", "FOCUS")
FILE_FORMATS = ("pt", "npy")
SIGN_FORMATS = ("bits", "npy")
_MSPROBE_KEYS = {"grad_level": "level", "param_list": "params"}
MAX_NUMBER = 1_000_000
MAX_SEED = 2**32 - 1
MIB = 1 << 20

_JUDGED = "dump with task tensor; `trainermon check run DUMP` then judges every call against float64"
OTHER_TASKS: Mapping[str, str] = {
    "acc_check": _JUDGED,
    "run_ut": _JUDGED,
    "diff_check": "dump both runs with summary_mode md5, and use `trainermon compare`",
    "nan_check": "task statistics counts NaN and Inf of every tensor; `trainermon diagnose` names the first",
}
"""Tasks of msprobe that are none here, and what to do instead."""

OVERFLOW_NOTE = (
    "task overflow_check keeps the statistics of every step in which a call gives NaN or Inf, and stops no training; "
    "`trainermon diagnose DUMP_PATH` names the first such call, and TrainerMon finds it without a dump"
)

WITHOUT_EFFECT: Mapping[str, str] = {
    "precision": "statistics are always accumulated in float64",
    "bench_path": "compare the finished dumps by `trainermon compare`",
    "diff_nums": "it belongs to bench_path",
    "request_id": "it belongs to inference",
    "load": "nothing that was dumped is fed into a model",
    "enable_dataloader": "steps end where the script calls step(), whatever loads the data",
    "check_mode": "NaN and Inf are counted in what every call returns, on any device",
    "online_run_ut": "`trainermon check follow DUMP_PATH --push tls://HOST:PORT` has calls run on another host",
    "acl_config": "there is no level of NPU kernels",
}
"""Keys of msprobe that are accepted and change nothing, and why."""

_WITH_ONLINE = ("nfs_path", "host", "port", "tls_path", "online_run_ut_recompute")
"""Keys that belong to `online_run_ut`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorSlice:
    """Of tensors that have `size` elements along `dim`, only those from `begin` up to `end` are saved."""

    dim: int
    size: int
    begin: int
    end: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class GradientProbeConfig:
    """What task grad_probe writes of each gradient.

    Attributes:
        level: `L0` the CRC-32 of the elements, `L1` their signs, `L2` signs and distribution; extremes and norm always.
        params: Parameters, as names, name prefixes or `*` patterns; none: all.
        bounds: Elements are counted in `(-inf, b0]`, `(b0, b1]` … `(bn, inf)`; rising.
        sign_format: `bits`, files of bitmaps alone, or `npy`, msprobe's files of booleans beside them.
    """

    level: GradientLevel = GradientLevel.L1
    params: tuple[str, ...] = ()
    bounds: tuple[float, ...] = (-1.0, 0.0, 1.0)
    sign_format: str = "bits"

    def __post_init__(self) -> None:
        rises = all(low < high for low, high in itertools.pairwise(self.bounds))
        require(rises, "grad_probe.bounds", list(self.bounds), "numbers that rise")
        require(self.sign_format in SIGN_FORMATS, "grad_probe.sign_format", self.sign_format, "bits or npy")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DebuggerConfig:
    """The configuration of a dump: what is recorded, when, and where it is written.

    Attributes:
        task: `statistics`, `tensor` (the tensors too), `structure` (names, stacks and nesting alone),
            `overflow_check` (the statistics of steps in which a call gives NaN or Inf), `free_benchmark` (nothing is
            recorded; calls are tried while they run), or `grad_probe` (numbers and signs of gradients, see `monitor`).
        dump_path: Folder of `step<N>/rank<R>`.
        level: `L0` modules, `L1` calls of torch functions, `mix` both, `debug` what `save` is given.
        rank: Ranks that dump; none: all. Numbers, or `"a-b"` for a range with both ends.
        step: Steps that are dumped, likewise.
        step_interval: Of these, those whose number is a multiple of it.
        max_pending: A step is skipped, and counted, while so many steps wait in `dump_path`; 0: no limit. For
            `trainermon check follow`, which deletes what it has judged.
        dump_enable: True or False: the file is read again at each `start` when it has changed, and False there stops
            the dump. None: it is read once.
        extra_info: Whether stack.json, construct.json and sources.json are written.
        source: What sources.json keeps of the code that ran: `functions` that stacks name, their `files`, or `off`.
        async_dump: Whether tensors are copied on their device at once and written to disk at `stop`.
        risk_level: Which functions L1 records: `ALL`, `FOCUS` (all but those that only move or convert), `CORE` (those
            that multiply, normalise or communicate). Only without `scope` and `list`.
        custom_op_namespaces: Calls of `torch.ops.<namespace>` are recorded for these; none: for all.
        scope: None, or the two full names between which everything is recorded, both included.
        list: Parts of names; none: all.
        data_mode: Directions and sides that are recorded.
        summary_mode: `statistics`, or `md5` and `crc32`, which add the CRC-32 of the bytes.
        tensor_list: With task statistics: the tensors of entries whose name has one of these parts are saved too.
        slice: Saves parts of tensors.
        max_mb: Beyond this size a rank saves no more tensors in a step; statistics go on.
        max_async_mb: Beyond this much waiting for `stop`, `async_dump` writes at once.
        file_format: `pt`, files of torch, or `npy`, files of numpy, in which bfloat16 and 8-bit floats are float32.
        overflow_nums: With task overflow_check: after the step in which this many calls have given NaN or Inf nothing
            more is recorded; -1: no end.
        seed: Given to `seed_all` when the debugger is made.
        is_deterministic: Likewise, as its `mode`; without either nothing is seeded.
        free_benchmark: What task free_benchmark does with the calls that `scope` and `list` choose.
        grad_probe: What task grad_probe writes of each gradient.
        flush_s: How long entries may wait to be written, and so what a killed process may lose; 0: nothing (on an
            accelerator: what the device has not reported yet).
    """

    task: str = "statistics"
    dump_path: str = ""
    level: str = "L1"
    rank: tuple[int, ...] = ()
    step: tuple[int, ...] = ()
    step_interval: int = 1
    max_pending: int = 0
    dump_enable: bool | None = None
    extra_info: bool = True
    source: SourceMode = SourceMode.FUNCTIONS
    async_dump: bool = False
    risk_level: str = "FOCUS"
    custom_op_namespaces: tuple[str, ...] = ()
    scope: tuple[str, ...] = ()
    list: tuple[str, ...] = ()
    data_mode: tuple[str, ...] = ("all",)
    summary_mode: str = "statistics"
    tensor_list: tuple[str, ...] = ()
    slice: tuple[TensorSlice, ...] = ()
    file_format: str = "pt"
    overflow_nums: int = 1
    seed: int | None = None
    is_deterministic: bool | None = None
    max_mb: float = 4096.0
    max_async_mb: float = 1024.0
    flush_s: float = 0.25
    free_benchmark: FreeBenchmarkConfig = dataclasses.field(default_factory=FreeBenchmarkConfig)
    grad_probe: GradientProbeConfig = dataclasses.field(default_factory=GradientProbeConfig)

    def __post_init__(self) -> None:
        """Refuse what cannot be met.

        Raises:
            ConfigError: A value is none of the possible ones, or two do not go together.
        """
        if self.task in OTHER_TASKS:
            raise ConfigError(f"task: {self.task!r} is no task here; {OTHER_TASKS[self.task]}")
        require(self.task in TASKS, "task", self.task, f"one of {', '.join(TASKS)}")
        require(self.level != "L2", "level", self.level, "L0, L1, mix or debug: there is no level of NPU kernels")
        require(self.level in LEVELS, "level", self.level, f"one of {', '.join(LEVELS)}")
        require(self.dump_path, "dump_path", self.dump_path, "the folder that dumps go to")
        require(self.risk_level in RISK_LEVELS, "risk_level", self.risk_level, f"one of {', '.join(RISK_LEVELS)}")
        require(self.summary_mode in SUMMARY_MODES, "summary_mode", self.summary_mode, ", ".join(SUMMARY_MODES))
        require(self.file_format in FILE_FORMATS, "file_format", self.file_format, f"one of {', '.join(FILE_FORMATS)}")
        endless = self.overflow_nums == -1
        require(endless or self.overflow_nums > 0, "overflow_nums", self.overflow_nums, "1 or more, or -1 for no end")
        require(0 <= (self.seed or 0) <= MAX_SEED, "seed", self.seed, f"a whole number from 0 to {MAX_SEED}")
        listed = self.task == "overflow_check" and self.tensor_list
        require(not listed, "tensor_list", list(self.tensor_list), "none: task overflow_check saves no tensors")
        require(len(self.scope) in (0, 2), "scope", list(self.scope), "no name or two")
        for mode in self.data_mode:
            require(mode in DATA_MODES, "data_mode", mode, f"some of {', '.join(DATA_MODES)}")
        alone = "all" not in self.data_mode or len(self.data_mode) == 1
        require(alone, "data_mode", list(self.data_mode), "all alone, or some of the others")
        if self.task == FREE_BENCHMARK:
            named = self.list or self.free_benchmark.fuzz_stage != "backward"
            require(named, "free_benchmark.list", [], "names of functions, with fuzz_stage backward")
        require(self.step_interval >= 1, "step_interval", self.step_interval, "1 or more")
        require(self.max_pending >= 0, "max_pending", self.max_pending, "0 or more")
        require(self.flush_s >= 0, "flush_s", self.flush_s, "0 or more seconds")
        require(self.max_mb >= 0 and self.max_async_mb >= 0, "max_mb", self.max_mb, "0 or more")

    def chooses(self, step: int) -> bool:
        """Return whether the step with this number is dumped."""
        return (not self.step or step in self.step) and step % self.step_interval == 0

    @property
    def with_checksums(self) -> bool:
        """Whether the entry of each tensor in the dump gets the CRC-32 of its bytes (`summary_mode` md5 or crc32)."""
        return self.summary_mode != "statistics"

    @property
    def collects_modules(self) -> bool:
        """Whether the level records calls of modules: `L0` or `mix`."""
        return self.level in ("L0", "mix")

    @property
    def collects_functions(self) -> bool:
        """Whether the level records calls of torch's functions: `L1` or `mix`."""
        return self.level in ("L1", "mix")


def read_debugger_config(source: Mapping[str, Any], **arguments: Any) -> tuple[DebuggerConfig, tuple[str, ...]]:
    """Return the configuration of a dump made of `source` and `arguments`, and sentences on keys that have no effect.

    `source` is the parsed configuration file; `arguments` that are not None take precedence over it. The block of
    `source` that has the name of the task holds the task's keys; blocks of other tasks are passed over, as in msprobe.

    Raises:
        ConfigError: A key is unknown, or a value is wrong.
    """
    top = {key: value for key, value in source.items() if value is not None}
    top |= {key: value for key, value in arguments.items() if value is not None}
    task = top.get("task") or "statistics"
    require(isinstance(task, str), "task", task, f"one of {', '.join(TASKS)}")
    block = top.get(task, {})
    require(isinstance(block, Mapping), str(task), block, "a mapping")
    wanted = {key: value for key, value in top.items() if key not in {*TASKS, *OTHER_TASKS}}
    wanted |= _keys_of(task, block)
    notes = [f"{key} has no effect: {reason}" for key, reason in WITHOUT_EFFECT.items() if key in wanted]
    wanted = {key: value for key, value in wanted.items() if key not in WITHOUT_EFFECT}
    if wanted.get("file_format") == "bin":
        del wanted["file_format"]
        notes.append("file_format bin has no effect: it belongs to NPU kernels; tensors are saved as .pt")
    wanted["task"] = task
    for key in ("rank", "step"):
        if key in wanted:
            wanted[key] = numbers(wanted[key], key)
    if task == "structure" and wanted.get("level") not in ("L0", "mix"):
        wanted["level"] = "mix"
        notes.append("level is mix: task structure is about modules and the functions in them")
    if task == FREE_BENCHMARK and wanted.get("level", "L1") != "L1":
        wanted["level"] = "L1"
        notes.append("level is L1: task free_benchmark is about functions")
    if task == FREE_BENCHMARK and _learns_nothing(wanted[FREE_BENCHMARK]):
        notes.append("if_preheat has no effect: only pert_mode improve_precision and to_cpu learn from the CPU")
    if task == "overflow_check":
        notes.append(OVERFLOW_NOTE)
    if wanted.get("summary_mode") in ("md5", "xor"):
        notes.append(f"summary_mode {wanted['summary_mode']}: the CRC-32 of the bytes in order, as `md5` and `crc32`")
    wanted["level"] = wanted.get("level") or "L1"
    return build(DebuggerConfig, wanted, ""), tuple(notes)


def _learns_nothing(block: Mapping[str, Any]) -> bool:
    return bool(block.get("if_preheat")) and block.get("pert_mode", Perturbation.IMPROVE_PRECISION) not in JUDGING


def _keys_of(task: str, block: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a task's block.

    What a free benchmark has besides `scope` and `list` is a block of its own, as is what a gradient probe has.
    """
    given = {key: value for key, value in block.items() if value is not None}
    if task == DumpTask.TENSOR:
        given = {key: value for key, value in given.items() if key not in _WITH_ONLINE}
        if not given.get("online_run_ut"):
            given.pop("online_run_ut", None)
    if task == GRAD_PROBE:
        return {GRAD_PROBE: {_MSPROBE_KEYS.get(key, key): value for key, value in given.items()}}
    if task != FREE_BENCHMARK:
        return given
    chosen: dict[str, Any] = {key: given.pop(key) for key in ("scope", "list") if key in given}
    return {**chosen, FREE_BENCHMARK: given}


def numbers(values: Any, key: str) -> tuple[int, ...]:
    """Return the steps or ranks that `values` of the configuration key `key` list, sorted, each once.

    An item is a number, or a text: `"3"`, or the range `"3-7"` with both ends. `key` is for error messages.

    >>> numbers([5, "1-3", "2"], "step")
    (1, 2, 3, 5)
    """
    wanted: set[int] = set()
    for value in [values] if isinstance(values, int | str) else values:
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", str(value)) if not isinstance(value, bool) else None
        require(match, key, value, 'a number, or "first-last"')
        assert match is not None
        first, last = int(match[1]), int(match[2] or match[1])
        require(first <= last <= MAX_NUMBER, key, value, f"first ≤ last ≤ {MAX_NUMBER}")
        wanted.update(range(first, last + 1))
    return tuple(sorted(wanted))


def default_file() -> Path:
    """Return the path of `config.json` in the current directory, which is read when no configuration file is named."""
    return Path("config.json")
