"""One run's aggregation engine and all of its clients in one process.

The caller decides who takes part and when a round closes: `simulation.py` by the round state machine, `replay.py` by a
ledger.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

import algorithms as fl
from extensions.optimizers import load_optimizers
from fl_client.connection.bundles import Bundle, ResourceKey
from fl_client.storage.client_state_store import NextState
from fl_client.storage.pending_updates import Update
from fl_client.training.data import LocalTask
from fl_client.training.local_model import LocalModel
from fl_client.training.trainer import Trainer, TrainingResult
from fl_ops.simulate.traffic import TrafficCounter
from fl_server.admission.culprits import Culprits, Measured, outliers, overflow_culprit
from fl_server.admission.epochs import Epochs, epochs_of
from fl_server.admission.expected_work import RegisteredData
from fl_server.admission.norms import NormHistory
from fl_server.admission.round_gate import Collecting, build_gate
from fl_server.aggregation.engine import Engine, Snapshot
from fl_server.aggregation.methods import optimizer_spec
from fl_server.rounds.client_metrics import ClientMetrics, with_own
from fl_server.run_config import RunConfig
from fl_server.runs.assignments import RoundPosition, RoundWork, assignment
from protos.codec import digest_bytes, digest_text, pack
from protos.fl.v1.tensor_pb2 import RESOURCE_KIND_FROZEN, RESOURCE_KIND_MODEL
from protos.fl.v1.training_pb2 import EvaluationAssignment
from tasks import Task

_MEMORY_DISK = Path("/dev/shm")  # noqa: S108 - only folders of a random name are made in it
_MEMORY_BYTES = 64 << 20
"""Keep a round's updates in memory up to this size, larger ones on disk."""


@dataclass(frozen=True, slots=True)
class Contribution:
    """One client's admitted update in the spool."""

    info: fl.UpdateInfo
    digest: bytes
    training_loss: float | None
    """None if the exchange does not train."""
    path: Path
    norms: Mapping[str, float]
    """Norm of each payload's trainable part and of the buffers' distance, before clipping."""
    epochs: Epochs
    """What the client measured in each local epoch."""

    @property
    def measured(self) -> Measured:
        """The norms of its vectors."""
        return Measured(self.info.client_id, self.norms, self.info.clip_factor)


