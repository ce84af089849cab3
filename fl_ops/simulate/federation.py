"""One run's aggregation engine and all of its clients in one process.

The caller decides who takes part and when a round closes: `simulation.py` by the round state machine, `replay.py` by a
ledger.
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Self, cast

import torch

import algorithms as fl
from fl_client.training.data import LocalTask
from fl_client.training.results import Evaluation
from fl_common.secure_aggregation.scalars import Measured, Summed
from fl_ops.simulate.bundles import RoundBundles
from fl_ops.simulate.clients import has_held_out
from fl_ops.simulate.engine_choice import SEQUENTIAL, EngineOptions, make_engine
from fl_ops.simulate.engines.client_work import one_thread
from fl_ops.simulate.engines.engine import EngineContext, Evaluated, ExamplesOf, Failed, Order, Trained
from fl_ops.simulate.engines.held import TrainedTogether
from fl_ops.simulate.places import Folders, place_held_out
from fl_ops.simulate.reports import Profile
from fl_ops.simulate.run_files import UpdateFiles
from fl_ops.simulate.saving.point import FederationPoint
from fl_ops.simulate.shared_work import SharedWork
from fl_ops.simulate.traffic import TrafficCounter
from fl_ops.simulate.updates import ClientEvaluation, Contribution, NotDelivered, admit, admit_together
from fl_server.admission.gate import Collecting
from fl_server.admission.norms import Culprits, NormHistory, outliers, overflow_culprit
from fl_server.aggregation.engine import Engine
from fl_server.aggregation.snapshot import Snapshot
from fl_server.rounds.metrics import as_averaged, with_own
from fl_server.rounds.sampling import training_seeds
from fl_server.run.assignments import RoundPosition, RoundWork, common_assignment
from fl_server.run.evaluations import check_metric, directions_of, needs_metric, with_direction
from fl_server.run_settings.config import RunConfig
from fl_tasks import Task
from fl_tasks.metrics import declared_directions
from fl_tasks.summed_metrics import without_personal
from protos.fl.v1.training_pb2 import Assignment, EvaluationAssignment


def simulated_secret(config: RunConfig) -> bytes:
    """The secret of a simulated private run: the same for the same seed. Empty for another run."""
    return b"" if config.client_privacy is None else hashlib.sha256(f"simulated {config.seed}".encode()).digest()


class Federation:
    """A run's models, its clients' states, and the files of the current round; a context manager.

    Args:
        config: the run.
        task: the server's task, for the first model and for evaluation.
        clients: each client's task and data, by id; looked up whenever the client works, and not kept.
        options: how the clients' work is done.
        digests: whether the bundles of each round get a digest. False: for clients in lockstep nothing is packed.
    """

    def __init__(
        self,
        config: RunConfig,
        task: Task,
        clients: Mapping[str, LocalTask],
        options: EngineOptions = SEQUENTIAL,
        *,
        digests: bool = True,
        secret: bytes = b"",
    ) -> None:
        """secret: of a private run; empty: one that follows from the seed, which protects nobody."""
        self.directions = directions_of(config, declared_directions(task))
        self.config = config = with_direction(config, self.directions)
        self.clients, self.task = clients, task
        self.secret = secret or simulated_secret(config)
        self.engine = Engine(config, task, options.device, secret=self.secret)
        self.snapshot: Snapshot = self.engine.first()
        place_held_out(self.engine, clients, options)
        check_metric(config, self.engine.model.reported_metrics(self.snapshot) if needs_metric(config) else None)
        self.state_epoch = 0
        self.traffic = TrafficCounter()
        self.profile = Profile()
        self._norms = NormHistory()
        self._contributions: dict[tuple[int, str], Contribution] = {}
        self._sums: dict[str, fl.Tensors] = {}
        self._reduced: list[tuple[int, str]] = []
        self._stepped: Snapshot | None = None
        self.summed = Summed(0)
        """What the latest masked sum would have said besides the model, with secure aggregation."""
        packs = digests or options.batched is None or options.ranks is not None
        self.bundles = RoundBundles(self.engine, self.traffic, packs=packs)
        self._folders = Folders(self.engine, clients, options)
        self.states = self._folders.states
        self._update_files = UpdateFiles(self._folders.path)
        context = EngineContext(clients, task, config, self.states, self._update_files, self.engine)
        self._engine = make_engine(options, context)
        self._shared = SharedWork(self.engine, self._engine, options.workers, self._folders.path)
        self.engine.sum_updates = self._shared.sum_updates
        self._prepare_bundles(0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._engine.close()
        self._folders.cleanup()

    @property
    def folder(self) -> Path:
        """The folder for files of the run, until its end."""
        return self._folders.path

    def work(self, place: RoundPosition, clients: Sequence[str]) -> Iterator[Contribution | NotDelivered]:
        """Train clients for an exchange and admit their updates. Yields a result for each client, in any order."""
        return chain.from_iterable(self.work_together(place, clients))

    def work_together(
        self, place: RoundPosition, clients: Sequence[str]
    ) -> Generator[list[Contribution | NotDelivered], None, None]:
        """The same; results that are there at the same time come together."""
        self.traffic.download(clients, self.bundles.names)
        for done in self.trained(place, clients):
            results = self.admitted(done, self.snapshot, place.exchange)
            for admitted in results:
                if isinstance(admitted, Contribution):
                    self._contributions[place.exchange, admitted.client] = admitted
            yield results

    def trained(self, place: RoundPosition, clients: Sequence[str]) -> Iterator[Trained | TrainedTogether | Failed]:
        """What clients make of the latest bundles, in any order; nothing is admitted yet."""
        draw = place.attempt if self.config.secure_aggregation is not None else 0
        seeds = training_seeds(self.config.seed, place.round, clients, draw)
        order = Order(self._assignment(place), [*zip(clients, seeds, strict=True)])
        trained = cast("Iterator[Trained | TrainedTogether | Failed]", self._engine.work(order))
        return self.profile.waiting("clients", trained)

    def admitted(
        self,
        done: Trained | TrainedTogether | Failed,
        snapshot: Snapshot,
        exchange: int = 0,
        norms: NormHistory | None = None,
    ) -> list[Contribution | NotDelivered]:
        """The results of clients whose work is done.

        snapshot: the model that they began from. norms: of the updates that counted before; None: those so far.
        """
        if isinstance(done, Failed):
            return [NotDelivered.of(done)]
        collecting = Collecting(snapshot, exchange, self.state_epoch, self._norms if norms is None else norms)
        with self.profile.part("admission"), one_thread():
            results = (
                [admit(self.engine, collecting, done)]
                if isinstance(done, Trained)
                else admit_together(self.engine, collecting, done)
            )
        for one in results:
            if isinstance(one, Contribution) or one.sent:
                self.traffic.upload(done.header.size_bytes)
        return results

    def _assignment(self, place: RoundPosition) -> Assignment:
        """The assignment without what is the client's own. Each client has the task that the server has."""
        work = RoundWork(
            self.config.name, self.config, self.engine.algorithm, ("", ""), (), 0, self.state_epoch,
            local_frozen=self.engine.local_frozen, clip=self._clip, rounding=self._rounding(place),
        )  # fmt: skip
        return common_assignment(work, place)

    @property
    def _clip(self) -> float:
        """C of an update that is sent as it is: with secure aggregation its rounding clips."""
        return self.snapshot.clip if self.config.secure_aggregation is None else 0.0

    def _rounding(self, place: RoundPosition) -> str:
        """How clients round what they make their states of, with secure aggregation."""
        if self.config.secure_aggregation is None or not self.engine.algorithm.keeps_client_state:
            return ""
        return self.engine.secure_means.rounding(place.round, place.attempt, place.exchange).to_text()

    def evaluate(
        self, clients: Sequence[str], on: ExamplesOf = "held_out"
    ) -> Iterator[tuple[str, ClientEvaluation | NotDelivered]]:
        """What clients measured with the latest model, with their ids, in any order.

        Only an evaluation on held-out data is one that a networked run has: only its downloads are counted.
        """
        if on == "held_out":
            with self.profile.part("bundles"), one_thread():
                self.traffic.download(clients, self.bundles.of_evaluation)
        if self.bundles.averaged() is not None:
            self._engine.begin(self.bundles.loaded_for_evaluation())
        for result in self.profile.waiting("evaluation on clients", self._engine.work(self._evaluation(clients, on))):
            if isinstance(result, Failed):
                yield result.client, NotDelivered.of(result)
            elif isinstance(result, Evaluated):
                found = result.found
                metrics = found.examples, with_own(found.metrics, found.without_personal)
                sums = [*found.sums, *without_personal(found.sums_without_personal)]
                yield result.client, ClientEvaluation(metrics, sums)

    def _evaluation(self, clients: Sequence[str], on: ExamplesOf = "held_out") -> Order:
        """The order to evaluate the latest model."""
        config, frozen = self.config, self.engine.local_frozen
        common = EvaluationAssignment(task=config.task.name, personal=config.personal, local_frozen=frozen)
        return Order(common, [(client, 0) for client in clients], on)

    def evaluate_on_server(self) -> Mapping[str, float]:
        """Metrics of the latest and of the averaged model on the server's held-out examples. Raises TaskError."""
        with self.profile.part("evaluation"), one_thread():
            metrics = self._shared.evaluate(self.snapshot)
            if self.engine.model.estimates_statistics:
                return {**metrics, **self.engine.model.evaluate_averaged(self.snapshot)}
            averaged = self.snapshot.of_average()
            return metrics if averaged is None else {**metrics, **as_averaged(self._shared.evaluate(averaged))}

    def reduce(self, exchange: int, accepted: Iterable[str]) -> None:
        """Reduce an exchange that is not the last, and prepare the next one. Raises Diverged."""
        done = self.accepted(exchange, accepted)
        with self.profile.part("aggregation"), one_thread():
            sums = self.engine.reduce(self.snapshot, exchange, [one.info for one in done], [one.update for one in done])
        self._sums |= sums
        self._reduced += [(exchange, one.info.client_id) for one in done]
        self._prepare_bundles(exchange + 1)

    def step(self, accepted: Iterable[str], attempt: int = 0) -> None:
        """Compute the next model from the last exchange. attempt: of the round. Raises Diverged."""
        done = self.accepted(len(self.engine.algorithm.exchanges) - 1, accepted)
        infos, updates = [one.info for one in done], [one.update for one in done]
        with self.profile.part("aggregation"), one_thread():
            if self.config.client_privacy is not None and self.config.secure_aggregation is None:
                normed = [(one.info, one.norms["delta"]) for one in done]
                self._stepped, _ = self.engine.private_update(self.snapshot, normed, updates, attempt)
            elif self.config.secure_aggregation is not None:
                total = self.engine.plain_total(self.snapshot, infos, updates, attempt, self._measured(done, attempt))
                self.summed = total.summed
                self._stepped, _ = self.engine.secure_update(self.snapshot, infos, total, attempt)
            else:
                self._stepped, _ = self.engine.server_update(self.snapshot, infos, updates, self._sums)

    def step_over(
        self, buffer: Sequence[Contribution], versions: Sequence[int], snapshots: Mapping[int, Snapshot]
    ) -> None:
        """Compute the next model from a buffer. Raises Diverged. snapshots: the models that its updates began from."""
        current = self.snapshot.round + 1
        entries = [fl.Buffered(one.info, v, current - v) for one, v in zip(buffer, versions, strict=True)]
        with self.profile.part("aggregation"), one_thread():
            updates = [one.update for one in buffer]
            self._stepped, _ = self.engine.buffered_update(self.snapshot, entries, updates, snapshots)

    def _measured(self, done: Sequence[Contribution], attempt: int) -> list[Measured]:
        """What the clients of a round with secure aggregation add to its sums besides their updates."""
        place = self.snapshot.round + 1, attempt
        tells = self.engine.secure_means.rounding(*place).loss
        losses = {one.client: one.training_loss if tells else None for one in done}
        if not self.engine.secure_means.rounding(*place).metrics:
            return [Measured(loss) for loss in losses.values()]
        able = [client for client in losses if has_held_out(self.clients, client)]
        results = self._engine.work(self._evaluation(able))
        measured = {one.client: one.found for one in results if isinstance(one, Evaluated)}
        none = Evaluation(0, {}, {})
        return [
            Measured(loss, measured.get(client, none).examples, measured.get(client, none).metrics)
            for client, loss in losses.items()
        ]

    def commit(self, accepted: Iterable[str]) -> list[Contribution]:
        """Commit the model that `step` computed and the accepted clients' next states. Returns the accepted updates."""
        done = self.accepted(len(self.engine.algorithm.exchanges) - 1, accepted)
        self.states.promote((one.info.client_id, one.info.clip_factor) for one in done)
        self.commit_over(done)
        return done

    def commit_over(self, done: Sequence[Contribution]) -> None:
        """Commit the model that was computed from these updates."""
        if self._stepped is None:
            raise RuntimeError("expected a step before its commit")
        self.snapshot, self._stepped = self._with_sums(self._stepped), None
        counted = [*(self._contributions[key] for key in self._reduced), *done]
        self._norms = self._norms.after(one.norms for one in counted)
        self.discard_round()

    def _with_sums(self, made: Snapshot) -> Snapshot:
        """The snapshot with the sums of its averaged model, if it has one, in memory."""
        if made.averaged is None:
            return made
        with self.profile.part("aggregation"), one_thread():
            return replace(made, averaged=made.averaged.in_memory())

    def discard_round(self) -> None:
        """Delete the current round's updates; the next round starts from the latest model."""
        self._update_files.empty()
        self._contributions.clear()
        self._shared.forget()
        self.states.drop_pending()
        self._sums = {}
        self._reduced.clear()
        self._prepare_bundles(0)

    def culprits(self, updates: Sequence[Contribution], *, overflow: bool = False) -> Culprits:
        """Those of the updates that spoil the exchange. overflow: its sum was not finite; else, it is not made yet."""
        measured = [one.measured for one in updates]
        if overflow:
            return overflow_culprit(measured)
        return outliers(self.config.round, self._norms, measured, self.snapshot.norm)

    @property
    def engine_report(self) -> str:
        """What the engine has measured and chosen, and how the model is evaluated; empty if nothing yet."""
        return "; ".join(filter(None, (self._engine.report, self.engine.model.in_process.report)))

    def restart_states(self, state_epoch: int) -> None:
        """Delete all clients' states and restart the server's part of them from zero."""
        self.state_epoch = state_epoch
        self.states.remove_all()
        self.snapshot = self.engine.restart(self.snapshot)
        self._prepare_bundles(0)

    def restart_state(self, client: str) -> None:
        """Delete one client's state. Others keep theirs, and so does the server."""
        self.states.remove(client)

    @property
    def point(self) -> FederationPoint:
        """The federation between two rounds, apart from `states`."""
        traffic = self.traffic
        return FederationPoint(self.snapshot, self.state_epoch, self._norms, traffic.held, traffic.offers)

    def continue_from(self, point: FederationPoint) -> None:
        """Put a new federation where another one was. The caller restores `states`."""
        self.snapshot, self.state_epoch = point.snapshot, point.state_epoch
        self._norms = point.norms
        self.traffic.put_back(point.held, point.offers)
        self._prepare_bundles(0)

    def model(self) -> dict[str, torch.Tensor]:
        """The latest model's whole state_dict."""
        if self.engine.local_frozen is not None:
            return dict(self.engine.model.whole(self.snapshot))
        return dict(self.engine.snapshots.checkpoint(self.snapshot, {}).state_dict)

    @property
    def digest(self) -> str:
        """Digest of the latest model, as in the ledger."""
        return self.bundles.model_digest or self.engine.snapshots.digest(self.snapshot)

    @property
    def averaged_digest(self) -> str | None:
        """Digest of the averaged model, as in the ledger; None if there is none."""
        with one_thread():
            return self.engine.snapshots.averaged_digest(self.snapshot)

    def averaged_model(self) -> dict[str, torch.Tensor] | None:
        """The averaged model's whole state_dict; None if there is none."""
        averaged = self.snapshot.of_average()
        if averaged is None:
            return None
        if self.engine.local_frozen is not None or self.engine.model.estimates_statistics:
            return dict(self.engine.model.whole(averaged, estimate=self.engine.model.estimates_statistics))
        return dict(self.engine.snapshots.checkpoint(averaged, {}).state_dict)

    def accepted(self, exchange: int, accepted: Iterable[str]) -> list[Contribution]:
        """The updates of these clients in an exchange of the round under way."""
        return [self._contributions[exchange, client] for client in accepted]

    def _prepare_bundles(self, exchange: int) -> None:
        """Make the bundles that the clients of an exchange load."""
        with self.profile.part("bundles"):
            self.bundles.prepare(self.snapshot, exchange, self._sums, self.state_epoch)
            self._engine.begin(self.bundles.loaded)
