"""Judges single operations against float64: references, families, allowances, verdicts."""
