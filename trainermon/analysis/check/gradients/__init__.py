"""Gradients of single calls, as msprobe records them."""
