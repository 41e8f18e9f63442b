"""Functions of the compiled library that the interpreter calls as it calls its own, not through ctypes: builtins.c."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

from trainermon.core.native.library import library_or_none

# What builtins.c calls of the interpreter, in its order.
_OF_PYTHON = (
    "PyObject_CallFunctionObjArgs",
    "PyObject_GetAttr",
    "PyObject_Type",
    "PySequence_GetItem",
    "PySequence_Size",
    "PyLong_AsLongLong",
    "PyFloat_AsDouble",
    "PyBool_FromLong",
    "PyFloat_FromDouble",
    "PyErr_Clear",
    "Py_DecRef",
    "PyEval_SaveThread",
    "PyEval_RestoreThread",
)


def builtin(name: str) -> Callable[..., Any] | None:
    """Return the function `name` of builtins.c; None where there is no library, or the interpreter is another one.

    It raises nothing, and trusts its arguments: what is no number or no list where it expects one, it takes for some.
    """
    library = bound_library()
    if library is None or not hasattr(library, f"trainermon_builtin_{name}"):  # as one that was built before has not
        return None
    make = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
    definition = ctypes.c_char.in_dll(library, f"trainermon_builtin_{name}")
    found: Callable[..., Any] = make(("PyCFunction_NewEx", ctypes.pythonapi))(ctypes.addressof(definition), None, None)
    return found


@functools.cache
def bound_library() -> ctypes.CDLL | None:
    """Return the library, which knows where the functions of the interpreter are; None: see `builtin`."""
    library = library_or_none()
    if library is None or not hasattr(library, "trainermon_bind_python"):
        return None
    try:
        addresses = [ctypes.cast(getattr(ctypes.pythonapi, name), ctypes.c_void_p).value for name in _OF_PYTHON]
    except AttributeError:
        return None
    library.trainermon_bind_python((ctypes.c_void_p * len(addresses))(*addresses))
    return library
