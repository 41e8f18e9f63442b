"""The log `trainermon`: its level, by the environment, and that its few lines are seen."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping

OWN_VARIABLE, THEIR_VARIABLE = "TRAINERMON_LOG_LEVEL", "MSPROBE_LOG_LEVEL"
_SILENT = logging.CRITICAL + 10
_BY_NUMBER = {"0": logging.DEBUG, "1": logging.INFO, "2": logging.WARNING, "3": logging.ERROR, "4": _SILENT}
"""msprobe's levels."""
_BY_NAME = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
    "silent": _SILENT,
}
_LEVELS = {**_BY_NAME, "warn": logging.WARNING, **_BY_NUMBER}
_LEVELS |= {str(level): level for level in _BY_NAME.values()}

logger = logging.getLogger("trainermon")


def chosen_level(environment: Mapping[str, str] = os.environ) -> int | None:
    """Return the logging level that `TRAINERMON_LOG_LEVEL`, else `MSPROBE_LOG_LEVEL`, asks for; None: neither does."""
    values = (environment.get(name, "").strip().lower() for name in (OWN_VARIABLE, THEIR_VARIABLE))
    return next((_LEVELS[value] for value in values if value in _LEVELS), None)


def set_level() -> None:
    """Set the level of this package's logger as the environment asks; warn once of a value that is no level."""
    level = chosen_level()
    if level is not None:
        logger.setLevel(level)
    for name in (OWN_VARIABLE, THEIR_VARIABLE):
        value = os.environ.get(name, "").strip()
        if value and value.lower() not in _LEVELS:
            expected = f"0 to 4, or one of {', '.join(_BY_NAME)}"
            logger.warning("%s: found %r, expected %s; it is passed over", name, value, expected)


def make_log_visible(*, quiet: bool) -> None:
    """Show this package's lines on standard error, from WARNING on if `quiet`, else from INFO on.

    The level that the environment asks for counts before that. Nothing is done where the application handles logging
    itself: then it decides what is shown.
    """
    has_handlers = any(not isinstance(handler, logging.NullHandler) for handler in logger.handlers)
    if has_handlers or logging.getLogger().handlers:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("trainermon: %(message)s"))
    logger.addHandler(handler)
    logger.propagate = False
    if chosen_level() is None:
        logger.setLevel(logging.WARNING if quiet else logging.INFO)
