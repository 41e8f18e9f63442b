"""The compiled library of the package: where it is, and whether it is used."""

from __future__ import annotations

import ctypes
import importlib.machinery
import logging
import os
from pathlib import Path

_FOLDER = Path(__file__).parents[2] / "statistics"  # where pyproject.toml has it built

_logger = logging.getLogger(__name__)


def library() -> ctypes.CDLL | None:
    """Return the compiled C library of the package; None if it is missing or switched off.

    It is missing where there was no compiler when the package was built, and is passed over if TRAINERMON_KERNEL is
    `torch`.

    Raises:
        ValueError: TRAINERMON_KERNEL is neither `c`, `torch` nor unset, or is `c` while there is no library.
    """
    wanted = os.environ.get("TRAINERMON_KERNEL", "")
    if wanted not in ("", "c", "torch"):
        raise ValueError(f"TRAINERMON_KERNEL is {wanted!r}, expected 'c', 'torch' or nothing")
    found = None if wanted == "torch" else _open_library()
    if found is None and wanted == "c":
        raise ValueError("TRAINERMON_KERNEL is 'c', but the library was not built: install a C compiler and reinstall")
    return found


def library_or_none() -> ctypes.CDLL | None:
    """Return the library; None, too, if TRAINERMON_KERNEL has an unknown value, which those who read tensors tell."""
    try:
        return library()
    except ValueError:
        return None


def _open_library() -> ctypes.CDLL | None:
    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        path = _FOLDER / f"_moments{suffix}"
        if path.exists():
            try:
                return ctypes.CDLL(str(path))
            except OSError as error:  # built for another machine or C library
                _logger.warning("the compiled kernels are done without: cannot load %s: %s", path, error)
                return None
    return None
