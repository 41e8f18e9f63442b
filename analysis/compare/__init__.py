"""Two dumps held against one another: what differs, what of it is rounding, and where it arose."""

from trainermon.analysis.compare.comparison import CompareOptions, Comparison, Mode, compare
from trainermon.analysis.compare.distributed import compare_distributed

__all__ = ["CompareOptions", "Comparison", "Mode", "compare", "compare_distributed"]
