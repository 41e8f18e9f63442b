"""Which settings of the runs differ that two dumps are of: these come before any tensor."""

from __future__ import annotations

from pathlib import Path

from trainermon.analysis.environment.apart import settings_apart, text_of

_MAX_DEPTH = 8  # of a dump below the folder of its run


def setting_differences(target: Path, golden: Path) -> tuple[str, ...]:
    """Return the settings of two runs that differ and may change numbers, the gravest first, as texts.

    A side is the folder of a run, or anything in it. Empty where nothing differs, where both are of one run, and where
    a side is of none or its run kept no settings.
    """
    runs = _run_of(target), _run_of(golden)
    if runs[0] is None or runs[1] is None or runs[0] == runs[1]:
        return ()
    return tuple(map(text_of, settings_apart(runs[0], runs[1])))


def _run_of(path: Path) -> Path | None:
    """Return the folder of the run that something is in, None if it is in none."""
    whole = path.resolve()
    above = (whole, *whole.parents)[:_MAX_DEPTH]
    return next((folder for folder in above if any((folder / "ranks").glob("rank*.json"))), None)