class Federation:
    """A run's models, its clients' states, and the spool of the current round; a context manager.

    Args:
        config: the run.
        task: the server's task, for the first model and for evaluation.
        clients: each client's task and data, by id; looked up whenever the client works, and not kept.
    """

    def __init__(self, config: RunConfig, task: Task, clients: Mapping[str, LocalTask]) -> None:
        self.config = config
        self.clients = clients
        self.engine = Engine(config, task)
        self.snapshot: Snapshot = self.engine.first()
        self.state_epoch = 0
        self.traffic = TrafficCounter()
        self._norms = NormHistory()
        # The run's file is of this machine's user, so the class that it names may be imported.
        self._optimizers = load_optimizers([optimizer_spec(config.local).name])
        self._model = LocalModel(lambda: _new_model(task))
        self._model.module()  # an error of the task's code is found now
        self._states: dict[str, fl.Memory] = {}
        self._next_states: dict[str, NextState] = {}
        self._contributions: dict[tuple[int, str], Contribution] = {}
        self._sums: dict[str, fl.Tensors] = {}
        self._reduced: list[tuple[int, str]] = []
        self._stepped: Snapshot | None = None
        self._spool = tempfile.TemporaryDirectory(prefix="fl-simulate-", dir=self._spool_folder())
        self._bundles: dict[ResourceKey, Bundle] = {}
        self.digest = ""
        """Digest of the latest model, as in the ledger."""
        self._prepare_bundles(0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._spool.cleanup()

    def work(self, place: RoundPosition, client: str) -> Contribution:
        """Train one client for an exchange and admit its update. Raises WorkFailed and Refused, as a networked run."""
        trained = self._train(place, client)
        contribution = self._admit(place.exchange, client, trained.update)
        self._contributions[place.exchange, client] = contribution
        if trained.next_state is not None:
            self._next_states[client] = trained.next_state
        return contribution

    def _train(self, place: RoundPosition, client: str) -> TrainingResult:
        local = self.clients[client]
        algorithm = self.engine.algorithm
        order = RoundWork(
            self.config.name, self.config, algorithm, (local.fingerprint.version, local.fingerprint.source), (), 0,
            self.state_epoch, self.engine.local_frozen,
        )  # fmt: skip
        self.traffic.download(client, self._bundles)
        state = self._states.get(client)
        with one_thread():
            return Trainer(local, self._model, optimizers=self._optimizers).train(
                assignment(order, place, client), self._bundles, state, _never_cancelled
            )

    def evaluate(self, client: str) -> ClientMetrics:
        """Metrics of the latest model on a client's held-out data. Raises WorkFailed, for example if it has none."""
        local = self.clients[client]
        used = (RESOURCE_KIND_MODEL, RESOURCE_KIND_FROZEN)
        bundles: dict[ResourceKey, Bundle] = {key: bundle for key, bundle in self._bundles.items() if key in used}
        assignment = EvaluationAssignment(
            task=self.config.task.name,
            fingerprint=local.fingerprint,
            personal=self.config.personal,
            local_frozen=self.engine.local_frozen,
        )
        self.traffic.download(client, bundles)
        with one_thread():
            found = Trainer(local, self._model).evaluate(assignment, bundles, self._states.get(client))
        return found.examples, with_own(found.metrics, found.without_personal)

    def _admit(self, exchange: int, client: str, update: Update) -> Contribution:
        """Check an update with the coordinator's admission gate and spool it. Raises Refused."""
        header, digest = update.header, digest_bytes(update.header.digest)
        collecting = Collecting(self.snapshot, exchange, self.state_epoch, self._norms)
        train = self.clients[client].train
        gate = build_gate(self.engine, collecting, RegisteredData(len(train), train.own_batches))
        gate.check_header(header)
        self.traffic.upload(header.size_bytes)
        path = Path(self._spool.name) / f"{exchange}-{client}"
        with path.open("wb") as file:
            file.writelines(update.pieces)
        norms = gate.check_file(path, digest)
        clip_factor = gate.clip_factor(next(iter(norms.values())))
        info = fl.UpdateInfo(client, header.num_examples, header.num_steps, clip_factor)
        loss = header.training_loss if header.HasField("training_loss") else None
        return Contribution(info, digest, loss, path, norms, epochs_of(header))

    def reduce(self, exchange: int, accepted: Iterable[str]) -> None:
        """Reduce an exchange that is not the last, and prepare the next one. Raises Diverged."""
        done = self._accepted(exchange, accepted)
        with one_thread():
            sums = self.engine.reduce(self.snapshot, exchange, [one.info for one in done], [one.path for one in done])
        self._sums |= sums
        self._reduced += [(exchange, one.info.client_id) for one in done]
        self._prepare_bundles(exchange + 1)

    def step(self, accepted: Iterable[str]) -> None:
        """Compute the next model from the last exchange. Raises Diverged."""
        done = self._accepted(len(self.engine.algorithm.exchanges) - 1, accepted)
        infos, paths = [one.info for one in done], [one.path for one in done]
        with one_thread():
            self._stepped, _ = self.engine.server_update(self.snapshot, infos, paths, self._sums)

    def commit(self, accepted: Iterable[str]) -> list[Contribution]:
        """Commit the model that `step` computed and the accepted clients' next states. Returns the accepted updates."""
        if self._stepped is None:
            raise RuntimeError("commit() was called without a step()")
        done = self._accepted(len(self.engine.algorithm.exchanges) - 1, accepted)
        for one in done:
            if one.info.client_id in self._next_states:
                self._states[one.info.client_id] = self._next_states[one.info.client_id].at(one.info.clip_factor)
        self.snapshot, self._stepped = self._stepped, None
        counted = [self._contributions[key] for key in self._reduced] + done
        self._norms.add(self.snapshot.round, [one.norms for one in counted])
        self.discard_round()
        return done

    def discard_round(self) -> None:
        """Delete the current round's updates; the next round starts from the latest model."""
        for one in self._contributions.values():
            one.path.unlink(missing_ok=True)
        self._contributions.clear()
        self._next_states.clear()
        self._sums = {}
        self._reduced.clear()
        self._prepare_bundles(0)

    def culprits(self, exchange: int, accepted: Iterable[str], *, overflow: bool = False) -> Culprits:
        """Accepted updates that spoil the exchange. overflow: its sum was not finite; else, it is not reduced yet."""
        measured = [one.measured for one in self._accepted(exchange, accepted)]
        return overflow_culprit(measured) if overflow else outliers(self.config.round, self._norms, measured)

    def restart_states(self, state_epoch: int) -> None:
        """Delete all clients' states and restart the server's part of them from zero."""
        self.state_epoch = state_epoch
        self._states.clear()
        self.snapshot = self.engine.restart(self.snapshot)
        self._prepare_bundles(0)

    def restart_state(self, client: str) -> None:
        """Delete one client's state. Others keep theirs, and so does the server."""
        self._states.pop(client, None)

    def model(self) -> dict[str, torch.Tensor]:
        """The latest model's whole state_dict."""
        if self.engine.local_frozen is not None:
            return dict(self.engine.whole_model(self.snapshot))
        return dict(self.engine.to_checkpoint(self.snapshot, {}).state_dict)

    def _accepted(self, exchange: int, accepted: Iterable[str]) -> list[Contribution]:
        return [self._contributions[exchange, client] for client in accepted]

    def _spool_folder(self) -> Path | None:
        """The folder of the spool: in memory if the system has such a folder and a round's updates are small."""
        size = sum(self.engine.shape(exchange).size_bytes for exchange in range(len(self.engine.algorithm.exchanges)))
        section = self.config.round
        cohort = section.clients_per_round if section.sampling == "fixed" else section.rate * len(self.clients)
        return _MEMORY_DISK if size * cohort <= _MEMORY_BYTES and _MEMORY_DISK.is_dir() else None

    def _prepare_bundles(self, exchange: int) -> None:
        """Pack the bundles that the clients of an exchange load."""
        outgoing = self.engine.outgoing(self.snapshot, exchange, self._sums)
        self._bundles = {
            (each.kind, each.name) if each.name else each.kind: Bundle(each.layout, pack(each.tensors, each.layout))
            for each in outgoing
        }
        model = self._bundles[RESOURCE_KIND_MODEL]
        self.digest = digest_text(model.layout.digest(model.data))


def _never_cancelled(step: int, steps: int) -> None:
    """Called after each local step. A simulation never cancels training."""


def _new_model(task: Task) -> torch.nn.Module:
    """The module that all clients train with; its initial values are never used."""
    with torch.random.fork_rng(devices=[]):
        return task.model()


@contextmanager
def one_thread() -> Iterator[None]:
    """Use one torch thread, as a CPU daemon does by default: the number of threads changes the last bits of sums."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
