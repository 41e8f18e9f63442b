"""Hooks on cells and tensors of MindSpore."""
