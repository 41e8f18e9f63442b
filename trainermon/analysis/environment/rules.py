"""How grave a difference is: built-in rules by section and name, and those of a file, which come first."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from trainermon.analysis.environment.differences import DifferenceLevel
from trainermon.core.documents import read_document
from trainermon.core.environment.variables import VariableMeaning, meaning_of
from trainermon.core.errors import ConfigError

IGNORE = "ignore"
_WORDS = {level.value: level for level in DifferenceLevel} | {IGNORE: DifferenceLevel.SAME}


class LevelRule(NamedTuple):
    """A rule: a difference in a setting of that section and name (`*` patterns) has that level."""

    section: str
    name: str
    level: DifferenceLevel


_ERROR, _WARNING, _INFO = DifferenceLevel.ERROR, DifferenceLevel.WARNING, DifferenceLevel.INFO
_OF_VARIABLES = {
    VariableMeaning.NUMBERS: _ERROR,
    VariableMeaning.SPEED: _INFO,
    VariableMeaning.PLACE: _INFO,
    VariableMeaning.UNKNOWN: _WARNING,
}
_PACKAGES_OF_NUMBERS = (
    "torch torch-npu torchvision torchaudio numpy scipy mindspore mindspeed* megatron* deepspeed apex "
    "transformer-engine* flash-attn* triton* xformers transformers accelerate peft datasets tokenizers "
    "safetensors bitsandbytes lightning pytorch-lightning nvidia-* intel-extension-for-pytorch mkl* onednn* "
    "vllm verl trl jax* cupy* liger-kernel torchao tensordict einops sentencepiece timm"
)
BUILT_IN = (
    *(LevelRule("packages", name, _ERROR) for name in _PACKAGES_OF_NUMBERS.split()),
    LevelRule("packages", "native.*", _WARNING),
    LevelRule("packages", "*", _INFO),
    *(
        LevelRule("system", name, _ERROR)
        for name in ("accelerator.model", "cudnn.*", "nccl.*", "hccl.*", "cann.toolkit")
    ),
    *(
        LevelRule("system", name, _WARNING)
        for name in ("cpu.model", "cpu.vector_level", "cpu.special", "cpu.cores", "libc", "architecture", "python")
    ),
    *(LevelRule("system", name, _WARNING) for name in ("accelerator.*", "cuda.*", "rocm", "*driver*")),
    LevelRule("system", "*", _INFO),
    LevelRule("torch", "compile.cache*", _INFO),
    *(LevelRule("torch", name, _WARNING) for name in ("threads*", "config", "compile.*", "autocast.*")),
    LevelRule("torch", "*", _ERROR),
    LevelRule("code", "model.*", _ERROR),
    LevelRule("code", "git.remote", _INFO),
    LevelRule("code", "*", _WARNING),
    LevelRule("hyperparameters", "*launcher.image", _WARNING),
    *(
        LevelRule("hyperparameters", name, _INFO)
        for name in (
            "*launcher.*",
            "*log_interval",
            "*logging_steps",
            "*tensorboard*",
            "*wandb*",
            "*output_dir",
            "*save*",
            "*run_name",
            "*run_id",
            "*log_dir",
            "*logdir",
            *("out", "output", "outdir", "out_dir"),
        )
    ),
    LevelRule("layout", "*batch*", _ERROR),
    LevelRule("layout", "*", _WARNING),
)


class LevelRules:
    """Rules in the order in which they are asked."""

    def __init__(self, given: Sequence[LevelRule] = ()) -> None:
        self._given = tuple(given)

    def level(self, section: str, name: str, usual: DifferenceLevel | None = None) -> DifferenceLevel:
        """Return the level of a difference in the setting `name`; `usual` is asked before the built-in rules."""
        for rule in self._given:
            if fnmatch.fnmatchcase(section, rule.section) and fnmatch.fnmatchcase(name, rule.name):
                return rule.level
        if usual is not None:
            return usual
        if section == "variables":
            return _OF_VARIABLES[meaning_of(name)]
        for rule in BUILT_IN:
            if rule.section == section and fnmatch.fnmatchcase(name, rule.name):
                return rule.level
        return _ERROR


def read_rules(path: Path) -> tuple[LevelRule, ...]:
    """Return the rules of a file: a JSON or YAML list of `{section, name, level}`, `*` patterns allowed.

    Levels are `error`, `warning`, `info`, and `ignore`. What has no section or no name counts for all.

    Raises:
        ConfigError: The file cannot be read, or a rule is wrong.
    """
    try:
        document = read_document(path)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    if not isinstance(document, list):
        raise ConfigError(f"{path}: found a {type(document).__name__}, expected a list of rules: section, name, level")
    return tuple(_rule(f"{path}: rule {number}", raw) for number, raw in enumerate(document, start=1))


def _rule(where: str, raw: Any) -> LevelRule:
    if not isinstance(raw, dict) or not set(raw) <= {"section", "name", "level"}:
        raise ConfigError(f"{where}: found {raw!r:.200}, expected the keys section, name, level")
    if raw.get("level") not in _WORDS:
        raise ConfigError(f"{where}: level {raw.get('level')!r:.50}, expected error, warning, info or ignore")
    return LevelRule(str(raw.get("section", "*")), str(raw.get("name", "*")), _WORDS[raw["level"]])
