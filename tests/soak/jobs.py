"""Work for the daemons: one endless run, a sequence of short runs, and an operator's calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from itertools import islice
from random import Random
from typing import Any

from fl_ops.errors import OpsError
from protos.fl.v1 import admin_pb2
from tests.processes.federation import Coordinator
from tests.soak.plan import TASK, Plan

LONG = "long"
_METHODS: tuple[Mapping[str, Any], ...] = (
    {"name": "fedcm", "parameters": {"alpha": 0.2}},
    {"name": "fedrobust"},
    {"name": "fedavg"},
)
"""The second keeps client states, which must be removed with its run."""


class Jobs:
    """The runs of a soak."""

    def __init__(self, server: Coordinator, plan: Plan) -> None:
        self._server, self._plan = server, plan
        self._short = ""
        self.counts: Counter[str] = Counter()
        self.rounds = 0
        self.faults: list[str] = []

    def begin(self) -> None:
        """Start the long run, which continues during the short ones."""
        self._create(LONG, 10_000_000, _METHODS[0])

    def start_next_run(self) -> None:
        """Start a short run if the last one is over."""
        with self._server.admin() as admin:
            runs = {run.run_id: run for run in admin.runs.list_runs()}
        self.rounds = sum(run.rounds_done for run in runs.values())
        if self._short and not runs[self._short].HasField("ended"):
            return
        if self._short:
            self._check(runs[self._short])
        self.short()

    def short(self) -> str:
        """Start a short run; returns its id."""
        number = self.counts["created"]
        self._short = f"short-{number}"
        self._create(self._short, self._plan.rounds, _METHODS[number % len(_METHODS)])
        return self._short

    def _create(self, name: str, rounds: int, algorithm: Mapping[str, Any]) -> None:
        self.counts["created"] += 1
        self._server.create(
            name,
            task={"name": TASK},
            algorithm=algorithm,
            local={"learning_rate": 0.02, "epochs": None, "steps": 1},
            round={"clients_per_round": 3, "min_clients": 3, "quorum": 2, "close": "goal", "deadline_s": 10.0},
            stop={"rounds": rounds},
            evaluation={"every": 5, "clients_every": 10, "clients": 3, "clients_deadline_s": 10.0},
            keep_checkpoints=self._plan.keep,
        )

    def _check(self, run: admin_pb2.RunStatus) -> None:
        self.counts["ended"] += 1
        if run.state != admin_pb2.RUN_STATE_COMPLETED:
            self.faults.append(f"{run.run_id} ended otherwise: {run.reason}")

    def stop(self) -> None:
        """Stop all runs; a failed run is a fault."""
        with self._server.admin() as admin:
            for run in admin.runs.list_runs():
                if not run.HasField("ended"):
                    with suppress(OpsError):  # it ended in between
                        admin.runs.stop_run(run.run_id, "the soak is over")
            runs = admin.runs.list_runs()
        self.rounds = sum(run.rounds_done for run in runs)
        self.faults += [f"{run.run_id} failed: {run.reason}" for run in runs if run.state == _FAILED]


_FAILED = admin_pb2.RUN_STATE_FAILED


class Operator:
    """An operator that reads, and that watches a run without ending the watch properly."""

    def __init__(self, server: Coordinator, seed: int) -> None:
        self._server = server
        self._random = Random(seed)
        self._watching = ExitStack()
        self._events: Iterator[object] = iter(())
        self.calls = 0

    def call(self, stopped: list[str]) -> None:
        """Make one random call. stopped: clients that can be forgotten."""
        self.calls += 1
        calls: list[Callable[[], object]] = [self._show, self._list, self._history, self._export, self._watch]
        if stopped:
            calls.append(lambda: self._forget(self._random.choice(stopped)))
        self._random.choice(calls)()

    def leave(self) -> None:
        """Cancel the watch."""
        self._watching.close()

    def _show(self) -> None:
        self._server.run(LONG)

    def _list(self) -> None:
        with self._server.admin() as admin:
            admin.runs.list_runs()
            admin.clients.list_clients()

    def _history(self) -> None:
        self._server.history(LONG)

    def _export(self) -> None:
        """Read only the beginning of a model."""
        with self._server.admin() as admin:
            list(islice(admin.models.export_model(LONG, "latest"), 1))

    def _watch(self) -> None:
        """Cancel the last watch and start another."""
        self._watching.close()
        admin = self._watching.enter_context(self._server.admin())
        self._events = admin.runs.watch_run(LONG)
        next(self._events)

    def _forget(self, client: str) -> None:
        with self._server.admin() as admin, suppress(OpsError):  # it may already be forgotten
            admin.clients.forget_client(client)
