"""Replay: repeats a coordinator's run from its ledger and compares every model with the ledger's.

The ledger has the accepted updates of each round, so a replay draws nothing. Whatever happened in the run (lost
clients, over-selection, abandoned attempts, restarted states), the models must equal those of the ledger bit for bit.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from fl_common.units import counted
from fl_ops.errors import NotFound, Refused, UsageError
from fl_ops.simulate.buffered_updates import BufferedUpdates
from fl_ops.simulate.clients import prepare
from fl_ops.simulate.daemons import load_daemons
from fl_ops.simulate.engine_choice import SEQUENTIAL, EngineOptions
from fl_ops.simulate.federation import Federation
from fl_ops.simulate.output.console import print_line
from fl_ops.simulate.seeds import as_usage_errors, interruptible
from fl_ops.simulate.settings import SimulationConfig, read_simulation, with_code
from fl_ops.simulate.updates import NotDelivered
from fl_server.admission.norms import NormHistory
from fl_server.aggregation.server_update import Diverged
from fl_server.run.assignments import RoundPosition
from fl_server.run_settings.config import RunConfig
from fl_server.run_settings.spec import from_stored
from fl_server.store.checkpoints import start_file
from fl_server.store.database.store import Store, open_read_only
from fl_server.store.errors import StoreError, file_digest
from fl_server.store.records import CommitRecord, RunRecord
from fl_server.store.state_directory import RunSecrets
from fl_tasks import load_task
from protos.digests import digest_text

MOST_EVENTS = 1_000_000
"""Lines of a run's history that are read."""


@dataclass(frozen=True, slots=True)
class ReplayRequest:
    """The run to replay and the source of its clients."""

    run_id: str
    ledger: Path | str
    """The coordinator's state directory, or the URL of its ledger."""
    config: Path
    """A run's file, for its table [simulation] and the task's options on this machine."""
    client_configs: Path | None
    """Folder of the daemons' TOML files; None: the clients of [simulation]."""
    engine: EngineOptions = SEQUENTIAL


@dataclass(frozen=True, slots=True)
class ReplayedRound:
    """One committed round, repeated."""

    round: int
    accepted: tuple[str, ...]
    expected: str
    """Digest of the model in the ledger."""
    digest: str
    """Digest of the replayed model."""
    expected_averaged: str | None
    """Digest of the averaged model in the ledger; None if the run has none after this round."""
    averaged: str | None
    """The same of the replayed one."""
    differing: tuple[str, ...]
    """Clients that sent another update here than in the ledger."""

    @property
    def same(self) -> bool:
        """Whether the models, and the averaged ones, are equal bit for bit."""
        return (self.expected, self.expected_averaged) == (self.digest, self.averaged)


def replay(request: ReplayRequest, console: Console) -> dict[str, Any]:
    """Replay a run and print a line for each round. Returns the results as JSON values. Raises OpsError."""
    ledger = open_ledger(request.ledger)
    try:
        local = read_simulation(request.config)
        with as_usage_errors():
            run = with_initial_model(config_of(find_run(ledger, request.run_id)), local, request)
            if run.record_privacy is not None:
                raise Refused(
                    f"run {request.run_id} has [privacy]: its noise comes from secrets that only the devices have, so"
                    " its models cannot be made again"
                )
            config = with_code(_with_local_options(run, local))
            federation = _federation(config, local, request)
        rounds = []
        with federation, interruptible():
            for each in replay_of(ledger, request.run_id, federation).rounds():
                rounds.append(each)
                print_line(console, round_line(each))
    finally:
        ledger.close()
    if not rounds:
        raise Refused(f"run {request.run_id} has no committed round yet")
    facts = [_facts(each) for each in rounds]
    return {"run_id": request.run_id, "same": all(each.same for each in rounds), "rounds": facts}


def _facts(done: ReplayedRound) -> dict[str, Any]:
    facts = {"round": done.round, "model": done.digest, "expected": done.expected}
    if done.averaged is None and done.expected_averaged is None:
        return facts
    return {**facts, "averaged_model": done.averaged, "expected_averaged": done.expected_averaged}


def summary(facts: dict[str, Any]) -> str:
    """The result of a replay as a sentence."""
    rounds, last = facts["rounds"], facts["rounds"][-1]
    if facts["same"]:
        replayed = f"{counted(len(rounds), 'round')} replayed"
        return f"run {facts['run_id']}: {replayed}, every model equals the ledger's bit for bit"
    which = f"{'averaged ' if last['model'] == last['expected'] else ''}model of round {last['round']}"
    return f"run {facts['run_id']}: the {which} differs from the ledger's; the rounds before it are equal"


def round_line(done: ReplayedRound) -> str:
    """A replayed round as one line."""
    start = f"round {done.round}: {counted(len(done.accepted), 'client')}, "
    if done.same:
        return f"{start}same model, {done.digest}"
    if done.expected == done.digest:
        return f"{start}same model, ANOTHER averaged model: expected {done.expected_averaged}, got {done.averaged}"
    clients = f"; the updates of {', '.join(done.differing)} differ from the ledger's" if done.differing else ""
    return f"{start}ANOTHER model: expected {done.expected}, got {done.digest}{clients}"


