"""Measurements of speed and memory, run by hand; results are in docs/benchmarks.md."""
