"""Own reproductions of published silent training errors, each with a healthy twin; see `benchmarks/bench_silent.py`."""
