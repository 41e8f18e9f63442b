"""What users of msprobe's checker type, as the words of `trainermon check`: `run_ut -api_info dump.json -f`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

COMMANDS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "acc_check": ("check", "run"),
        "multi_acc_check": ("check", "run"),
        "run_ut": ("check", "run"),
        "multi_run_ut": ("check", "run"),
        "run_overflow_check": ("check", "overflow"),
        "api_precision_compare": ("check", "against"),
    }
)
"""msprobe's commands, and ours that do the same."""
# Its devices are numbers, and its filter takes no value.
_OPTIONS = {"-f": "--unique", "--device": "-d"}
_FRAMEWORKS = ("pytorch", "mindspore")


def translated(words: Sequence[str]) -> list[str]:
    """Return a command line of msprobe's checker in our words; any other one as it is.

    `-f pytorch` in front of msprobe's command is dropped; behind it `-f` is its `--filter_api`, which takes no value.

    >>> translated(["-f", "pytorch", "multi_run_ut", "-api_info", "dump.json", "-n", "4", "-f"])
    ['check', 'run', '-api_info', 'dump.json', '-n', '4', '--unique']
    """
    given = list(words)
    if given[:1] in (["-f"], ["--framework"]) and given[1:2] and given[1] in _FRAMEWORKS:
        given = given[2:]
    if not given or given[0] not in COMMANDS:
        return list(words)
    rest = [_OPTIONS.get(word, word) for word in given[1:]]
    return [*COMMANDS[given[0]], *rest]
