"""The first difference between two runs."""
