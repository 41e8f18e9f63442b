"""Finds the training in a command: what launches it, which script it is, and which options each of them gets."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any, NamedTuple

from trainermon.analysis.environment.shell.script import ScriptReading, read_text
from trainermon.analysis.environment.shell.words import ShellSyntaxError
from trainermon.analysis.environment.wrappers import SHELLS, text_in, without_wrappers

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
    "accelerate.commands.launch": "accelerate launch",
}
_NAMES = {"mpiexec": "mpirun", "mpirun": "mpirun", "srun": "srun", "salloc": "srun", "torchrun": "torchrun",
          "msrun": "msrun", "torchrun_npu": "torchrun", "deepspeed": "deepspeed"}  # fmt: skip
_MAX_DEPTH = 5  # of shells in shells


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


_NOTHING = TrainingCommand("", {}, "", {})
_Within = tuple[TrainingCommand, int]


class FoundTraining(NamedTuple):
    """A training that a command starts, and what else is known of it there.

    Attributes:
        training: What it is.
        variables: Those that are set in front of it, or in the text that a shell is given.
        unresolved: Words of such a text of which a part is not known.
        is_certain: Whether the text comes to it whatever is not known.
    """

    training: TrainingCommand
    variables: Mapping[str, str]
    unresolved: tuple[str, ...] = ()
    is_certain: bool = True


def hyperparameters_of(
    reading: ScriptReading, environ: Mapping[str, str] | None = None
) -> tuple[dict[str, Any], dict[str, str], list[str]]:
    """Return hyperparameters, variables and what is not known of the training commands in a launch script.

    Those of the first command go by their own names, those of the others behind `command2.` and so on. The variables
    are those that the last training gets beside the surrounding ones, `environ`.
    """
    values: dict[str, Any] = {}
    variables: dict[str, str] = {}
    notes = [*reading.notes]
    seen: list[TrainingCommand] = []
    for command in reading.commands:
        for found in find_trainings(command.words, {**(environ or {}), **command.variables}):
            training = found.training
            if training in seen:
                continue
            seen.append(training)
            prefix = f"command{len(seen)}." if len(seen) > 1 else ""
            values.update({f"{prefix}{name}": value for name, value in _named(training)})
            variables = {**command.variables, **found.variables}
            if not (command.is_certain and found.is_certain):
                notes.append(f"line {command.line}: {training.script}: only under a condition that is not known")
            notes += [f"line {command.line}: {word}: unresolved" for word in (*command.unresolved, *found.unresolved)]
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
    """Return the training that a command starts, the first of several; None if it starts none.

    >>> find_training(["torchrun", "--nproc-per-node", "2", "a.py", "--bf16", "--lr", "1e-4"]).options
    {'bf16': True, 'lr': '1e-4'}
    """
    return next((found.training for found in find_trainings(words, {})), None)


def find_trainings(
    words: Sequence[str], environ: Mapping[str, str], before: TrainingCommand = _NOTHING, depth: int = 0
) -> Iterator[FoundTraining]:
    """Yield the trainings that a command starts: several only if it gives a shell a text with several.

    Args:
        words: The command; what is not known stands as it was written.
        environ: The variables that it gets.
        before: What launches this command, if something does.
        depth: In how many shells it stands.
    """
    variables: dict[str, str] = {}
    while words:
        words, added, image = without_wrappers(words)
        variables |= added
        if image:
            before = before._replace(launcher_options={**before.launcher_options, "image": image})
        text = text_in(words)
        if text is not None:
            yield from _in_text(*text, {**environ, **variables}, variables, (before, depth))
            return
        launched = _launched(words, before)
        if launched is None or launched.script:
            if launched is not None:
                yield FoundTraining(launched, variables)
            return
        before, words = launched._replace(options={}), launched.options["arguments"]


def _in_text(
    text: str, arguments: Sequence[str], environ: Mapping[str, str], set_before: Mapping[str, str], within: _Within
) -> Iterator[FoundTraining]:
    """Yield the trainings in a text that a shell is given."""
    before, depth = within
    if depth >= _MAX_DEPTH:
        return
    try:
        commands = read_text(text, environ, arguments=arguments[1:]).commands
    except (ShellSyntaxError, RecursionError):  # then it is no text for a shell
        return
    for command in commands:
        for found in find_trainings(command.words, {**environ, **command.variables}, before, depth + 1):
            yield FoundTraining(
                found.training,
                {**set_before, **command.variables, **found.variables},
                (*command.unresolved, *found.unresolved),
                command.is_certain and found.is_certain,
            )


def _launched(words: Sequence[str], before: TrainingCommand) -> TrainingCommand | None:
    """Return the training; without a script, what a launcher runs stands under `arguments`. None: it is none."""
    name = PurePath(words[0]).name if words else ""
    if name == "accelerate" and words[1:2] == ["launch"]:
        kind, rest = "accelerate", words[2:]
    elif name == "trainermon" and words[1:2] == ["run"]:
        behind = words[words.index("--") + 1 :] if "--" in words else []
        return before._replace(options={"arguments": behind})
    elif _PYTHON.fullmatch(name):
        kind, rest = "python", words[1:]
    elif name in _NAMES:
        kind, rest = _NAMES[name], words[1:]
    elif before.launcher or name.endswith(".py"):
        return _finished(before.launcher or "python", before.launcher_options, words)
    else:
        return None
    taken, behind, module = _launcher_options(kind, rest)
    if module in _MODULES:
        launcher = _MODULES[module]
        return before._replace(options={"arguments": [*launcher.split(), *behind]})
    options = {**before.launcher_options, **(taken if kind != "python" else {})}
    launcher = kind if kind != "python" or not before.launcher else before.launcher
    left = [*([module] if module else []), *behind]
    if kind in ("python", "torchrun", "deepspeed", "accelerate") and not _starts_launcher(left):
        return _finished(launcher, options, left)
    return TrainingCommand(launcher, options, "", {"arguments": left})


def _starts_launcher(words: Sequence[str]) -> bool:
    name = PurePath(words[0]).name if words else ""
    return bool(_PYTHON.fullmatch(name)) or name in _NAMES or name in SHELLS


def _finished(launcher: str, options: Mapping[str, Any], words: Sequence[str]) -> TrainingCommand | None:
    if not words or words[0] in ("-", "-c"):
        return None
    return TrainingCommand(launcher, options, words[0], options_of(words[1:]))


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
    the form `a.b=c` are settings of Hydra; other words before the first option stand under `arguments`. Of `--x` and
    `--no-x` the last one counts.

    >>> options_of(["--bf16", "--adam-beta2", "0.95", "--split", "1", "2", "optim.lr=1"])
    {'bf16': True, 'adam-beta2': '0.95', 'split': ['1', '2'], 'optim.lr': '1'}
    """
    found: dict[str, list[Any]] = {}
    name = ""
    for word in words:
        if _OPTION.fullmatch(word) and not _NUMBER.fullmatch(word):
            name, is_pair, value = word.lstrip("-").partition("=")
            for opposite in _opposites(name):
                if found.get(opposite) == []:  # a flag
                    del found[opposite]
            found.setdefault(name, [])
            if is_pair:
                found[name].append(value)
                name = ""
        elif (match := _OVERRIDE.fullmatch(word)) and "/" not in match[1]:
            found.setdefault(match[1], []).append(match[2])
        else:
            found.setdefault(name or "arguments", []).append(word)
    return {key: True if not values else values[0] if len(values) == 1 else values for key, values in found.items()}


def _opposites(name: str) -> tuple[str, ...]:
    positive = re.match(r"no[-_](.*)", name)
    return (positive[1],) if positive else (f"no-{name}", f"no_{name}")
