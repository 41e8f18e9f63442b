"""Checkpoints of training, in whatever format and however split: what is in them, and how two differ."""
