"""What stands around the command that starts a training: `env`, `nohup`, containers, environments, other shells.

Which options take a value follows from the manual of each: docker run (docs.docker.com), singularity and apptainer
exec, enroot start, conda run, uv run, and those of coreutils and util-linux.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import NamedTuple

SHELLS = ("bash", "sh", "dash", "zsh", "ksh", "ash")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_MAX_BEFORE_ACTION = 12  # words between `docker` and its `run`


class Wrapper(NamedTuple):
    """A command that runs the one behind its options.

    Attributes:
        options: Names of options, of those that take the next word for their value, or of those that do not.
        are_flags: Whether these are the ones that take no value, and all others do.
        actions: The word that must come first, one of these.
        skipped: How many words stand between its options and the command: the image, the duration.
    """

    options: frozenset[str]
    are_flags: bool = False
    actions: tuple[str, ...] = ()
    skipped: int = 0


def _valued(options: str = "", skipped: int = 0, actions: tuple[str, ...] = ()) -> Wrapper:
    return Wrapper(frozenset(options.split()), skipped=skipped, actions=actions)


def _with_flags(flags: str, skipped: int, actions: tuple[str, ...]) -> Wrapper:
    return Wrapper(frozenset(flags.split()), are_flags=True, skipped=skipped, actions=actions)


_DOCKER = _with_flags(
    "i t d P q interactive tty detach rm init privileged read-only no-healthcheck publish-all sig-proxy "
    "oom-kill-disable disable-content-trust quiet help",
    1,
    ("run", "exec", "create"),
)
_SINGULARITY = _with_flags(
    "nv nvccli rocm e cleanenv c contain C containall f fakeroot w writable writable-tmpfs no-home p pid i ipc uts u "
    "userns n net no-init no-privs keep-privs allow-setuid vm compat disable-cache no-https passphrase no-umask "
    "no-eval sharens unsquash s q d silent quiet debug v verbose",
    1,
    ("exec", "run"),
)
_CONDA = _valued("n name p prefix cwd", actions=("run",))
_WRAPPERS: Mapping[str, Wrapper] = {
    **dict.fromkeys(("docker", "podman", "nerdctl", "nvidia-docker"), _DOCKER),
    **dict.fromkeys(("singularity", "apptainer"), _SINGULARITY),
    **dict.fromkeys(("conda", "mamba", "micromamba"), _CONDA),
    **dict.fromkeys(("poetry", "pdm", "pipenv", "hatch", "pixi", "rye"), _valued("e environment", actions=("run",))),
    **dict.fromkeys(("kubectl", "oc"), _valued(actions=("--",))),
    "enroot": _valued("c conf e env m mount", 1, ("start",)),
    "uv": _valued(
        "with with-requirements with-editable extra group only-group no-group p python project directory env-file "
        "index default-index f find-links package refresh-package config-file C",
        actions=("run",),
    ),
    "env": _valued("u unset C chdir"),
    "time": _valued("o output f format"),
    "exec": _valued("a"),
    "sudo": _valued("u user g group h host C p prompt r role t type D chdir R chroot T"),
    "nice": _valued("n adjustment"),
    "ionice": _valued("c class n classdata"),
    "stdbuf": _valued("i input o output e error"),
    "numactl": _valued("C physcpubind N cpunodebind m membind p preferred i interleave w weighted-interleave"),
    "taskset": _valued("", 1),
    "timeout": _valued("k kill-after s signal", 1),
    "xargs": _valued("n P I L s d a E"),
    "strace": _valued("e o p s u E P"),
    "nsys": _with_flags("h help", 0, ("profile", "launch")),
    "py-spy": _valued("o output d duration r rate f format", actions=("record",)),
    **dict.fromkeys(("nohup", "setsid", "command", "catchsegv", "unbuffer"), _valued()),
}
_SSH = _valued("b c D E e F I i J L l m O o p Q R S W w")
_OF_CONTAINER = ("e", "env")  # options that set a variable
_TEXT_OPTIONS = {"sbatch": ("wrap",), "su": ("c", "command"), "script": ("c", "command")}


class Unwrapped(NamedTuple):
    """A command without what stands around it, the variables that this sets, and the image that it runs in."""

    words: list[str]
    variables: dict[str, str]
    image: str = ""


def without_wrappers(words: Sequence[str]) -> Unwrapped:
    """Return the command that is run in the end.

    >>> without_wrappers(["nohup", "env", "A=1", "timeout", "1h", "python", "a.py"])
    Unwrapped(words=['python', 'a.py'], variables={'A': '1'}, image='')
    """
    left, variables, image = list(words), dict[str, str](), ""
    while left:
        if assignment := _ASSIGNMENT.fullmatch(left[0]):
            variables[assignment[1]] = assignment[2]
            left = left[1:]
            continue
        wrapper = _WRAPPERS.get(PurePath(left[0]).name)
        rest = None if wrapper is None else _behind_action(wrapper, left[1:])
        if wrapper is None or rest is None:
            break
        left, given = _behind_options(wrapper, rest)
        if wrapper in (_DOCKER, _SINGULARITY) and left:
            image = left[0]
            variables |= {match[1]: match[2] for name, text in given if name in _OF_CONTAINER for match in _pairs(text)}
        entrypoint = next((text for name, text in given if name == "entrypoint" and text), None)
        left = [*([entrypoint] if entrypoint else []), *left[wrapper.skipped :]]
        left = left[1:] if left[:1] == ["--"] else left
    return Unwrapped(left, variables, image)


def _behind_action(wrapper: Wrapper, words: list[str]) -> list[str] | None:
    if not wrapper.actions:
        return words
    at = next((at for at, word in enumerate(words[:_MAX_BEFORE_ACTION]) if word in wrapper.actions), None)
    return None if at is None else words[at + 1 :]


def _behind_options(wrapper: Wrapper, words: list[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """Return what stands behind the options of a command, and its options with their values, "" without one."""
    given: list[tuple[str, str]] = []
    at = 0
    while at < len(words) and words[at].startswith("-") and words[at] != "--":
        word = words[at]
        name, is_pair, value = word.lstrip("-").partition("=")
        letters = [name] if word.startswith("--") or name in wrapper.options else [*name]
        takes_next = not is_pair and all(letter in wrapper.options for letter in letters) is not wrapper.are_flags
        given.append((name, value or (words[at + 1] if takes_next and at + 1 < len(words) else "")))
        at += 2 if takes_next else 1
    return words[at:], given


def _pairs(text: str) -> Iterator[re.Match[str]]:
    """Yield the assignments in the value of an option: one, or several between commas."""
    parts = [_ASSIGNMENT.fullmatch(part) for part in text.split(",")]
    found = [part for part in parts if part is not None]
    whole = _ASSIGNMENT.fullmatch(text)
    yield from found if len(found) == len(parts) else [whole] if whole is not None else []


def text_in(words: Sequence[str]) -> tuple[str, list[str]] | None:
    """Return the script that a command gives to a shell as a text, and its arguments from `$0`; None if there is none.

    >>> text_in(["bash", "-lc", "torchrun a.py $1", "x", "--bf16"])
    ('torchrun a.py $1', ['x', '--bf16'])
    """
    name = PurePath(words[0]).name if words else ""
    if name in SHELLS:
        return _text_of_shell(words[1:])
    if name == "ssh":
        behind, _ = _behind_options(_SSH, list(words[1:]))
        return (" ".join(behind[1:]), []) if len(behind) > 1 else None
    for at, word in enumerate(words):
        option, is_pair, value = word.lstrip("-").partition("=")
        if word.startswith("-") and option in _TEXT_OPTIONS.get(name, ()):
            return (value, []) if is_pair else (words[at + 1], []) if at + 1 < len(words) else None
    return None


def _text_of_shell(words: Sequence[str]) -> tuple[str, list[str]] | None:
    at, has_text = 0, False
    while at < len(words) and words[at][:1] in ("-", "+") and len(words[at]) > 1:
        is_long = words[at].startswith("--")
        has_text = has_text or (not is_long and "c" in words[at])
        takes_next = words[at] in ("--rcfile", "--init-file") or (not is_long and words[at][-1] in "oO")
        at += 2 if takes_next else 1
    return (words[at], list(words[at + 1 :])) if has_text and at < len(words) else None
