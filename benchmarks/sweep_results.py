"""The cases of the sweep, and the JSON file that keeps their results."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.demo_grid import machine

RESNET18 = 11_173_962
"""Parameters of a ResNet-18."""
Result = dict[str, Any]
"""The JSON line of one `benchmarks.round_overhead`."""


@dataclass(frozen=True)
class Case:
    """Arguments of one `benchmarks.round_overhead`."""

    clients: int
    params: int
    algorithm: str = "fedavg"
    tls: bool = False

    def arguments(self) -> list[str]:
        """The options of the command line."""
        plain = [f"--{name}={value}" for name, value in asdict(self).items() if name != "tls"]
        return [*plain, *(["--tls"] if self.tls else [])]

    def matches(self, result: Result) -> bool:
        """Whether the result is of this case."""
        return all(result[name] == value for name, value in asdict(self).items())


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
"""The cases by series. `short` is for `make bench`."""


def read(path: Path) -> list[Result]:
    """All results of the file; none if there is no file."""
    results: list[Result] = json.loads(path.read_text())["measured"] if path.exists() else []
    return results


def keep(path: Path, result: Result) -> None:
    """Add a result to the file. It replaces an earlier result of the same case."""
    case = Case(**{name: result[name] for name in asdict(Case(0, 0))})
    kept = [earlier for earlier in read(path) if not case.matches(earlier)]
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(kept_result) for kept_result in sorted([*kept, result], key=_order))
    path.write_text(f'{{"machine": {json.dumps(_machine())},\n"measured": [\n{lines}\n]}}\n')


def of_series(name: str, results: Sequence[Result]) -> list[Result]:
    """The results of a series, in its order."""
    return [result for case in SERIES[name] for result in results if case.matches(result)]


def _machine() -> dict[str, Any]:
    known = machine()
    return {name: known[name] for name in ("system", "cpus", "python", "torch")} | {"grpc": version("grpcio")}


def _order(result: Result) -> tuple[object, ...]:
    return tuple(result[name] for name in ("algorithm", "tls", "params", "clients"))
