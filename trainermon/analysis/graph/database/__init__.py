"""Graphs in the files of msprobe's TensorBoard plugin (`.vis.db`)."""
