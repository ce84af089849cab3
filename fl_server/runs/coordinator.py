"""All runs of one coordinator: finds them, holds the parts that act on them, and passes on the fleet's events."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterable, Mapping

import structlog

from fl_common.names import version_of
from fl_server.aggregation.outgoing import Broadcast
from fl_server.clients.client_records import FleetListener
from fl_server.clients.sessions import Asked
from fl_server.errors import InvalidInput, NoBestRound, NoSuchModel, NoSuchResource, NoSuchRun
from fl_server.rounds import events as ev
from fl_server.run.client_states import accepted_outcome, not_needed_outcome, uncounted_outcome
from fl_server.run.run import Run
from fl_server.runs.actions import RunActions
from fl_server.runs.attention import ClientAttention
from fl_server.runs.creation import RunCreation, RunLoading
from fl_server.runs.gauges import RunsCollector
from fl_server.runs.releases import Packages, Releases
from fl_server.runs.restoration import Restoration
from fl_server.runs.table import Audit, Deletions, Retention, RunTable
from fl_server.services import Services
from fl_server.store.checkpoints import INITIAL
from fl_server.store.errors import StoreError
from fl_server.store.ledger import Ledger
from fl_server.store.records import UpdateRecord
from protos.codec import digest_text
from protos.fl.v1.training_pb2 import ExchangeKey, Outcome, RefusalReason

log = structlog.get_logger()

_DIGITS = 9
"""Digits of a round's number."""
_PERMANENT = ("banned", "forgotten")


