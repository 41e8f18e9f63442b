"""Finds the training in a command: what launches it, which script it is, and which options each of them gets."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any, NamedTuple

from trainermon.analysis.environment.shell.script import ScriptReading

LAUNCHER, SCRIPT = "launcher", "script"
_NUMBER = re.compile(r"-\.?\d.*|-inf|-nan")
_OPTION = re.compile(r"--?[A-Za-z_].*", re.DOTALL)
_OVERRIDE = re.compile(r"(?:\+\+?|~)?([A-Za-z_][\w./@-]*)=(.*)", re.DOTALL)  # Hydra's
_PYTHON = re.compile(r"python[\d.]*|pypy3?")
_FLAGS = {
    "torchrun": "standalone no-python no_python m module s rdzv-stop run-path use-env use_env h help",
    "msrun": "join h help",
    "deepspeed": "force_multi no_python module no_local_rank no_ssh no_ssh_check save_pid enable_each_rank_log "
    "bind_cores_to_rank elastic_training h help",
    "accelerate": "cpu multi_gpu tpu ipex m module no_python use_deepspeed use_fsdp use_megatron_lm use_xpu debug "
    "q quiet same_network tpu_use_cluster use_mps_device main_training_function",
    "mpirun": "allow-run-as-root bind-to-none report-bindings oversubscribe display-map tag-output v verbose q quiet",
    "srun": "exclusive l label u unbuffered K kill-on-bad-exit overlap O overcommit v verbose Q quiet pty",
    "python": "u O OO B E I s S v q x b bb d i P R",
}
_TWO_VALUES = {"mpirun": ("mca", "-mca", "gmca")}
_MODULES = {
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torchrun",
    "torch.distributed.elastic.run": "torchrun",
    "deepspeed.launcher.runner": "deepspeed",
    "accelerate.commands.launch": "accelerate",
}
_NAMES = {"mpiexec": "mpirun", "mpirun": "mpirun", "srun": "srun", "torchrun": "torchrun", "msrun": "msrun",
          "torchrun_npu": "torchrun", "deepspeed": "deepspeed"}  # fmt: skip
_BEFORE = frozenset(["env", "nohup", "exec", "time", "sudo", "nice", "command", "stdbuf", "setsid", "numactl",
                     "timeout", "ionice", "taskset", "nsys", "xargs"])  # fmt: skip


class TrainingCommand(NamedTuple):
    """What starts a training.

    Attributes:
        launcher: What launches it: `torchrun`, `python` …; of several the innermost that is not Python.
        launcher_options: Its options by name.
        script: The script or module that is run.
        options: The script's options by name, as they were written without dashes; a flag is True.
    """

    launcher: str
    launcher_options: Mapping[str, Any]
    script: str
    options: Mapping[str, Any]


def hyperparameters_of(reading: ScriptReading) -> tuple[dict[str, Any], dict[str, str], list[str]]:
    """Return hyperparameters, variables and what is not known of the training commands in a launch script.

    Those of the first command go by their own names, those of the others behind `command2.` and so on. The variables
    are those that the last training gets beside the surrounding ones.
    """
    values: dict[str, Any] = {}
    variables: dict[str, str] = {}
    notes = [*reading.notes]
    seen: list[TrainingCommand] = []
    for command in reading.commands:
        training = find_training(command.words)
        if training is None or training in seen:
            continue
        seen.append(training)
        prefix = f"command{len(seen)}." if len(seen) > 1 else ""
        values.update({f"{prefix}{name}": value for name, value in _named(training)})
        variables = dict(command.variables)
        if not command.is_certain:
            notes.append(f"line {command.line}: {training.script}: only under a condition that is not known")
        notes += [f"line {command.line}: {word}: unresolved" for word in command.unresolved]
    if not seen:
        notes.append("no training command was found")
    return values, variables, notes


def _named(training: TrainingCommand) -> Iterator[tuple[str, Any]]:
    yield LAUNCHER, training.launcher
    yield SCRIPT, training.script
    for name, value in training.launcher_options.items():
        yield f"{LAUNCHER}.{name}", value
    yield from training.options.items()


def find_training(words: Sequence[str]) -> TrainingCommand | None:
    """Return the training that a command starts; None if it starts none.

    >>> find_training(["torchrun", "--nproc-per-node", "2", "a.py", "--bf16", "--lr", "1e-4"]).options
    {'bf16': True, 'lr': '1e-4'}
    """
    words = _without_wrappers(list(words))
    launcher, options = "", dict[str, Any]()
    while words:
        name = PurePath(words[0]).name
        if name == "accelerate" and words[1:2] == ["launch"]:
            kind, rest = "accelerate", words[2:]
        elif name == "trainermon" and words[1:2] == ["run"]:
            words = _without_wrappers(words[words.index("--") + 1 :] if "--" in words else [])
            continue
        elif _PYTHON.fullmatch(name):
            kind, rest = "python", words[1:]
        elif name in _NAMES:
            kind, rest = _NAMES[name], words[1:]
        else:
            return _finished(launcher, options, words) if launcher else None
        taken, rest, module = _launcher_options(kind, rest)
        if module in _MODULES:
            words = [_MODULES[module], *rest] if _MODULES[module] != "accelerate" else ["accelerate", "launch", *rest]
            continue
        options |= taken if kind != "python" else {}
        launcher = kind if kind != "python" or not launcher else launcher
        words = [*([module] if module else []), *rest]
        if kind in ("python", "torchrun", "deepspeed", "accelerate") and not _starts_launcher(words):
            return _finished(launcher, options, words)
    return None


def _starts_launcher(words: Sequence[str]) -> bool:
    name = PurePath(words[0]).name if words else ""
    return bool(_PYTHON.fullmatch(name)) or name in _NAMES


def _finished(launcher: str, options: Mapping[str, Any], words: Sequence[str]) -> TrainingCommand | None:
    if not words or words[0] in ("-", "-c"):
        return None
    return TrainingCommand(launcher, options, words[0], options_of(words[1:]))


def _without_wrappers(words: list[str]) -> list[str]:
    """Return a command without what only surrounds it, such as `env A=1`, `nohup` or `numactl --cpunodebind=0`."""
    while words and (PurePath(words[0]).name in _BEFORE or re.fullmatch(r"[A-Za-z_]\w*=.*", words[0], re.DOTALL)):
        words = words[1:]
        while words and (words[0].startswith("-") or re.fullmatch(r"\d+[smhd]?", words[0])):
            words = words[1:]
    return words


def _launcher_options(kind: str, words: Sequence[str]) -> tuple[dict[str, Any], list[str], str]:
    """Return a launcher's options, the words behind them, and the module after `-m`, if there is one."""
    flags, twice = _FLAGS[kind].split(), _TWO_VALUES.get(kind, ())
    found: dict[str, Any] = {}
    at = 0
    while at < len(words) and words[at].startswith("-") and words[at] != "-":
        name, is_pair, value = words[at].lstrip("-").partition("=")
        if words[at] == "--":
            at += 1
            break
        if name in ("m", "module"):
            return found, list(words[at + 2 :]), words[at + 1] if at + 1 < len(words) else ""
        if kind == "python" and name == "c":
            return found, ["-c"], ""
        if is_pair or name in flags:
            found[name] = value if is_pair else True
            at += 1
            continue
        number = 2 if name in twice else 1
        taken = list(words[at + 1 : at + 1 + number])
        found[f"{name}.{taken[0]}" if number == 2 and taken else name] = taken[-1] if taken else True
        at += 1 + number
    return found, list(words[at:]), ""


def options_of(words: Sequence[str]) -> dict[str, Any]:
    """Return the options of a script by name: a flag is True, several values are a list, a repeated one too.

    A word that begins with a dash and a letter begins an option, so no flag takes the next one for its value. Words of
    the form `a.b=c` are settings of Hydra; other words before the first option stand under `arguments`.

    >>> options_of(["--bf16", "--adam-beta2", "0.95", "--split", "1", "2", "optim.lr=1"])
    {'bf16': True, 'adam-beta2': '0.95', 'split': ['1', '2'], 'optim.lr': '1'}
    """
    found: dict[str, list[Any]] = {}
    name = ""
    for word in words:
        if _OPTION.fullmatch(word) and not _NUMBER.fullmatch(word):
            name, is_pair, value = word.lstrip("-").partition("=")
            found.setdefault(name, [])
            if is_pair:
                found[name].append(value)
                name = ""
        elif (match := _OVERRIDE.fullmatch(word)) and "/" not in match[1]:
            found.setdefault(match[1], []).append(match[2])
        else:
            found.setdefault(name or "arguments", []).append(word)
    return {key: True if not values else values[0] if len(values) == 1 else values for key, values in found.items()}
