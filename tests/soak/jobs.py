"""Work for the daemons: a run that is never done, short ones one after another, and an operator who looks in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from itertools import islice
from random import Random

from fl_ops.errors import OpsError
from protos.fl.v1 import admin_pb2
from tests.integration.harness import Coordinator
from tests.soak.plan import TASK, Plan

LONG = "long"
_METHODS = ({"name": "fedcm", "parameters": {"alpha": 0.2}}, {"name": "fedrobust"}, {"name": "fedavg"})
"""The second keeps state on the devices, which must go with its run."""


class Jobs:
    """All runs of a soak."""

    def __init__(self, server: Coordinator, plan: Plan) -> None:
        self._server, self._plan = server, plan
        self._short = ""
        self.counts: Counter[str] = Counter()
        self.rounds = 0
        self.faults: list[str] = []

    def begin(self) -> None:
        """The long run, beside which the short ones go."""
        self._create(LONG, 10_000_000, _METHODS[0])

    def keep_going(self) -> None:
        """A new short run when the last one is over."""
        with self._server.admin() as admin:
            runs = {run.run_id: run for run in admin.list_runs()}
        self.rounds = sum(run.rounds_done for run in runs.values())
        if self._short and not runs[self._short].HasField("ended"):
            return
        if self._short:
            self._check(runs[self._short])
        self.short()

    def short(self) -> str:
        """One more short run; its id."""
        number = self.counts["created"]
        self._short = f"short-{number}"
        self._create(self._short, self._plan.rounds, _METHODS[number % len(_METHODS)])
        return self._short

    def _create(self, name: str, rounds: int, algorithm: dict[str, object]) -> None:
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
        """No run is left; a run that failed is a fault."""
        with self._server.admin() as admin:
            for run in admin.list_runs():
                if not run.HasField("ended"):
                    with suppress(OpsError):  # it came to its end in between
                        admin.stop_run(run.run_id, "the soak is over")
            runs = admin.list_runs()
        self.rounds = sum(run.rounds_done for run in runs)
        self.faults += [f"{run.run_id} failed: {run.reason}" for run in runs if run.state == _FAILED]


_FAILED = admin_pb2.RUN_STATE_FAILED


class Operator:
    """Somebody who looks at this and that, and watches a run without saying when he is gone."""

    def __init__(self, server: Coordinator, seed: int) -> None:
        self._server = server
        self._chance = Random(seed)
        self._watching = ExitStack()
        self._events: Iterator[object] = iter(())
        self.calls = 0

    def look_in(self, gone: list[str]) -> None:
        """One call. gone: clients that can be forgotten."""
        self.calls += 1
        looks: list[Callable[[], object]] = [self._show, self._list, self._history, self._export, self._watch]
        if gone:
            looks.append(lambda: self._forget(self._chance.choice(gone)))
        self._chance.choice(looks)()

    def leave(self) -> None:
        """Hang up."""
        self._watching.close()

    def _show(self) -> None:
        self._server.run(LONG)

    def _list(self) -> None:
        with self._server.admin() as admin:
            admin.list_runs()
            admin.list_clients()

    def _history(self) -> None:
        self._server.history(LONG)

    def _export(self) -> None:
        """A model of which only the beginning is taken."""
        with self._server.admin() as admin:
            list(islice(admin.export_model(LONG, "latest"), 1))

    def _watch(self) -> None:
        """The watcher before this one hangs up, and this one watches until the next."""
        self._watching.close()
        admin = self._watching.enter_context(self._server.admin())
        self._events = admin.watch_run(LONG)
        next(self._events)

    def _forget(self, client: str) -> None:
        with self._server.admin() as admin, suppress(OpsError):  # it may have been forgotten before
            admin.forget_client(client)