class Coordinator(FleetListener):
    """The runs, by id. Lives on the event loop; the fleet's listener."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self.table = RunTable()
        self.audit = Audit(services.ledger)
        self.deletions = Deletions(services, self.table)
        loading = RunLoading(services)
        self.creation = RunCreation(services, self.table, loading, self.deletions)
        self.actions = RunActions(self.table, loading)
        self.restoration = Restoration(services, self.table, loading, self.deletions)
        self.outcomes = Outcomes(services.ledger, self.table)
        self.releases = Releases(services)
        self.packages = Packages(services)
        self.retention = Retention(services.config.retention, services.ledger, self.table, self.deletions)
        self._retaining: asyncio.Task[None] | None = None
        self.attention = ClientAttention(services.fleet, self.table, services.config.attention)
        services.metrics.need_attention.set_function(lambda: float(len(self.attention.all())))
        RunsCollector(services.metrics, self.table)

    async def start(self) -> None:
        """Restore every run, and continue those that had not ended. Some may still be loaded when it returns."""
        self._services.fleet.changes.listener = self
        await self.restoration.restore_all()
        await self.releases.start()
        await self.packages.start()
        self._retaining = asyncio.create_task(self.retention.apply_regularly())

    async def close(self) -> None:
        """Stop all runs where they are."""
        if self._retaining is not None:
            self._retaining.cancel()
        self.releases.close()
        self.packages.close()
        await self.restoration.close()
        await self.deletions.close()
        await asyncio.gather(*(run.close() for run in self.table.loaded.values()))

    def drain(self) -> None:
        """Give no client new work, and load no more runs."""
        self.restoration.drain()
        for run in self.runs():
            run.drain()

    def runs(self) -> list[Run]:
        """All runs, oldest first."""
        return list(self.table.loaded.values())

    @property
    def min_client_version(self) -> str:
        """The newest version that an open run requires of its clients; empty if none requires one."""
        required = [run.config.min_client_version for run in self.runs() if not run.ended]
        return max(required, key=lambda version: version_of(f"impetus {version}"), default="")

    def run(self, run_id: str) -> Run:
        """A run by id. Raises NoSuchRun."""
        run = self.table.loaded.get(run_id)
        if run is None:
            self.table.not_loaded.refuse(run_id)
            raise NoSuchRun(run_id)
        return run

    def run_of_call(self, run_id: str) -> Run:
        """The run that a client's call names. Raises NotNow until it is loaded, and NoSuchRun if it has ended."""
        if run_id not in self.table.loaded:
            self.table.not_loaded.ask_again(run_id)
        return self.run(run_id)

    def resource(self, digest: bytes, run_id: str, client_id: str) -> tuple[Run | None, Broadcast]:
        """The broadcast with a digest, and its run; None: a release or a package has it.

        Several runs may have it: then that with `run_id`, else one that the client works for, else the first.
        Raises NoSuchResource, or NotNow until the run is loaded.
        """
        named = self.table.loaded.get(run_id)
        if named is not None and (broadcast := named.broadcast(digest)):
            return named, broadcast
        holders = [(run, broadcast) for run in self.table.loaded.values() if (broadcast := run.broadcast(digest))]
        if not holders:
            if (sent := self.releases.broadcast(digest) or self.packages.broadcast(digest)) is not None:
                return None, sent
            self.table.not_loaded.ask_again(run_id)
            raise NoSuchResource(digest_text(digest))
        return next((pair for pair in holders if pair[0].state.works(client_id)), holders[0])

    async def model_round(self, run: Run, wanted: str) -> int:
        """The round that "latest", "best" or a number means. Raises InvalidInput, NoSuchModel, NoBestRound."""
        latest = run.rounds.latest
        if wanted == "best":
            if (best := run.rounds.best) is None:
                raise NoBestRound(run.id, run.config.stop.metric, [*run.rounds.newest_metrics()])
            return best.round
        if wanted == "latest":
            return latest.round if latest else INITIAL
        kept = await self._services.in_compute(self._services.checkpoints.rounds, run.id)
        # Compared as text: a number of a million digits is no number to Python, and none of these.
        if (round_kept := {str(round_): round_ for round_ in kept if round_ >= 0}.get(wanted)) is not None:
            return round_kept
        if len(wanted) <= _DIGITS and wanted.isdecimal() and int(wanted) < run.state.round:
            raise NoSuchModel(run.id, int(wanted), kept)
        shown = ", ".join(str(round_) for round_ in kept if round_ >= 0) or "none yet"
        raise InvalidInput("round", f'"latest", "best" or a kept round ({shown})', repr(wanted[:100]))

    # For the fleet.

    async def settled(self, asked: Asked, client_id: str) -> tuple[list[Outcome], list[str]]:
        """The outcomes of updates that a client asks about, and which of its runs have ended."""
        outcomes, ended = await self.outcomes.decided(asked.pending, client_id), list[str]()
        for run_id in filter(self.table.is_over, dict.fromkeys(held.run_id for held in asked.states)):
            run = self.table.loaded.get(run_id)
            if run is None or not run.client_evaluations.awaits(client_id):  # else it is told after its evaluation
                ended.append(run_id)
        return outcomes, ended

    def client_attached(self, client_id: str) -> None:
        """A client attached: send it the work that it still has."""
        for run in self.table.loaded.values():
            run.client_attached(client_id)
        self.releases.client_attached(client_id)
        self.packages.client_attached(client_id)

    def client_available(self, client_id: str) -> None:
        """A client may train again: ask it once more for work that it gave up and that is still wanted."""
        for run in self.table.loaded.values():
            if not run.ended:
                run.dispatch.client_back(client_id)

    def client_gone(self, client_id: str, reason: str) -> None:
        """A client is lost, banned or forgotten: do not wait for it any more."""
        for run in self.table.loaded.values():
            run.submissions.client_gone(client_id, reason)
            run.client_evaluations.client_gone(client_id)
            if reason == "forgotten":
                run.client_states.drop(client_id)
            if reason in _PERMANENT and not run.ended and client_id in run.state.members:
                run.post(ev.StatesLost(f"{client_id} was {reason}, and with it its state"))
        self.releases.client_gone(client_id, reason)
        self.packages.client_gone(client_id, reason)
        if reason in _PERMANENT:
            self._services.io.submit(self._remove_unfinished, client_id)

    def _remove_unfinished(self, client_id: str) -> None:
        """Remove the unfinished uploads of a client that will not come back; in a worker thread."""
        try:
            self._services.spool.remove_unfinished(client_id)
        except StoreError as error:
            log.warning("not_removed", client=client_id, error=str(error))

    def client_released(self, client_id: str) -> None:
        """An operator lets a client take part again, also in runs that it was left out of."""
        for run in self.table.loaded.values():
            run.client_states.release(client_id)
            run.eligible.invalidate()
            run.post(ev.ClientReleased(client_id))

    def fleet_changed(self) -> None:
        """The set of clients that may be drawn may have changed."""
        for run in self.table.loaded.values():
            if not run.ended:
                run.fleet_changed()


