"""Start of a coordinator and `fl run list` with a ledger of many runs and rounds.

Fills a ledger through the store's own methods: ended runs, and open ones with the checkpoint of their last round. Then
starts a real coordinator on it, and measures the time until it serves, its memory, and the time of commands of `fl` as
processes. Prints JSON.

    python -m benchmarks.long_ledger --runs 100 --rounds 100000
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

from benchmarks.deployment import TASK, Deployment, Server, cpu_s, resident_mb
from benchmarks.processes import Processes
from fl_server.aggregation.engine import Engine
from fl_server.aggregation.methods import complete
from fl_server.run.round_statistics import RoundStatistics
from fl_server.run_settings.config import RunConfig
from fl_server.run_settings.spec import from_values
from fl_server.store.checkpoints import Checkpoints
from fl_server.store.database.store import Store, open_ledger
from fl_server.store.records import CommitRecord, HistoryRecord, RunRecord
from fl_server.store.state_directory import lock_directory
from fl_tasks import load_task

PARAMETERS = 1000
CREATED = 1.76e9
"""Unix seconds of the first run."""


@dataclass(frozen=True)
class Size:
    """How much is in the ledger."""

    runs: int
    rounds: int
    """Over all runs; each has the same number."""
    unended: int
    """The newest ones."""

    @property
    def rounds_of_a_run(self) -> int:
        """Committed rounds of each run."""
        return self.rounds // self.runs


def run_config(number: int, rounds: int) -> RunConfig:
    """The configuration of a run that needs more clients than there are, and has one round left."""
    return complete(
        from_values(
            {
                "name": f"run-{number:04d}",
                "task": {"name": TASK, "options": {"parameters": PARAMETERS}},
                "algorithm": {"name": "fedavg"},
                "local": {"steps": 1},
                "round": {"clients_per_round": 10},
                "stop": {"rounds": rounds + 1},
                "seed": number,
            }
        )
    )


def commits(run_id: str, rounds: int, digest: str) -> Iterator[CommitRecord]:
    """Commits with metrics and statistics, as a run of ten clients has them."""
    for round_ in range(rounds):
        statistics = RoundStatistics(
            norms=dict.fromkeys(("update", "update_smallest", "update_largest", "aggregate", "direction"), 0.123456789),
            seconds=dict.fromkeys(("selecting", "collecting", "stepping", "committing"), 1.234),
        )
        statistics.assignments.update({"admitted": 10, "failed": round_ % 3})
        yield CommitRecord(
            run_id=run_id, round=round_, committed_at=CREATED + round_, seconds=3.21, attempts=1, accepted=10,
            dropped=0, training_loss=1.0 / (round_ + 1), bytes_down=44_700_000, bytes_up=44_700_000,
            model_digest=digest, metrics={"accuracy": 1 - 1 / (round_ + 2), "loss": 1 / (round_ + 2)},
            statistics=statistics.to_text(),
        )  # fmt: skip


def fill(store: Store, state: Path, size: Size) -> None:
    """Write all runs."""
    rounds = size.rounds_of_a_run
    for number in range(size.runs):
        config, is_open = run_config(number, rounds), number >= size.runs - size.unended
        created = CREATED + number
        record = RunRecord(config.name, config.model_dump(exclude_none=True), "running", "", created)
        store.create_run(record, HistoryRecord(created, "admin:bench", "run_created", config.name))
        last = None
        for last in commits(config.name, rounds, f"blake3:{number:064x}"):
            why = HistoryRecord(last.committed_at, "coordinator", "round_committed", config.name, f"round {last.round}")
            store.commit(last, why)
        if is_open and last is not None:
            save_checkpoint(state, config, last)
        if not is_open:
            ended = replace(record, state="completed", reason="all rounds are done", ended_at=CREATED + number + rounds)
            store.update_run(ended, HistoryRecord(CREATED, "coordinator", "run_completed", config.name))


def save_checkpoint(state: Path, config: RunConfig, last: CommitRecord) -> None:
    """The checkpoint that an open run continues from: its first model, under the last round's number."""
    engine = Engine(config, load_task(config.task.name, config.task.options, [TASK]))
    snapshot = replace(engine.first(), round=last.round)
    facts: dict[str, object] = {"commit": asdict(last), "left_out": ()}
    Checkpoints(state / "checkpoints").save(config.name, last.round, engine.snapshots.checkpoint(snapshot, facts))


def measure(folder: Path, extra: str, repeats: int) -> dict[str, object]:
    """Start the coordinator and call it. The first start writes the totals, which `fill` does not."""
    starts, processors, memories, lists, shows = [], [], [], [], []
    for _ in range(repeats):
        with Processes(folder) as processes:
            began = time.monotonic()
            server = Deployment(folder, processes, tls=False).serve(extra=extra)
            starts.append(time.monotonic() - began)
            processors.append(cpu_s(server.child))
            memories.append(resident_mb(server.child))
            lists.append(timed(server, "run", "list"))
            shows.append(timed(server, "run", "show", "run-0000"))
    return {
        "first_start_s": round(starts[0], 2),
        "start_s": round(median(starts[1:] or starts), 2),
        "first_start_cpu_s": round(processors[0], 2),
        "start_cpu_s": round(median(processors[1:] or processors), 2),
        "memory_mb": round(median(memories)),
        "run_list_s": round(median(wall for wall, _ in lists), 2),
        "run_list_cpu_s": round(median(cpu for _, cpu in lists), 2),
        "run_show_s": round(median(wall for wall, _ in shows), 2),
        "run_show_cpu_s": round(median(cpu for _, cpu in shows), 2),
    }


def timed(server: Server, *command: str) -> tuple[float, float]:
    """Seconds of a command of `fl` as a process from its start to its exit, and its processor time."""
    began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    arguments = [sys.executable, "-m", "fl_ops", *command, "--server", server.admin.server, "--insecure"]
    subprocess.run(arguments, check=True, stdout=subprocess.DEVNULL, env=os.environ)  # noqa: S603 - our own module
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.monotonic() - began, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main(arguments: Sequence[str] | None = None) -> None:
    """Fill, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=100_000, help="over all runs")
    parser.add_argument("--open", type=int, default=2, help="runs that have not ended")
    parser.add_argument("--repeats", type=int, default=4, help="starts; the first one is reported apart")
    parser.add_argument("--ledger", help="URL of an empty PostgreSQL database, in place of SQLite")
    parser.add_argument("--folder", type=Path, help="keeps the filled state directory here, and uses one that is here")
    options = parser.parse_args(arguments)
    size = Size(options.runs, options.rounds, options.open)
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        state, began = folder / "state", time.monotonic()
        if not state.exists():
            with lock_directory(state) as lock:
                store = open_ledger(options.ledger, state, "process", lock.home)
                lock.keep_ledger(store.coordinator_id)
                fill(store, state, size)
                store.close()
        filled = round(time.monotonic() - began, 1)
        extra = f'ledger = "{options.ledger}"\n' if options.ledger else ""
        database = "PostgreSQL" if options.ledger else "SQLite"
        result = {**asdict(size), "database": database, "filled_s": filled, **measure(folder, extra, options.repeats)}
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
