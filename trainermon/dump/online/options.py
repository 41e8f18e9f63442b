"""The block `free_benchmark` of a debugger's configuration: msprobe's keys with its checks, and our own."""

from __future__ import annotations

import dataclasses

from trainermon.core.strict import require
from trainermon.core.values import TextEnum


class Perturbation(TextEnum):
    """How a call is tried: `pert_mode`."""

    IMPROVE_PRECISION = "improve_precision"
    TO_CPU = "to_cpu"
    ADD_NOISE = "add_noise"
    BIT_NOISE = "bit_noise"
    CHANGE_VALUE = "change_value"
    NO_CHANGE = "no_change"
    RELATIONS = "relations"


NOISY = (Perturbation.ADD_NOISE, Perturbation.BIT_NOISE)
"""The modes that `probes` repeats."""
JUDGING = (Perturbation.IMPROVE_PRECISION, Perturbation.TO_CPU)
"""The modes that compare with a result of higher precision, which a call can therefore be replaced by."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FreeBenchmarkConfig:
    """What `task: free_benchmark` tries with the calls of functions that `scope` and `list` choose.

    Attributes:
        fuzz_device: `npu`, the device of the training whatever it is, or `cpu`, which goes with `to_cpu`.
        pert_mode: How a call is tried, see `Perturbation`.
        handler_type: `check` compares and changes nothing; `fix` replaces results by those of higher precision.
        fuzz_level: `L1`, the only one.
        fuzz_stage: `forward`, or `backward`, which needs `list`.
        if_preheat: Whether the first steps learn how far the device is from the CPU.
        preheat_step: How many steps those are.
        max_sample: How many calls of one operation they take at most.
        every: Each step tries one call in this many; after as many steps every call had its turn.
        budget_ms: A step spends about this much on trying, and the next one continues where it ended; 0: no limit.
        max_elements: Calls whose tensors have more elements together are left out.
        probes: How often the modes that move numbers move them, with different signs.
        report: `failed` writes what is not a pass; `all` every call that was tried.
    """

    fuzz_device: str = "npu"
    pert_mode: Perturbation = Perturbation.IMPROVE_PRECISION
    handler_type: str = "check"
    fuzz_level: str = "L1"
    fuzz_stage: str = "forward"
    if_preheat: bool = False
    preheat_step: int = 15
    max_sample: int = 20
    every: int = 1
    budget_ms: float = 0.0
    max_elements: int = 1 << 26
    probes: int = 1
    report: str = "failed"

    def __post_init__(self) -> None:
        """Refuse what does not go together.

        Raises:
            ConfigError: A value is none of the possible ones, or two exclude one another.
        """
        self._require("fuzz_device", self.fuzz_device in ("npu", "cpu"), "npu (the device of the training) or cpu")
        on_cpu = self.pert_mode is Perturbation.TO_CPU
        self._require("fuzz_device", (self.fuzz_device == "cpu") == on_cpu, "cpu with pert_mode to_cpu, and only then")
        self._require("handler_type", self.handler_type in ("check", "fix"), "check or fix")
        self._require("fuzz_level", self.fuzz_level == "L1", "L1")
        self._require("fuzz_stage", self.fuzz_stage in ("forward", "backward"), "forward or backward")
        self._require("report", self.report in ("failed", "all"), "failed or all")
        for key in ("preheat_step", "max_sample", "every", "max_elements", "probes"):
            self._require(key, getattr(self, key) > 0, "a whole number above 0")
        self._require("budget_ms", self.budget_ms >= 0, "0 (no limit) or more milliseconds")
        if self.fixes:
            self._require("pert_mode", self.pert_mode in JUDGING, "improve_precision or to_cpu with handler_type fix")
            self._require("fuzz_stage", self.fuzz_stage == "forward", "forward with handler_type fix")
            self._require("if_preheat", not self.if_preheat, "false with handler_type fix")

    @property
    def fixes(self) -> bool:
        """Whether results are replaced (`handler_type: fix`)."""
        return self.handler_type == "fix"

    def _require(self, key: str, condition: object, expected: str) -> None:
        require(condition, f"free_benchmark.{key}", getattr(self, key), expected)
