"""Computes a run: first model, server update, bundles for clients. Blocking; called from worker threads.

A Snapshot holds everything that passes from round to round; the engine itself keeps only constants.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType

import torch

import algorithms as fl
from algorithms import tree
from algorithms.buffered import buffered_sums, in_order, shares
from algorithms.compose import SENT
from fl_common.secure_aggregation.scalars import Measured
from fl_server.aggregation.methods import (
    References,
    algorithm_in,
    build_algorithm,
    check_local_steps,
    known_part,
    round_info,
    update_encoding,
)
from fl_server.aggregation.outgoing import ExchangeBundles, Outgoing, direction_of, dtype_names, in_encoding
from fl_server.aggregation.outside_task.remote_task import RemoteTask
from fl_server.aggregation.privacy import (
    Mechanism,
    PrivateSum,
    check_private_model,
    clip_rule,
    has_centre,
    key_of_round,
)
from fl_server.aggregation.reduction import (
    OtherSum,
    Reduction,
    SumUpdates,
    capped,
    left_out,
    lighter,
    reduce_buffers,
    select_updates,
    sum_updates,
)
from fl_server.aggregation.secure_aggregation import SecureMeans, SummedRound, SumNoise, Total, check_secure_model
from fl_server.aggregation.server_update import (
    BufferSum,
    ServerUpdateStats,
    Told,
    apply_server_update,
    check_finite,
    part_of,
    staleness_rule,
)
from fl_server.aggregation.snapshot import RunModel, Snapshot, Snapshots, model_of
from fl_server.aggregation.task_model import CPU, initial_path
from fl_server.aggregation.updates import AcceptedUpdates, Decoding, Source, UpdateKeys, UpdateShape, opened
from fl_server.rounds.sampling import training_seeds
from fl_server.run_settings.config import RunConfig
from fl_server.store.checkpoints import Checkpoint
from fl_tasks import Task
from fl_tasks.own_loop import own_loop
from protos.fl.v1.tensor_pb2 import RESOURCE_KIND_AVERAGED

_NONE: Mapping[str, fl.Tensors] = MappingProxyType({})
PrivateInfo = tuple[fl.UpdateInfo, float]
"""An accepted update of a private run, and its L2 norm as it came."""


class Engine:
    """One run's task and algorithm."""

    def __init__(  # noqa: PLR0913 - two facts of a coordinator
        self,
        config: RunConfig,
        task: Task | RemoteTask,
        device: torch.device = CPU,
        max_model_bytes: int = 0,
        *,
        start: Path | None = None,
        secret: bytes = b"",
    ) -> None:
        """Updates are summed where they are.

        task: in this process, or in one of its own. device: of the snapshots and the server step, and of evaluations in
        this process. max_model_bytes: of the tensors that building the model takes; 0: any. start: the file whose
        digest is `initial_model`; None: `initial_model` is its path, as in a simulation. secret: of a run with
        client-level privacy.
        """
        self.config, self._start, self._secret = config, start, secret
        self.algorithm = build_algorithm(config)
        """The algorithm with its parameters of round 0. What does not depend on them is the same in all rounds."""
        self.sum_updates: SumUpdates = sum_updates
        """Another function here may share the sums among processes."""
        self.release: Callable[[], object] = lambda: None
        """Called as `Reduction.release` is."""
        self.own_loop = task.facts.own_loop if isinstance(task, RemoteTask) else own_loop(task) is not None
        """Whether clients train with a loop of the task's own."""
        check_local_steps(config, self.algorithm, own_loop=self.own_loop)
        self._references = References(config)
        model = model_of(config, task, device, max_model_bytes)
        self.layout, self._trainable_layout = model.layout, model.trainable_layout
        self.local_frozen = model.local_frozen
        """The frozen parameters that clients must have from their own tasks. None if they are sent."""
        self.remarks = model.remarks
        """What the creator of the run should know of its model, as lines of text."""
        self.snapshots = Snapshots(model, device)
        self.model = RunModel(config, model, self.snapshots)
        """The model of the task, for evaluations."""
        check_private_model(config, self.layout)
        check_secure_model(config, self.layout)
        shape_of = partial(UpdateShape.of_exchange, self.layout, self._trainable_layout, self.snapshots.state_layout)
        self.shapes = [shape_of(each).encoded_as(update_encoding(config)) for each in self.algorithm.exchanges]
        """The payloads of an update, by exchange."""

    def first(self) -> Snapshot:
        """The state before round 0. Raises InvalidInput if the file of `initial_model` does not fit."""
        with self.model.first(initial_path(self.config.initial_model, self._start)) as start:
            snapshot = self.snapshots.first(start, self.algorithm.init(start.trainable))
            del start  # with it goes its memory, when the block ends
        privacy = self.config.client_privacy
        return snapshot if privacy is None else replace(snapshot, clip=privacy.clip)

    def restored(self, checkpoint: Checkpoint) -> Snapshot:
        """The snapshot of a checkpoint. Raises TaskError if the task has other frozen parameters than the run."""
        self.model.release()
        return self.snapshots.restored(checkpoint)

    def averaged_for_clients(self, snapshot: Snapshot) -> Outgoing | None:
        """The averaged model as clients get it to evaluate it; None if there is none."""
        if snapshot.averaged is None:
            return None
        outgoing = Outgoing(RESOURCE_KIND_AVERAGED, snapshot.averaged.values(), self.layout)
        return in_encoding(outgoing, self.config, snapshot.round + 1)

    def outgoing(self, snapshot: Snapshot, exchange: int = 0, sums: Mapping[str, fl.Tensors] = _NONE) -> list[Outgoing]:
        """The bundles for the clients of an exchange: model; direction, optimizer's state and frozen parts if any.

        Args:
            snapshot: of the round before.
            exchange: of the round under way.
            sums: of the round's earlier exchanges.
        """
        outgoing = self._bundles(snapshot).outgoing(snapshot, exchange, sums)
        if self.config.encodings.reference != "none":
            received = direction_of(outgoing)
            self._references.prepare(self._algorithm_after(snapshot), snapshot.round + 1, exchange, received)
        return outgoing

    def _bundles(self, snapshot: Snapshot) -> ExchangeBundles:
        algorithm = self._algorithm_after(snapshot)
        return ExchangeBundles(self.config, algorithm, self.layout, self._trainable_layout, self.snapshots.frozen)

    def reduce(
        self, snapshot: Snapshot, exchange: int, cohort: Sequence[fl.UpdateInfo], sources: Sequence[Source]
    ) -> dict[str, fl.Tensors]:
        """The method's sums over an exchange's accepted updates, with the run's reducer in place of the mean.

        cohort and sources are in the order of client id bytes. Raises Diverged.
        """
        updates = self._accepted(snapshot, exchange, cohort, sources)
        sums = self._reduction(snapshot, exchange, updates).sums()
        for symbol, tensors in sums.items():
            check_finite(f"the sum {symbol}", tensors, snapshot.round + 1)
        self._bundles(snapshot).check(snapshot, exchange + 1, sums)
        return sums

    def server_update(
        self,
        snapshot: Snapshot,
        cohort: Sequence[fl.UpdateInfo],
        sources: Sequence[Source],
        earlier_sums: Mapping[str, fl.Tensors] = _NONE,
    ) -> tuple[Snapshot, ServerUpdateStats]:
        """Reduce the last exchange and apply the server half; returns the next snapshot. Raises Diverged.

        earlier_sums: of the round's earlier exchanges.
        """
        accepted = self._accepted(snapshot, len(self.algorithm.exchanges) - 1, cohort, sources)
        weights = self.algorithm.weights(accepted.cohort)
        selected = select_updates(self.config.round, accepted, weights)
        made, stats = self._stepped(snapshot, selected, earlier_sums)
        buffers = reduce_buffers(self.config.round, accepted, weights)
        return self._finished(snapshot, made, stats, buffers), replace(
            stats,
            left_out=left_out(accepted.cohort, selected.cohort),
            capped=() if accepted.cohort is cohort else lighter(cohort, self.algorithm.weights(cohort), weights),
            largest=max(zip(weights, (info.client_id for info in accepted.cohort), strict=True))[::-1],
        )

    def buffered_update(
        self,
        snapshot: Snapshot,
        entries: Sequence[fl.Buffered],
        sources: Sequence[Source],
        versions: Mapping[int, Snapshot],
    ) -> tuple[Snapshot, ServerUpdateStats]:
        """The same for a buffer of updates, one for each client and version, in any order. Raises Diverged.

        versions: the snapshots that the entries' clients began from, by the number of the round after each.
        """
        order, current = in_order(entries), snapshot.round + 1
        entries, sources = [entries[number] for number in order], [sources[number] for number in order]
        weights = staleness_rule(self.config).weights(entry.staleness for entry in entries)
        told = {number: self._told(of, len(entries)) for number, of in {**versions, current: snapshot}.items()}
        known = {number: each.version for number, each in told.items()}
        direction = self.config.round.stale_direction or "sent"
        wanted = buffered_sums(known, current, entries, weights, stale_direction=direction)
        updates = self._accepted(snapshot, 0, [entry.info for entry in entries], sources, [e.version for e in entries])
        made, stats = self._stepped(snapshot, updates, _NONE, BufferSum(wanted, told))
        parts = shares(known[current], entries, weights)
        buffers = reduce_buffers(self.config.round, updates, parts)
        largest = max(zip(parts, (entry.info.client_id for entry in entries), strict=True))[::-1]
        return self._finished(snapshot, made, stats, buffers), replace(stats, largest=largest)

    def _told(self, snapshot: Snapshot, size: int) -> Told:
        """What the clients that begin from a snapshot are told. size: of the buffer of the step."""
        algorithm, round_ = self._algorithm_after(snapshot), snapshot.round + 1

        @cache
        def encoded() -> fl.Tensors | None:
            return self._bundles(snapshot).received_direction(snapshot, 0, _NONE).get(SENT)

        def direction(names: Collection[str]) -> fl.Tensors:
            sent = encoded() or algorithm.exchanges[0].direction(part_of(snapshot.state, names), {}) or {}
            return {name: sent[name] for name in names}

        return Told(fl.Version(algorithm, round_info(self.config, round_, size)), direction)

    def private_update(
        self, snapshot: Snapshot, cohort: Sequence[PrivateInfo], sources: Sequence[Source], attempt: int
    ) -> tuple[Snapshot, ServerUpdateStats]:
        """The same for a run with client-level privacy, from a noisy mean; there may be no update. Buffers stay."""
        privacy, rule = self.config.client_privacy, clip_rule(self.config)
        if privacy is None:
            raise RuntimeError("expected a run with the section privacy")
        key = key_of_round(self._secret, snapshot.round + 1, attempt, [info.client_id for info, _ in cohort])
        z = privacy.noise_multiplier if rule is None else rule.noise_multiplier_of_sum
        noisy = PrivateSum(
            Mechanism(snapshot.clip, z, self.config.round.rate * self.config.population),
            sum(entry.numel for entry in self._trainable_layout.entries),
            key,
            self.config.local.steps or 1,
            self._centre(snapshot),
        )
        updates = self._accepted(snapshot, 0, [info for info, _ in cohort], sources)
        made, stats = self._stepped(snapshot, updates, _NONE, noisy)
        clip = snapshot.clip
        if rule is not None:
            clip = rule.next(clip, rule.count(clip, [norm for _, norm in cohort], noisy.noise_key))
        made = replace(self._finished(snapshot, made, stats, snapshot.buffers), clip=clip)
        return made, replace(stats, clip=snapshot.clip)

    def _centre(self, snapshot: Snapshot) -> fl.Tensors | None:
        """The part of the clients' deltas that the direction makes, in a private run; None if there is none."""
        algorithm, round_ = self._algorithm_after(snapshot), snapshot.round + 1
        if not has_centre(self.config, algorithm):
            return None
        sent = self._bundles(snapshot).received_direction(snapshot, 0, _NONE).get(SENT)
        direction = algorithm.exchanges[0].direction(snapshot.state, {}) if sent is None else sent
        known = known_part(self.config, algorithm, round_, direction)
        return None if known is None else known.added_to(tree.map(torch.zeros_like, snapshot.state.x))

    def secure_update(
        self, snapshot: Snapshot, cohort: Sequence[fl.UpdateInfo], total: Total, draw: int
    ) -> tuple[Snapshot, ServerUpdateStats]:
        """The same for a run with secure aggregation, from the sum of the cohort's whole numbers. Buffers stay.

        draw: which draw of the round this is. Raises SpoiledSum, too.
        """
        round_, means = snapshot.round + 1, self._secure_means(self._algorithm_after(snapshot))
        info = round_info(self.config, round_, len(cohort))
        noise = self._sum_noise(round_, draw, cohort)
        info = info if noise is None else replace(info, cohort_size=noise.drawn)
        secure = means.sums(total, SummedRound(len(cohort), means.rounding(round_, draw), info, noise))
        made, stats = self._stepped(snapshot, self._accepted(snapshot, 0, cohort, ()), _NONE, secure)
        return self._finished(snapshot, made, stats, snapshot.buffers), stats

    def _sum_noise(self, round_: int, draw: int, cohort: Sequence[fl.UpdateInfo]) -> SumNoise | None:
        """The noise of a round with secure aggregation and client-level privacy; None without the latter."""
        if (privacy := self.config.client_privacy) is None:
            return None
        key = key_of_round(self._secret, round_, draw, [info.client_id for info in cohort])
        return SumNoise(privacy.noise_multiplier, self.config.round.clients_per_round, key)

    def plain_total(  # noqa: PLR0913, PLR0917 - a round, and what its clients sent
        self,
        snapshot: Snapshot,
        cohort: Sequence[fl.UpdateInfo],
        sources: Sequence[Source],
        draw: int,
        measured: Sequence[Measured],
    ) -> Total:
        """The sum of the whole numbers of updates that are not masked, as in a simulation. draw: as above."""
        round_ = snapshot.round + 1
        seeds = training_seeds(self.config.seed, round_, [info.client_id for info in cohort], draw)
        updates = self._accepted(snapshot, 0, cohort, sources)
        return self.secure_means.total(updates, self.secure_means.rounding(round_, draw), seeds, measured)

    @property
    def secure_means(self) -> SecureMeans:
        """How updates of a run with secure aggregation are rounded and summed."""
        return self._secure_means(self.algorithm)

    def _secure_means(self, algorithm: fl.Algorithm) -> SecureMeans:
        return SecureMeans(self.config, algorithm, self.shapes[0])

    def _stepped(
        self,
        snapshot: Snapshot,
        updates: AcceptedUpdates,
        earlier_sums: Mapping[str, fl.Tensors],
        special: OtherSum | None = None,
    ) -> tuple[Snapshot, ServerUpdateStats]:
        """The next snapshot without buffers. Raises Diverged."""
        last, made = len(self.algorithm.exchanges) - 1, self.snapshots.blank_after(snapshot)
        given = {**earlier_sums, **self._bundles(snapshot).received_direction(snapshot, last, earlier_sums)}
        given = {name: tree.to(tensors, self.snapshots.device) for name, tensors in given.items()}
        reduction = replace(self._reduction(snapshot, last, updates), earlier_sums=given, special=special)
        stats = apply_server_update(reduction, snapshot.state, made.state, self._trainable_layout)
        if made.rounded:
            tree.copy_(made.rounded, made.state.x)
            check_finite(f"the model as {dtype_names(made.state.dtypes)}", made.rounded, made.round)
        return made, stats

    def _finished(self, snapshot: Snapshot, made: Snapshot, stats: ServerUpdateStats, buffers: fl.Tensors) -> Snapshot:
        """The next snapshot with these buffers, after a check that it can be sent."""
        if buffers:
            tree.copy_(made.buffers, buffers)
        self._bundles(made).check(made, 0, _NONE)
        return replace(made, norm=stats.norm).with_average(self.config.averaging, snapshot.averaged)

    def _accepted(  # noqa: PLR0913, PLR0917 - what is read, and where it began
        self,
        snapshot: Snapshot,
        exchange: int,
        cohort: Sequence[fl.UpdateInfo],
        sources: Sequence[Source],
        versions: Sequence[int] = (),
    ) -> AcceptedUpdates:
        """The updates of an exchange, whose values can be read. versions: of the updates; empty: all are current."""

        def decoding(number: int) -> Decoding:
            version = versions[number] if versions else snapshot.round + 1
            return self.decoding(version, exchange, cohort[number].client_id, cohort[number].num_steps)

        shape = self.shapes[exchange]
        return AcceptedUpdates(self._capped(cohort), opened(sources, shape, decoding), shape)

    def decoding(self, round_: int, exchange: int, client: str, steps: int) -> Decoding:
        """What is needed to decode a client's update. steps: K_i."""
        keys = UpdateKeys.of(self.config, round_, exchange, client)
        return Decoding(keys, self._references.of_client(round_, exchange, steps))

    def _capped(self, cohort: Sequence[fl.UpdateInfo]) -> Sequence[fl.UpdateInfo]:
        """The cohort with weights cut to the run's largest share of the examples, if it has such a limit."""
        share = self.config.round.max_client_share
        return capped(cohort, share) if share and max(self.algorithm.weights(cohort)) > share else cohort

    def _reduction(self, snapshot: Snapshot, exchange: int, updates: AcceptedUpdates) -> Reduction:
        info = round_info(self.config, snapshot.round + 1, len(updates.cohort))
        algorithm = self._algorithm_after(snapshot)
        return Reduction(
            algorithm, exchange, self.config.round, info, updates, self.snapshots.device,
            sum_updates=self.sum_updates, release=self.release,
        )  # fmt: skip

    def _algorithm_after(self, snapshot: Snapshot) -> fl.Algorithm:
        """The method with its parameters of the round under way."""
        return algorithm_in(self.config, self.algorithm, snapshot.round + 1)

    def restart(self, snapshot: Snapshot) -> Snapshot:
        """The snapshot with the server's part of the client states reset; the model stays."""
        return replace(snapshot, state=self.algorithm.restart(snapshot.state))
