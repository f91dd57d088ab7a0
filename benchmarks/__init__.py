"""Measurements behind the numbers in README; run with `python -m benchmarks`."""
