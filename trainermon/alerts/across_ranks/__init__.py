"""Conditions that compare ranks."""
