"""One run's engine and all of its clients in one process: what a coordinator and its daemons do between decisions.

Who takes part and when a round closes is decided elsewhere: by the round state machine in `simulation.py`, by a ledger
in `replay.py`.
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
from fl_client.bundles import Bundle
from fl_client.data import LocalTask
from fl_client.next_state import NextState
from fl_client.training import Trained, Trainer
from fl_client.updates import Update
from fl_ops.simulate.wire import Wire
from fl_server.assignments import Order, Place, assignment
from fl_server.client_metrics import ClientMetrics
from fl_server.engine import Engine, Snapshot
from fl_server.norms import NormHistory
from fl_server.run_config import RunConfig
from fl_server.runs.culprits import Culprits, Measured, of_overflow, outliers
from fl_server.runs.gates import Collecting, gate_of
from protos.codec import digest_bytes, digest_text, pack
from protos.fl.v1.tensor_pb2 import RESOURCE_KIND_DIRECTION, RESOURCE_KIND_MODEL, ResourceKind
from protos.fl.v1.training_pb2 import EvaluationAssignment
from tasks import Task

_MEMORY_DISK = Path("/dev/shm")  # noqa: S108 - only folders of a random name are made in it
_MEMORY_BYTES = 64 << 20
"""Updates of a round that may lie in memory; larger ones go to the disk."""


@dataclass(frozen=True, slots=True)
class Contribution:
    """One client's update, checked and in the spool."""

    info: fl.UpdateInfo
    digest: bytes
    training_loss: float | None
    """None from an exchange without training."""
    path: Path
    norms: Mapping[str, float]
    """Of its payloads' trainable parts and of its buffers' distance, as they came."""

    @property
    def measured(self) -> Measured:
        """How long its vectors are."""
        return Measured(self.info.client_id, self.norms, self.info.clip_factor)


