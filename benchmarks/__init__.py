"""Measurements of speed and memory, run by hand; docs/benchmarks.md has the results.

Each measurement is a command: `python -m benchmarks.NAME`. A benchmark may import every package. No package imports a
benchmark.
"""