def open_ledger(place: Path | str) -> Store:
    """Open a coordinator's ledger for reading, by state directory or URL; the coordinator may be running.

    Raises UsageError.
    """
    in_directory = isinstance(place, Path)
    try:
        return open_read_only(place)
    except StoreError as error:
        hint = "; for a ledger in PostgreSQL use --ledger URL" if in_directory else ""
        raise UsageError(f"{'--state-dir' if in_directory else '--ledger'}: {error}{hint}") from error


def find_run(ledger: Store, run_id: str) -> RunRecord:
    """A run of the ledger. Raises NotFound."""
    runs = {run.run_id: run for run in ledger.runs()}
    if run_id not in runs:
        raise NotFound(f"there is no run {run_id!r} in the ledger; its runs: {', '.join(runs) or 'none'}")
    return runs[run_id]


def config_of(run: RunRecord) -> RunConfig:
    """The configuration that a run was created with."""
    return from_stored(run.spec)


def replay_of(ledger: Store, run_id: str, federation: Federation) -> Replay:
    """The replay of a run, by how its rounds close."""
    kind = BufferedReplay if federation.config.round.close == "buffer" else Replay
    return kind(ledger, run_id, federation)


class Replay:
    """Repeats a run round by round.

    Args:
        ledger: the source of the accepted lists.
        run_id: the run; its ledger must have all of its rounds.
        federation: the run's engine and clients, at the model before round 0.
    """

    def __init__(self, ledger: Store, run_id: str, federation: Federation) -> None:
        self._ledger = ledger
        self._run_id = run_id
        self._federation = federation
        summed = federation.engine.algorithm.needs_population
        self._lost = set[tuple[int, str]]() if summed else _lost_states(ledger, run_id)

    def rounds(self) -> Iterator[ReplayedRound]:
        """Replay every committed round, up to the first model that differs. Raises UsageError, Refused."""
        for commit in self._ledger.commits(self._run_id):
            try:
                accepted, differing = self._repeat(commit)
            except Diverged as error:
                raise Refused(f"round {commit.round}: {error}") from error
            replayed = ReplayedRound(
                commit.round, tuple(accepted), commit.model_digest, self._federation.digest, commit.averaged_digest,
                self._federation.averaged_digest, tuple(dict.fromkeys(differing)),
            )  # fmt: skip
            yield replayed
            if not replayed.same:
                return

    def _repeat(self, commit: CommitRecord) -> tuple[list[str], list[str]]:
        """Commit the model of a round. Returns the accepted clients and those that differ. Raises Diverged."""
        federation, differing = self._federation, list[str]()
        if commit.state_epoch != federation.state_epoch:
            federation.restart_states(commit.state_epoch)
        last = len(federation.engine.algorithm.exchanges) - 1
        accepted: list[str] = []
        for exchange in range(last + 1):
            in_ledger = self._ledger.accepted(self._run_id, commit.round, exchange) or []
            accepted = [client for client, _ in in_ledger]
            if exchange == 0:
                for _, client in sorted(each for each in self._lost if each[0] == commit.round):
                    federation.restart_state(client)
            differing += self._work(commit, exchange, in_ledger)
            if exchange < last:
                federation.reduce(exchange, accepted)
        if not accepted and federation.config.client_privacy is None:
            raise _no_updates(commit)
        federation.step(accepted, commit.attempts - 1)
        federation.commit(accepted)
        return accepted, differing

    def _work(self, commit: CommitRecord, exchange: int, in_ledger: Sequence[tuple[str, bytes]]) -> list[str]:
        """Train the clients of an accepted list. Returns those that sent another update here than in the ledger.

        The ledger has digests of masked updates where they were masked, which say nothing.
        """
        round_, digests = commit.round, dict(in_ledger)
        masked = self._federation.config.secure_aggregation is not None
        self._check_known(digests, round_)
        came: dict[str, bytes] = {}
        place = RoundPosition(round_, exchange, commit.attempts - 1, 0.0)
        for result in self._federation.work(place, list(digests)):
            if isinstance(result, NotDelivered):
                raise Refused(
                    f"round {round_}: the update of {result.client} was accepted in the run and cannot be repeated "
                    f"here: {result.why}"
                )
            came[result.client] = result.digest
        return [] if masked else [client for client, digest in digests.items() if came[client] != digest]

    def _check_known(self, clients: Iterable[str], round_: int) -> None:
        """Raises UsageError for a client of a round that is not here."""
        if unknown := [client for client in clients if client not in self._federation.clients]:
            known = ", ".join(list(self._federation.clients)[:3])
            raise UsageError(
                f"client {unknown[0]!r} of round {round_} is not one of the clients here ({known}, ...): give "
                "[simulation] the names and the partition of the run, or use the daemons' files with --client-configs"
            )


