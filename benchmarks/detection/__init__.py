"""Labelled training runs, and what the alert rules make of them; `benchmarks/bench_detection.py` is the entrance."""