MOST_LOOKED_UP = 256
"""Updates of a client that are looked up for one call; daemons keep one or two for each run."""
LISTS_KEPT = 16
"""Accepted lists in memory: a fleet that comes back after a restart asks about the same few."""


class Outcomes:
    """Finds outcomes of single clients in all runs, without reading whole rounds. Lives on the event loop.

    An accepted list is one row for the whole cohort. The latest ones are kept in memory; they never change.
    """

    def __init__(self, ledger: Ledger, table: RunTable) -> None:
        self._ledger, self._table = ledger, table
        self._lists: OrderedDict[tuple[str, int, int], Mapping[tuple[str, int], bytes]] = OrderedDict()
        self._reading = asyncio.Lock()
        """Held while a list is read, so that each list is read once."""

    async def decided(self, keys: Iterable[ExchangeKey], client: str) -> list[Outcome]:
        """The outcomes of a client's updates, as far as they are decided.

        A repeated key is answered once. At most MOST_LOOKED_UP keys are looked up in the ledger; the client asks about
        the others when it comes again.
        """
        outcomes: list[Outcome] = []
        wanted: dict[tuple[Run, int], list[int]] = {}  # the runs: one may be deleted while the ledger is read
        unique = dict.fromkeys((key.run_id, key.exchange, key.round) for key in keys)
        looked_up = 0
        for run_id, exchange, round_ in unique:
            run = self._table.loaded.get(run_id)
            if run is not None and run.state.policy.buffered and run.state.awaits(round_, client):
                continue
            if run is not None and round_ < run.rounds.committed:
                looked_up += 1
                if looked_up <= MOST_LOOKED_UP:
                    wanted.setdefault((run, exchange), []).append(round_)
            elif self._table.is_over(run_id):
                key = ExchangeKey(run_id=run_id, round=round_, exchange=exchange)
                epoch = run.record.state_epoch if run else 0
                outcomes.append(uncounted_outcome(key, RefusalReason.REFUSAL_REASON_ABANDONED, epoch))
        for (run, exchange), rounds in wanted.items():
            outcomes += await self._committed_outcomes(run, exchange, rounds, client)
        return outcomes

    async def _committed_outcomes(self, run: Run, exchange: int, rounds: Iterable[int], client: str) -> list[Outcome]:
        epochs = await run.context.state_epochs(list(rounds))
        admitted: Mapping[int, UpdateRecord] = {}
        if exchange < run.state.policy.exchanges:
            rows = await self._ledger.do(self._ledger.store.updates_of, run.id, exchange, list(epochs), client)
            admitted = {row.round: row for row in rows if row.admitted}
        outcomes = []
        for round_, epoch in epochs.items():
            update = admitted.get(round_)
            last = min(round_ + run.state.policy.max_staleness, run.rounds.committed - 1)
            if update is not None and await self._is_accepted(update, range(round_, last + 1)):
                outcomes.append(accepted_outcome(update, epoch))
            else:
                key = ExchangeKey(run_id=run.id, round=round_, exchange=exchange)
                outcomes.append(not_needed_outcome(key, epoch))
        return outcomes

    async def _is_accepted(self, update: UpdateRecord, steps: range) -> bool:
        """Whether the update is on the list of one of these rounds."""
        for step in steps:
            key = (update.run_id, step, update.exchange)
            async with self._reading:
                if key not in self._lists:
                    taken = await self._ledger.do(self._ledger.store.taken, *key)
                    self._lists[key] = {(client, round_): digest for client, round_, digest in taken or ()}
                self._lists.move_to_end(key)
                while len(self._lists) > LISTS_KEPT:
                    self._lists.popitem(last=False)
                if self._lists[key].get((update.client_id, update.round)) == update.digest:
                    return True
        return False
