"""Callbacks that put the monitor into other people's training loops; each module imports its own package only."""
