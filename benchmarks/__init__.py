"""Measurements of speed and memory, run by hand; docs/measurements/benchmarks.md has the results.

Each measurement is a command: `python -m benchmarks.NAME`. A benchmark may import every package. No package imports a
benchmark.
"""

import signal
import sys

from fl_common.certificates.tls_version import set_oldest_tls

set_oldest_tls("1.3")
if sys.argv[0] == "-m":  # Python looks for the command, so this process is the benchmark, and none that it started
    # By default SIGTERM, as of `timeout`, leaves the processes and folders of a benchmark behind.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
