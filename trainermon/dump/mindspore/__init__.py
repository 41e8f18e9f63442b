"""Dumps of MindSpore: what cells and functions take and return, and all gradients.

from trainermon.dump.mindspore import PrecisionDebugger
"""

from trainermon.dump.mindspore.debugger import PrecisionDebugger

__all__ = ["PrecisionDebugger"]
