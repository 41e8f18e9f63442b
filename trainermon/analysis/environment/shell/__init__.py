"""Reads shell scripts as bash does, without running anything."""
