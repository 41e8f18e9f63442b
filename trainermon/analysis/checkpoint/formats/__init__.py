"""The readers of checkpoint formats, one module each."""
