"""Round time and server memory against the number of clients and against the size of the model, and a picture of both.

    python -m benchmarks.sweep --only clients    # measures; adds to docs/benchmarks/round_overhead.json
    python -m benchmarks.sweep --only sizes
    python -m benchmarks.sweep --plot            # draws docs/images/round-overhead.svg from that file
    python -m benchmarks.sweep --table clients   # prints the Markdown rows of docs/benchmarks.md from that file

Each case is a `benchmarks.round_overhead` in a process of its own, with its floors; one that is measured again takes
the place of the earlier one.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.demo_grid import machine
from benchmarks.table import markdown

DOCS = Path(__file__).parents[1] / "docs"
RESULTS = DOCS / "benchmarks" / "round_overhead.json"
PICTURE = DOCS / "images" / "round-overhead.svg"
RESNET18 = 11_173_962
SMALL = 10_000_000
"""With fewer parameters the memory of a round is not the models'."""
Found = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """Arguments of one round_overhead."""

    clients: int
    params: int
    algorithm: str = "fedavg"
    tls: bool = False

    def arguments(self) -> list[str]:
        """As they stand on the command line."""
        plain = [f"--{name}={value}" for name, value in asdict(self).items() if name != "tls"]
        return [*plain, *(["--tls"] if self.tls else [])]

    def is_of(self, found: Found) -> bool:
        """Whether it is what was measured there."""
        return all(found[name] == value for name, value in asdict(self).items())


SERIES: dict[str, tuple[Case, ...]] = {
    "clients": tuple(Case(clients, RESNET18) for clients in (2, 5, 10, 20, 40)),
    "sizes": tuple(Case(10, params) for params in (10_000, 1_000_000, RESNET18, 45_000_000)),
    "others": (
        Case(10, RESNET18, "fedcm"),
        Case(10, RESNET18, tls=True),
        Case(10, RESNET18, "fedcm", tls=True),
        Case(50, 10_000),
    ),
    "short": (
        Case(10, 10_000),
        Case(2, RESNET18),
        Case(10, RESNET18),
        Case(10, RESNET18, "fedcm"),
        Case(10, RESNET18, tls=True),
    ),
}
"""What is swept; `short` is for `make bench`."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, draw or print."""
    parser = argparse.ArgumentParser(description="Round time and server memory against clients and model size.")
    parser.add_argument("--only", choices=sorted(SERIES), nargs="+", default=[], help="measure these series")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--results", type=Path, default=RESULTS, help="the JSON file")
    parser.add_argument("--plot", action="store_true", help="draw the picture from the file")
    parser.add_argument("--table", choices=sorted(SERIES), help="print a series of the file as Markdown rows")
    asked = parser.parse_args(arguments)
    for case in dict.fromkeys(case for name in asked.only for case in SERIES[name]):
        keep(asked.results, measured(case, asked.rounds))
    if asked.plot:
        from benchmarks.sweep_plot import draw  # noqa: PLC0415 - matplotlib is needed here alone

        draw(read(asked.results), PICTURE)
    if asked.table:
        print("\n".join(markdown(map(row, of_series(asked.table, read(asked.results))))))


def measured(case: Case, rounds: int) -> Found:
    """One round_overhead, as it prints it."""
    command = [sys.executable, "-m", "benchmarks.round_overhead", f"--rounds={rounds}", *case.arguments()]
    print(" ".join(command[2:]), file=sys.stderr)
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout  # noqa: S603 - our own
    found: Found = json.loads(output)
    print(json.dumps(found), file=sys.stderr)
    return found


def read(path: Path) -> list[Found]:
    """All that was measured."""
    found: list[Found] = json.loads(path.read_text())["measured"] if path.exists() else []
    return found


def keep(path: Path, found: Found) -> None:
    """Add to the file, in the place of the same case."""
    case = Case(**{name: found[name] for name in asdict(Case(0, 0))})
    kept = [each for each in read(path) if not case.is_of(each)]
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(each) for each in sorted([*kept, found], key=_order))
    path.write_text(f'{{"machine": {json.dumps(_machine())},\n"measured": [\n{lines}\n]}}\n')


def _machine() -> dict[str, Any]:
    known = machine()
    return {name: known[name] for name in ("system", "cpus", "python", "torch")} | {"grpc": version("grpcio")}


def _order(found: Found) -> tuple[object, ...]:
    return tuple(found[name] for name in ("algorithm", "tls", "params", "clients"))


def of_series(name: str, found: Sequence[Found]) -> list[Found]:
    """What was measured of a series, in its order."""
    return [each for case in SERIES[name] for each in found if case.is_of(each)]


def row(found: Found) -> dict[str, object]:
    """A case as docs/benchmarks.md has it."""
    method = {"fedavg": "FedAvg", "fedcm": "FedCM"}[found["algorithm"]] + (", mTLS" if found["tls"] else "")
    return {
        "clients": found["clients"],
        "parameters": f"{found['params']:,}",
        "algorithm": method,
        "round, median": f"{found['round_s_median']:.2f} s",
        "over bare gRPC": f"{found['over_grpc']:.2f} ({found['floor_grpc_s']:.3f} s)",
        "over TCP": f"{found['over_tcp']:.2f} ({found['floor_tcp_s']:.3f} s)",
        "server CPU a round": f"{found['server_cpu_s_per_round']:.2f} s",
        "server memory, peak": f"{found['server_rss_mb']:,.0f} MB",
        "over idle, in models": f"{found['server_rss_models']:.1f}" if found["params"] >= SMALL else "",
        "a client's memory": f"{found['client_rss_mb']['median']:,.0f} MB",
        "start to first round": f"{found['start_to_first_round_s']:.1f} s",
    }


if __name__ == "__main__":
    main()