class Federation:
    """A run's models, its clients' states, and the spool of the round under way; use it in a with block.

    Args:
        config: the run.
        task: what the server makes models with and evaluates on.
        clients: each client's task and data, by id; looked up when the client works, and not kept.
    """

    def __init__(self, config: RunConfig, task: Task, clients: Mapping[str, LocalTask]) -> None:
        self.config = config
        self.clients = clients
        self.engine = Engine(config, task)
        self.snapshot: Snapshot = self.engine.first()
        self.state_epoch = 0
        self.wire = Wire()
        self._norms = NormHistory()
        self._model = _new_model(task)
        self._states: dict[str, fl.Memory] = {}
        self._next_states: dict[str, NextState] = {}
        self._contributions: dict[tuple[int, str], Contribution] = {}
        self._sums: dict[str, fl.Tensors] = {}
        self._reduced: list[tuple[int, str]] = []
        self._stepped: Snapshot | None = None
        self._spool = tempfile.TemporaryDirectory(prefix="fl-simulate-", dir=self._disk())
        self._bundles: dict[ResourceKind, Bundle] = {}
        self.digest = ""
        """Of the latest model, as the ledger has it."""
        self._send(0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._spool.cleanup()

    def work(self, place: Place, client: str) -> Contribution:
        """Let a client do its part of an exchange. Raises WorkFailed and Refused, as on the wire."""
        trained = self._train(place, client)
        done = self._admit(place.exchange, client, trained.update)
        self._contributions[place.exchange, client] = done
        if trained.next_state is not None:
            self._next_states[client] = trained.next_state
        return done

    def _train(self, place: Place, client: str) -> Trained:
        local = self.clients[client]
        algorithm = self.engine.algorithm
        order = Order(
            self.config.name, self.config, algorithm, (local.fingerprint.version, local.fingerprint.source), (), 0,
            self.state_epoch,
        )  # fmt: skip
        self.wire.down(client, self._bundles)
        kept = self._states.get(client)
        with one_thread():
            return Trainer(local, self._model).train(assignment(order, place, client), self._bundles, kept, _go_on)

    def evaluate(self, client: str) -> ClientMetrics:
        """A client's word on the latest model, by its own held-out part. Raises WorkFailed, as where it has none."""
        local = self.clients[client]
        bundles = {kind: bundle for kind, bundle in self._bundles.items() if kind != RESOURCE_KIND_DIRECTION}
        question = EvaluationAssignment(task=self.config.task.name, fingerprint=local.fingerprint)
        self.wire.down(client, bundles)
        with one_thread():
            return Trainer(local, self._model).evaluate(question, bundles)

    def _admit(self, exchange: int, client: str, update: Update) -> Contribution:
        """Through the coordinator's gate into the spool. Raises Refused."""
        header, digest = update.header, digest_bytes(update.header.digest)
        collecting = Collecting(self.snapshot, exchange, self.state_epoch, self._norms)
        gate = gate_of(self.engine, collecting, len(self.clients[client].train))
        gate.check_header(header)
        self.wire.up(header.size_bytes)
        path = Path(self._spool.name) / f"{exchange}-{client}"
        with path.open("wb") as file:
            file.writelines(update.pieces)
        norms = gate.check_file(path, digest)
        clipped = gate.clip_factor(next(iter(norms.values())))
        info = fl.UpdateInfo(client, header.num_examples, header.num_steps, clipped)
        loss = header.training_loss if header.HasField("training_loss") else None
        return Contribution(info, digest, loss, path, norms)

    def reduce(self, exchange: int, accepted: Iterable[str]) -> None:
        """Sum up an exchange that is not the last, and make what the next one sends. Raises Diverged."""
        done = self._accepted(exchange, accepted)
        with one_thread():
            sums = self.engine.reduce(self.snapshot, exchange, [one.info for one in done], [one.path for one in done])
        self._sums |= sums
        self._reduced += [(exchange, one.info.client_id) for one in done]
        self._send(exchange + 1)

    def step(self, accepted: Iterable[str]) -> None:
        """Compute the next model from the last exchange. Raises Diverged."""
        done = self._accepted(len(self.engine.algorithm.exchanges) - 1, accepted)
        infos, paths = [one.info for one in done], [one.path for one in done]
        with one_thread():
            self._stepped, _ = self.engine.step(self.snapshot, infos, paths, self._sums)

    def commit(self, accepted: Iterable[str]) -> list[Contribution]:
        """Make what `step` computed the latest model; states of clients that counted go on. Returns what counted."""
        if self._stepped is None:
            raise RuntimeError("expected a step before its commit")
        done = self._accepted(len(self.engine.algorithm.exchanges) - 1, accepted)
        for one in done:
            if one.info.client_id in self._next_states:
                self._states[one.info.client_id] = self._next_states[one.info.client_id].at(one.info.clip_factor)
        self.snapshot, self._stepped = self._stepped, None
        counted = [self._contributions[key] for key in self._reduced] + done
        self._norms.add(self.snapshot.round, [one.norms for one in counted])
        self.give_up()
        return done

    def give_up(self) -> None:
        """Forget what the round under way has collected; the next one begins at the latest model."""
        for one in self._contributions.values():
            one.path.unlink(missing_ok=True)
        self._contributions.clear()
        self._next_states.clear()
        self._sums = {}
        self._reduced.clear()
        self._send(0)

    def culprits(self, exchange: int, accepted: Iterable[str], *, overflow: bool = False) -> Culprits:
        """Accepted updates that spoil the exchange. overflow: its sum was not finite; else before it is reduced."""
        measured = [one.measured for one in self._accepted(exchange, accepted)]
        return of_overflow(measured) if overflow else outliers(self.config.round, self._norms, measured)

    def restart_states(self, state_epoch: int) -> None:
        """What clients keep is void from now on, and what the server keeps of it starts anew."""
        self.state_epoch = state_epoch
        self._states.clear()
        self.snapshot = self.engine.restart(self.snapshot)
        self._send(0)

    def model(self) -> dict[str, torch.Tensor]:
        """The latest model's whole state_dict."""
        return dict(self.engine.to_checkpoint(self.snapshot, {}).model)

    def _accepted(self, exchange: int, accepted: Iterable[str]) -> list[Contribution]:
        return [self._contributions[exchange, client] for client in accepted]

    def _disk(self) -> Path | None:
        """Where the spool goes: into memory where the system has such a folder, and a round's updates are small."""
        size = sum(self.engine.shape(exchange).size_bytes for exchange in range(len(self.engine.algorithm.exchanges)))
        section = self.config.round
        cohort = section.clients_per_round if section.sampling == "fixed" else section.rate * len(self.clients)
        return _MEMORY_DISK if size * cohort <= _MEMORY_BYTES and _MEMORY_DISK.is_dir() else None

    def _send(self, exchange: int) -> None:
        """Pack what the clients of an exchange load."""
        outgoing = self.engine.outgoing(self.snapshot, exchange, self._sums)
        self._bundles = {each.kind: Bundle(each.layout, pack(each.tensors, each.layout)) for each in outgoing}
        model = self._bundles[RESOURCE_KIND_MODEL]
        self.digest = digest_text(model.layout.digest(model.data))


def _go_on(step: int, steps: int) -> None:
    """Nothing interrupts training here."""


def _new_model(task: Task) -> torch.nn.Module:
    """The one module that all clients train with; its first values are never used."""
    with torch.random.fork_rng(devices=[]):
        return task.model()


@contextmanager
def one_thread() -> Iterator[None]:
    """As a daemon on a CPU trains by default: sums of other numbers of threads differ in their last bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
