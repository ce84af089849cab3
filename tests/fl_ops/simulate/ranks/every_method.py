"""A run of every case, one after the other, in the processes that torchrun started; a program for test_every_method.

    python -m torch.distributed.run ... -m tests.fl_ops.simulate.ranks.every_method RESULTS.json

A case is a method, or a method with encodings. One start of the ranks serves all, because a start loads torch in each.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import algorithms as fl
from fl_ops.simulate.engine_choice import EngineOptions
from fl_ops.simulate.output.results import SeedResult
from fl_ops.simulate.ranks.group import joined
from fl_ops.simulate.seeds import Job, Report, simulate
from fl_ops.simulate.settings import parse_simulation
from tests.skipping import suited

ENCODINGS: dict[str, dict[str, Any]] = {
    "": {},
    " in int8": {"update": "int8", "model": "bf16", "direction": "int8", "reference": "direction"},
    " in topk": {"update": "topk", "fraction": 0.3, "model": "eden4"},
}
CASES = [*fl.names(), *(method + name for method in ("fedcm", "scaffold") for name in ENCODINGS if name)]
"""Methods, and what follows their names for encodings."""
Rounds = list[list[Any]]
"""Model, loss, metrics and bytes of each round, as JSON values."""


def table(case: str) -> dict[str, Any]:
    """A small run: client states, buffers, dropout, clipping, evaluation on clients; clients of two sizes."""
    method, *encodings = case.partition(" ")
    content = {
        "task": {"name": "tests.fl_ops.points:NormedPoints", "options": {"part": 0.25}},
        "algorithm": {"name": method},
        "local": {"learning_rate": 0.2, "batch_size": 8},
        "round": {"clients_per_round": 5, "clip_update_norm": 0.2},
        "evaluation": {"clients_every": 2},
        "stop": {"rounds": 3},
        "simulation": {"clients": 7},
        "encodings": ENCODINGS["".join(encodings)],
    }
    return suited(content, 7)


def rounds_of(case: str, engine: EngineOptions) -> Rounds:
    """A case's rounds by this engine; none on a rank other than 0."""
    ended: list[SeedResult] = []

    def on_report(report: Report) -> None:
        if isinstance(report, SeedResult):
            ended.append(report)

    simulate(Job(parse_simulation(table(case)), 0, None, engine), on_report)
    rounds = [
        [done.digest, done.training_loss, done.metrics, done.bytes_down, done.bytes_up]
        for result in ended
        for done in result.rounds
    ]
    found: Rounds = json.loads(json.dumps(rounds))
    return found


def main(path: Path) -> None:
    """Rank 0 writes the rounds of each case."""
    with joined() as ranks:
        found = {case: rounds_of(case, EngineOptions(ranks=ranks)) for case in CASES}
    if ranks.rank == 0:
        path.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
