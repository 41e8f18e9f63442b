"""Two dumps held against one another: what differs, what of it is rounding, and where it arose."""

from trainermon.analysis.compare.calls import compare, compare_distributed
from trainermon.analysis.compare.comparison import CompareOptions, Comparison, Mode

__all__ = ["CompareOptions", "Comparison", "Mode", "compare", "compare_distributed"]
