"""What a run has for its whole life: identity, algorithm, the coordinator's services, and the records it keeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import algorithms as fl
from fl_server.admission.norms import NormHistory
from fl_server.aggregation.methods import keeps_client_state
from fl_server.privacy_accounts import Account
from fl_server.rounds.metrics import Directions
from fl_server.run.client_states import ClientStates
from fl_server.run.models import ModelSource, ModelStore
from fl_server.run.progress import CohortLog, RoundTrace, Watchers
from fl_server.run.rounds import RunCounters, RunRounds
from fl_server.run.totals import Draw, LabelOrder
from fl_server.run_settings.config import AlgorithmSection, RunConfig
from fl_server.services import Services
from fl_server.store.records import CommitRecord
from protos.frozen import frozen_text


@dataclass(frozen=True, slots=True)
class RunDependencies:
    """What a run's task and algorithm provide."""

    fingerprint: tuple[str, str]
    """(version, source) of the task that clients must have."""
    algorithm: fl.Algorithm
    models: ModelSource
    directions: Directions
    """The directions of metrics in the run's file and its task."""
    account: Account | None = None
    """That of a run with client-level privacy."""


def _method(section: AlgorithmSection) -> dict[str, str]:
    return {} if section.fingerprint is None else {"name": section.name, **dict(section.fingerprint)}


def _package(config: RunConfig) -> dict[str, str]:
    return {"package": config.task.package} if config.task.package else {}


class RunContext:
    """The parts of a run that are never replaced. The configuration may be: `RunControl.config` is the current one."""

    def __init__(self, services: Services, run_id: str, config: RunConfig, dependencies: RunDependencies) -> None:
        """Without committed rounds."""
        version, source = dependencies.fingerprint
        self.run_id, self.services = run_id, services
        self.fleet, self.metrics = services.fleet, services.metrics
        self.store = services.ledger.store
        """The ledger's methods, for `RunControl.write` and `read`."""
        self.algorithm = dependencies.algorithm
        self.code = {"name": config.task.name, "version": version, "source": source, **_package(config)}
        """Name, version and source of the task that clients must have."""
        self.method = _method(config.algorithm)
        """Name, version and source of the method that clients must have; empty for a built-in one, which all have."""
        self.encodings = config.encodings.needed
        """Those that clients must know; fixed for the whole run."""
        self.rounds = RunRounds(config.stop.criterion)
        self.directions = dependencies.directions
        """Which of the metrics are better when lower."""
        self.task_code = dependencies.models.task
        """The task, for the values of metrics that are computed from the sums of clients."""
        self.hides_cohorts = hidden = config.hides_cohorts
        """Whether nobody is told who takes part in its rounds."""
        self.counters = RunCounters(services.metrics, run_id, self.rounds, hidden=hidden)
        self.watchers = Watchers(hides_clients=hidden)
        self.trace = RoundTrace(None if hidden else services.traces, run_id)
        self.cohort_log = CohortLog(hidden=hidden)
        """For log lines about the clients of a round."""
        self.model = ModelStore(services, run_id, dependencies.models)
        self.norms, self.label_order = NormHistory(), LabelOrder()
        self.client_states = ClientStates(run_id, services.config.states, summed=self.algorithm.needs_population)
        self.keeps_client_state = keeps_client_state(config, self.algorithm)
        """Whether each client keeps a state of its own from round to round, for the method or with personal parameters.
        """

    @property
    def task(self) -> Mapping[str, str]:
        """What clients must offer: `code`, the digest of frozen parameters that are not sent, and encodings."""
        frozen = self.model.local_frozen
        wanted = self.code if frozen is None else {**self.code, "frozen": frozen_text(frozen)}
        return {**wanted, "encodings": " ".join(sorted(self.encodings))} if self.encodings else wanted

    @property
    def fingerprint(self) -> tuple[str, str]:
        """(version, source) of the task that clients must have."""
        return self.code["version"], self.code["source"]

    async def commit_of(self, round_: int) -> CommitRecord | None:
        """The commit of a round; None if the round is not committed."""
        if (recent := self.rounds.recent.get(round_)) is not None:
            return recent
        if not 0 <= round_ < self.rounds.committed:
            return None
        commits = await self.services.ledger.do(self.store.commits, self.run_id, round_, 1)
        return commits[0] if commits else None

    def place_of(self, round_: int) -> str:
        """A round of the run in texts about a client, without its name where cohorts are hidden."""
        return "a run with differential privacy" if self.hides_cohorts else f"run {self.run_id} round {round_}"

    async def draw_of(self, round_: int) -> Draw | None:
        """Whom a committed round drew and counted; None if the ledger does not have it, or it is hidden."""
        if self.hides_cohorts:
            return None
        draws = await self.services.ledger.do(self.store.draws, self.run_id, round_, round_)
        return Draw(*draws[round_]) if round_ in draws else None

    async def state_epochs(self, rounds: Sequence[int]) -> dict[int, int]:
        """The epochs of client states in committed rounds."""
        recent = {round_: self.rounds.recent[round_].state_epoch for round_ in rounds if round_ in self.rounds.recent}
        if not (others := [round_ for round_ in rounds if round_ not in recent]):
            return recent
        return {**await self.services.ledger.do(self.store.state_epochs, self.run_id, others), **recent}
