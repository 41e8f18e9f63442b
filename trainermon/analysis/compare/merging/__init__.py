"""Puts the parts of split tensors together."""
