"""Checks every recorded call of a dump against float64."""
