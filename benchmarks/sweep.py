"""Round time and server memory for several numbers of clients and model sizes, with a plot.

    python -m benchmarks.sweep --only clients    # measures; adds to docs/measurements/benchmarks/round_overhead.json
    python -m benchmarks.sweep --only sizes
    python -m benchmarks.sweep --plot            # draws docs/images/round-overhead.svg from that file
    python -m benchmarks.sweep --table clients   # prints the rows of docs/measurements/benchmarks.md from that file

Each case runs `benchmarks.round_overhead` in its own process, with its lower bounds. A new result replaces the earlier
one of the same case.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.sweep_results import SERIES, Case, Result, keep, of_series, read
from benchmarks.table import markdown

DOCS = Path(__file__).parents[1] / "docs"
RESULTS = DOCS / "measurements/benchmarks/round_overhead.json"
PLOT = DOCS / "images/round-overhead.svg"
SMALL = 10_000_000
"""With fewer parameters, the models are only a small part of a round's memory."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, draw or print."""
    parser = argparse.ArgumentParser(description="Round time and server memory by number of clients and model size.")
    parser.add_argument("--only", choices=sorted(SERIES), nargs="+", default=[], help="measure these series")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--results", type=Path, default=RESULTS, help="the JSON file")
    parser.add_argument("--plot", action="store_true", help="draw the plot from the file")
    parser.add_argument("--table", choices=sorted(SERIES), help="print a series of the file as Markdown rows")
    options = parser.parse_args(arguments)
    for case in dict.fromkeys(case for name in options.only for case in SERIES[name]):
        keep(options.results, measure(case, options.rounds))
    if options.plot:
        from benchmarks.sweep_plot import draw  # noqa: PLC0415 - only the plot needs matplotlib

        draw(read(options.results), PLOT)
    if options.table:
        print("\n".join(markdown(map(row, of_series(options.table, read(options.results))))))


def measure(case: Case, rounds: int) -> Result:
    """Run one round_overhead. Returns its JSON line."""
    command = [sys.executable, "-m", "benchmarks.round_overhead", f"--rounds={rounds}", *case.arguments()]
    print(" ".join(command[2:]), file=sys.stderr)
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout  # noqa: S603 - our own
    result: Result = json.loads(output)
    print(json.dumps(result), file=sys.stderr)
    return result


def row(result: Result) -> dict[str, object]:
    """The columns of docs/measurements/benchmarks.md for a result."""
    method = {"fedavg": "FedAvg", "fedcm": "FedCM"}[result["algorithm"]] + (", mTLS" if result["tls"] else "")
    return {
        "clients": result["clients"],
        "parameters": f"{result['params']:,}",
        "algorithm": method,
        "round, median": f"{result['round_s_median']:.2f} s",
        "over bare gRPC": f"{result['over_grpc']:.2f} ({result['floor_grpc_s']:.3f} s)",
        "over TCP": f"{result['over_tcp']:.2f} ({result['floor_tcp_s']:.3f} s)",
        "server CPU a round": f"{result['server_cpu_s_per_round']:.2f} s",
        "server memory, peak": f"{result['server_rss_mb']:,.0f} MB",
        "over idle, in models": f"{result['server_rss_models']:.1f}" if result["params"] >= SMALL else "",
        "a client's memory": f"{result['client_rss_mb']['median']:,.0f} MB",
        "start to first round": f"{result['start_to_first_round_s']:.1f} s",
    }


if __name__ == "__main__":
    main()