def _no_updates(commit: CommitRecord) -> Refused:
    return Refused(f"round {commit.round}: the ledger has no accepted updates of it")


class BufferedReplay(Replay):
    """Repeats a run with a buffer: each client is trained from the version that its update began from.

    What the coordinator decided of an update is in the ledger: that it counts, and the factor by which it was clipped.
    """

    def __init__(self, ledger: Store, run_id: str, federation: Federation) -> None:
        super().__init__(ledger, run_id, federation)
        self._updates = BufferedUpdates(federation, federation.folder / "buffer")
        self._taken = {commit.round: ledger.taken(run_id, commit.round) or [] for commit in ledger.commits(run_id)}
        self._wanted = dict[int, set[str]]()
        for taken in self._taken.values():
            for client, version, _ in taken:
                self._wanted.setdefault(version, set()).add(client)

    def _repeat(self, commit: CommitRecord) -> tuple[list[str], list[str]]:
        updates, round_ = self._updates, commit.round
        if beginning := sorted(self._wanted.get(round_, ()), key=str.encode):
            self._check_known(beginning, round_)
            for client in beginning:
                self._arrive(client)  # it had delivered its earlier work before it was drawn again
            updates.begin(RoundPosition(round_, 0, 0, 0.0), beginning)
        clients = [client for client, _, _ in self._taken[round_]]
        versions = [version for _, version, _ in self._taken[round_]]
        if not clients:
            raise _no_updates(commit)
        differing = []
        for client, version, digest in self._taken[round_]:
            self._arrive(client, version)
            record = self._ledger.update_of(self._run_id, version, 0, client)
            updates.clip(client, version, 1.0 if record is None else record.clip_factor)
            if updates.of([client], [version])[0].digest != digest:
                differing.append(client)
        updates.step(clients, versions)
        updates.commit(clients, versions)
        return clients, differing

    def _arrive(self, client: str, version: int | None = None) -> None:
        """The update of a client's work is in the buffer, if the client works; of this version, if one is given."""
        if self._updates.version_of(client) is None or version not in (None, self._updates.version_of(client)):
            return
        result = self._updates.arrive(client, NormHistory())
        if isinstance(result, NotDelivered):
            raise Refused(f"the update of {client} was accepted in the run and cannot be repeated here: {result.why}")


def _lost_states(ledger: Store, run_id: str) -> set[tuple[int, str]]:
    """(round, client) of the states that were lost and restarted alone, while the other clients kept theirs."""
    lost = set[tuple[int, str]]()
    for entry in ledger.history(run_id, MOST_EVENTS):
        round_ = re.match(r"round (\d+),", entry.detail)
        if entry.event == "state_lost" and round_ is not None:
            lost.add((int(round_[1]), entry.actor.removeprefix("client:")))
    return lost


def with_initial_model(run: RunConfig, local: SimulationConfig, request: ReplayRequest) -> RunConfig:
    """The run with the path of the file that it started from: as this machine's file has it, or of the state directory.

    Raises UsageError for another file than the run's.
    """
    if not (wanted := run.initial_model):
        return run
    here = local.run.initial_model
    if not here and not isinstance(request.ledger, Path):
        raise UsageError(f"the run started from the file {wanted}: set initial_model in {request.config} to its path")
    path = Path(here) if here else start_file(Path(request.ledger) / "checkpoints", request.run_id)
    try:
        got = digest_text(file_digest(path))
    except StoreError as error:
        raise UsageError(f"initial_model: {error}") from error
    if got != wanted:
        raise UsageError(f"initial_model: expected the file that the run started from, {wanted}, got {path}, {got}")
    return run.model_copy(update={"initial_model": str(path)})


def _with_local_options(run: RunConfig, local: SimulationConfig) -> RunConfig:
    """The run with the task's options of this machine's file, such as the folder of the data."""
    options = {**run.task.options, **local.run.task.options}
    return run.model_copy(update={"task": run.task.model_copy(update={"options": options})})


def _federation(run: RunConfig, local: SimulationConfig, request: ReplayRequest) -> Federation:
    secret = _secret(run, request)
    if request.client_configs is None:
        prepared = prepare(SimulationConfig(run, local.simulation), run.seed)
        return Federation(run, prepared.clients.task, prepared.clients, request.engine, secret=secret)
    clients = load_daemons(request.client_configs, run.task.name)
    task = load_task(run.task.name, run.task.options)
    return Federation(run, task, clients, request.engine, secret=secret)


def _secret(run: RunConfig, request: ReplayRequest) -> bytes:
    """The secret of a private run, from the coordinator's state directory; empty for another run."""
    if run.client_privacy is None:
        return b""
    if not isinstance(request.ledger, Path):
        raise UsageError("--ledger: expected the state directory of a private run, with its secret, got a URL")
    try:
        return RunSecrets(request.ledger / "privacy").read(request.run_id)
    except StoreError as error:
        raise UsageError(f"--state-dir: {error}") from error
