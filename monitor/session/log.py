"""Makes the monitor's few log lines visible where the user's script has not set up logging."""

from __future__ import annotations

import logging

logger = logging.getLogger("trainermon")
logger.addHandler(logging.NullHandler())


def make_log_visible(*, quiet: bool) -> None:
    """Show the monitor's lines on standard error, from WARNING on if `quiet`, else from INFO on.

    Does nothing where the application handles logging itself: then it decides what is shown.
    """
    has_handlers = any(not isinstance(handler, logging.NullHandler) for handler in logger.handlers)
    if has_handlers or logging.getLogger().handlers:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("trainermon: %(message)s"))
    logger.addHandler(handler)
    logger.propagate = False
    logger.setLevel(logging.WARNING if quiet else logging.INFO)
