"""Measurements of speed and memory, run by hand; docs/measurements/benchmarks.md has the results.

Each measurement is a command: `python -m benchmarks.NAME`. A benchmark may import every package. No package imports a
benchmark.
"""

from fl_common.certificates.tls_version import set_oldest_tls

set_oldest_tls("1.3")
