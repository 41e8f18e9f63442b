"""Histograms of tensors: how many of their elements have which sign and power of two."""

from trainermon.statistics.histograms.counting import count

__all__ = ["count"]
