"""Rounds under way in the ledger: attempts, updates, accepted lists, stages of secure aggregation and answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import sqlalchemy as sa

from fl_common.units import counted
from fl_server.store.client_work import EndedWork
from fl_server.store.database import schema
from fl_server.store.database import transactions as sql
from fl_server.store.database.transactions import Transactions
from fl_server.store.errors import StoreError
from fl_server.store.records import (
    STAGES,
    AnswerRecord,
    AttemptRecord,
    ChargeRecord,
    FailureRecord,
    HistoryRecord,
    QuarantineRecord,
    RunRecord,
    StageRecord,
    UpdateRecord,
    Weighed,
)

_OF_CLIENTS = sql.rows_with(schema.updates, "run_id", "round", "exchange").where(
    schema.updates.c.client_id.in_(sa.bindparam("clients", expanding=True))
)


_FAILURES = sql.rows_with(schema.failures, "run_id", "round").order_by(
    schema.failures.c.exchange, schema.failures.c.failed_at
)
_OF_ROUND = (schema.attempts, schema.updates, schema.failures, schema.accepted)


class RoundLedger(Transactions):
    """The part of the `Store` for rounds that are not committed yet."""

    def open_attempt(
        self, attempt: AttemptRecord, why: HistoryRecord | None = None, charge: ChargeRecord | None = None
    ) -> None:
        """Write a cohort, and with it what it costs a privacy account.

        The same record again changes nothing; another record of the same key is a StoreError, and so is a charge whose
        number the account has.
        """
        key = {name: getattr(attempt, name) for name in ("run_id", "round", "exchange", "attempt")}
        doing = f"open attempt {attempt.attempt} of run {attempt.run_id!r} round {attempt.round}"
        with self._transaction(doing) as db:
            known = sql.find(db, schema.attempts, **key)
            if known is None or sql.attempt_of(known) != attempt:
                db.execute(sa.insert(schema.attempts), sql.to_row(attempt))
                if charge is not None:
                    db.execute(sa.insert(schema.charges), sql.to_row(charge))
                sql.write_history(db, why)

    def add_charge(self, charge: ChargeRecord) -> None:
        """Charge an account what is not in the ledger; StoreError if it has a charge of this number."""
        with self._transaction(f"charge the privacy account {charge.account!r}") as db:
            db.execute(sa.insert(schema.charges), sql.to_row(charge))

    def charges(self, account: str) -> list[ChargeRecord]:
        """All that a privacy account was charged, by number."""
        query = sql.rows_where(schema.charges, account=account).order_by(schema.charges.c.number)
        return [ChargeRecord(**row) for row in self._read(f"the charges of account {account!r}", query)]

    def charged_accounts(self) -> dict[str, int]:
        """The number of charges of each privacy account."""
        query = sa.select(schema.charges.c.account, sa.func.count()).group_by(schema.charges.c.account)
        return {row["account"]: row["count_1"] for row in self._read("the privacy accounts", query)}

    def attempts(self, run_id: str, round: int) -> list[AttemptRecord]:
        """Attempts of a round, by exchange and attempt."""
        attempts = map(sql.attempt_of, self._rows("attempts", schema.attempts, run_id=run_id, round=round))
        return sorted(attempts, key=lambda attempt: (attempt.exchange, attempt.attempt))

    def set_seconds_left(self, run_id: str, seconds: Mapping[tuple[int, int, int], float]) -> None:
        """Write the time left of attempts, named by (round, exchange, attempt). This is no change of state.

        A missing attempt is ignored: its round may have been redrawn.
        """
        with self._transaction(f"write the time left to run {run_id!r}") as db:
            for attempt, left in seconds.items():
                key = {"run_id": run_id, **dict(zip(("round", "exchange", "attempt"), attempt, strict=True))}
                sql.replace(db, schema.attempts, key, {"seconds_left": left})

    def record_update(
        self,
        update: UpdateRecord,
        quarantine: QuarantineRecord | None = None,
        why: HistoryRecord | None = None,
        package: str = "",
    ) -> UpdateRecord:
        """Write the first verdict on an update and return it; a later one changes nothing and returns the first.

        A refusal, and work with a package, is counted in the client's work. quarantine: replaces the record of a known
        client. package: see `Weighed`.
        """
        with self._transaction(f"record the update of {update.client_id!r} in run {update.run_id!r}") as db:
            return _recorded(db, [Weighed(update, quarantine, why, package)])[0]

    def record_updates(self, verdicts: Sequence[Weighed]) -> list[UpdateRecord]:
        """`record_update` for several updates, in one transaction. Returns the verdicts that stand, in order."""
        first = verdicts[0].update
        with self._transaction(f"record {counted(len(verdicts), 'update')} in run {first.run_id!r}") as db:
            return _recorded(db, verdicts)

    def update_of(self, run_id: str, round: int, exchange: int, client_id: str) -> UpdateRecord | None:
        """One update's record, if there is one."""
        if max(round, exchange) > sql.LARGEST:
            return None
        key = {"run_id": run_id, "round": round, "exchange": exchange, "client_id": client_id}
        return next(map(sql.update_of, self._rows("an update", schema.updates, **key)), None)

    def updates_of(self, run_id: str, exchange: int, rounds: Sequence[int], client_id: str) -> list[UpdateRecord]:
        """The records of a client in an exchange of these rounds, in any order; no other record is read."""
        possible = [round_ for round_ in rounds if round_ <= sql.LARGEST]
        if not possible or exchange > sql.LARGEST:
            return []
        query = sql.rows_where(schema.updates, run_id=run_id, exchange=exchange, client_id=client_id)
        return [sql.update_of(row) for row in self._read("updates", query.where(schema.updates.c.round.in_(possible)))]

    def updates(self, run_id: str, round: int, exchange: int) -> list[UpdateRecord]:
        """The records of an exchange, in the order of client id bytes."""
        updates = map(
            sql.update_of, self._rows("updates", schema.updates, run_id=run_id, round=round, exchange=exchange)
        )
        return sorted(updates, key=lambda update: update.client_id.encode())

    def drop_update(self, run_id: str, round: int, exchange: int, client_id: str, why: HistoryRecord) -> None:
        """Remove the record of an update with a torn or missing file, so that it can be sent again.

        If there is no such record, nothing changes and no history is written; nor is it for a hidden cohort.
        """
        key = {"run_id": run_id, "round": round, "exchange": exchange, "client_id": client_id}
        with self._transaction(f"drop the update of {client_id!r} in run {run_id!r}") as db:
            if sql.remove(db, schema.updates, **key):
                sql.write_history(db, None if sql.hides_cohorts(db, run_id) else why)

    def refuse_accepted(
        self,
        refused: Sequence[UpdateRecord],
        quarantines: Sequence[QuarantineRecord],
        whys: Sequence[HistoryRecord],
        round: int | None = None,
        packages: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Refuse accepted updates of one exchange, and remove its accepted list, in one transaction.

        The clients' counters and quarantine records change as in `record_update`. refused: the new records. round: that
        of the list, if the updates may be of earlier rounds. packages: by client. The same call again changes nothing;
        a committed round is a StoreError.
        """
        first = refused[0]
        round = first.round if round is None else round
        of_round = {"run_id": first.run_id, "round": round}
        with self._transaction(f"refuse accepted updates of run {first.run_id!r}") as db:
            if sql.find(db, schema.commits, **of_round):
                raise StoreError(f"round {round} of run {first.run_id!r} is committed: its list stands")
            if not sql.remove(db, schema.accepted, **of_round, exchange=first.exchange):
                return
            for update in refused:
                key = {name: getattr(update, name) for name in ("run_id", "round", "exchange", "client_id")}
                sql.replace(db, schema.updates, key, sql.to_row(update))
            hidden = sql.hides_cohorts(db, first.run_id)
            later = {update.client_id: _as_refused(update, packages.get(update.client_id, ""), hidden=hidden, ended=0)
                     for update in refused}  # fmt: skip
            sql.count_work(db, later)
            for quarantine in quarantines:
                sql.replace_quarantine_record(db, quarantine, None)
            sql.write_history(db, *whys)

    def put_failure(self, failure: FailureRecord, why: HistoryRecord | None = None, package: str = "") -> None:
        """Replace what is known of failed work. One more failure is counted in the client's work.

        package: that may have made the work fail; empty for none.
        """
        key = {name: getattr(failure, name) for name in ("run_id", "round", "exchange", "client_id")}
        with self._transaction(f"write the failure of {failure.client_id!r} in run {failure.run_id!r}") as db:
            before = sql.find(db, schema.failures, **key)
            if failure.failures > (0 if before is None else before["failures"]):
                hidden = sql.hides_cohorts(db, failure.run_id)
                sql.count_work(db, {failure.client_id: _as_failed(failure, package, hidden=hidden)})
            sql.remove(db, schema.failures, **key)
            db.execute(sa.insert(schema.failures), sql.to_row(failure))
            sql.write_history(db, why)

    def failures(self, run_id: str, round: int) -> list[FailureRecord]:
        """What went wrong in a round, by exchange, in the order of failure."""
        return [FailureRecord(**row) for row in self._read("failures", _FAILURES, run_id=run_id, round=round)]

    def latest_failure(self, run_id: str) -> FailureRecord | None:
        """The latest failed work of a run; None if none has failed."""
        table = schema.failures
        query = sql.rows_where(table, run_id=run_id).where(table.c.failures > 0)
        query = query.order_by(table.c.round.desc(), table.c.failed_at.desc()).limit(1)
        return next((FailureRecord(**row) for row in self._read("failures", query)), None)

    def fix_accepted(
        self,
        run_id: str,
        round: int,
        exchange: int,
        accepted: Sequence[tuple[str, bytes]],
        versions: Sequence[int] = (),
    ) -> None:
        """Fix the (client, digest) list of an exchange for good; fsynced.

        Without the fsync, a power cut might leave a checkpoint without its accepted list. The same list again changes
        nothing; another list for the same exchange is a StoreError. versions: the round of each update, of a run with a
        buffer, whose list is in the order of arrival.
        """
        entries: list[list[object]] = [[client_id, digest.hex()] for client_id, digest in accepted]
        for entry, version in zip(entries, versions, strict=bool(versions)):
            entry.append(version)
        key = {"run_id": run_id, "round": round, "exchange": exchange}
        with self._transaction(f"fix the accepted list of run {run_id!r} round {round}", fsynced=True) as db:
            fixed = sql.find(db, schema.accepted, **key)
            if fixed is None:
                db.execute(sa.insert(schema.accepted).values(**key, entries=entries))
            elif fixed["entries"] != entries:
                raise StoreError(
                    f"the accepted list of run {run_id!r} round {round} exchange {exchange} is fixed with "
                    f"{counted(len(fixed['entries']), 'update')}; another list of {len(entries)} came, and the "
                    "first one stands"
                )

    def accepted(self, run_id: str, round: int, exchange: int) -> list[tuple[str, bytes]] | None:
        """The fixed list; None before it is fixed."""
        taken = self.taken(run_id, round, exchange)
        return None if taken is None else [(client_id, digest) for client_id, _, digest in taken]

    def taken(self, run_id: str, round: int, exchange: int = 0) -> list[tuple[str, int, bytes]] | None:
        """The fixed list as (client, round of its update, digest); None before it is fixed."""
        lists = self._rows("an accepted list", schema.accepted, run_id=run_id, round=round, exchange=exchange)
        if not lists:
            return None
        return [
            (client_id, version[0] if version else round, bytes.fromhex(digest))
            for client_id, digest, *version in lists[0]["entries"]
        ]

    def unfix(self, run_id: str, round: int, why: HistoryRecord) -> None:
        """Remove the list of an uncommitted round of a run with a buffer: bytes of it are torn or gone."""
        with self._transaction(f"give up the accepted list of run {run_id!r} round {round}") as db:
            if sql.remove(db, schema.accepted, run_id=run_id, round=round):
                sql.write_history(db, why)

    def accepted_updates(self, run_id: str, round: int, exchange: int) -> list[UpdateRecord]:
        """The accepted updates of an exchange, in the order of its list."""
        taken = self.taken(run_id, round, exchange) or []
        rounds = {version for _, version, _ in taken}
        updates = {
            (update.client_id, update.round, update.digest): update
            for version in sorted(rounds)
            for update in self.updates(run_id, version, exchange)
        }
        return [updates[entry] for entry in taken if entry in updates]

    def waiting_updates(self, run_id: str, first: int, round: int) -> list[UpdateRecord]:
        """The admitted updates that no committed step has taken, of a run with a buffer, in the order of arrival.

        first: the oldest version that may be in use. round: the one under way. Those on its list come first, in the
        order of the list.
        """
        counted = {entry for step in range(first, round) for entry in self.taken(run_id, step) or ()}
        fixed = self.taken(run_id, round) or []
        waiting = {
            (update.client_id, version, update.digest): update
            for version in range(first, round + 1)
            for update in self.updates(run_id, version, 0)
            if update.admitted and (update.client_id, version, update.digest) not in counted
        }
        others = [update for entry, update in waiting.items() if entry not in fixed]
        return [
            *(waiting[entry] for entry in fixed if entry in waiting),
            *sorted(others, key=lambda update: update.received_at),
        ]

    def restart_round(self, run: RunRecord, round: int, why: HistoryRecord, past_draws: int = 0) -> None:
        """Remove the attempts, updates and accepted lists of an uncommitted round, and replace the run's record.

        All in one transaction. A committed round is a StoreError.

        past_draws: the draws that are over. An attempt without clients keeps their number; 0: it is not kept.
        """
        key = {"run_id": run.run_id, "round": round}
        with self._transaction(f"restart round {round} of run {run.run_id!r}") as db:
            if sql.find(db, schema.commits, **key):
                raise StoreError(f"round {round} of run {run.run_id!r} is committed: it cannot be restarted")
            for table in (*_OF_ROUND, schema.secure_stages, schema.secure_answers):
                sql.remove(db, table, **key)
            if past_draws:
                past = AttemptRecord(run.run_id, round, 0, past_draws - 1, (), why.time, 0.0)
                db.execute(sa.insert(schema.attempts), sql.to_row(past))
            sql.replace_run(db, run)
            sql.write_history(db, why)


def _recorded(db: sa.Connection, verdicts: Sequence[Weighed]) -> list[UpdateRecord]:
    """Enter the verdicts for which there is none yet, and what they do. Returns the verdict that stands for each."""
    known = _known(db, [verdict.update for verdict in verdicts])
    fresh: list[Weighed] = []
    for verdict in verdicts:
        if _key(verdict.update) not in known:
            known[_key(verdict.update)] = verdict.update
            fresh.append(verdict)
    # A list of rows is one statement; an empty one would be a row of defaults.
    if fresh:
        db.execute(sa.insert(schema.updates), [sql.to_row(verdict.update) for verdict in fresh])
    refused = [verdict.update for verdict in fresh if not verdict.update.admitted]
    hidden = bool(refused) and sql.hides_cohorts(db, refused[0].run_id)
    events = {verdict.update.client_id: _as_decided(verdict, hidden=hidden) for verdict in fresh}
    sql.count_work(db, {client: event for client, event in events.items() if event is not None})
    for _, quarantine, why, _ in fresh:
        sql.replace_quarantine_record(db, quarantine, why)
    return [known[_key(verdict.update)] for verdict in verdicts]


def _as_decided(verdict: Weighed, *, hidden: bool) -> sql.Counted | None:
    """What a verdict counts: a refusal, work with a package, what its client's data has spent; None for nothing."""
    update, package = verdict.update, verdict.package
    if not update.admitted:
        return _as_refused(update, package, hidden=hidden)
    if (delta := update.delta) is not None:
        return lambda work: work.stating(update.epsilon, delta).with_package(package)
    return (lambda work: work.with_package(package)) if package else None


def _as_refused(update: UpdateRecord, package: str, *, hidden: bool, ended: int = 1) -> sql.Counted:
    what = EndedWork(update.run_id, update.round, update.refused_for, update.detail, update.received_at)
    shown = what.of_hidden_run() if hidden else what
    return lambda work: work.ended("refused", shown).with_package(package, ended=ended, failed=True)


def _as_failed(failure: FailureRecord, package: str, *, hidden: bool) -> sql.Counted:
    what = EndedWork(failure.run_id, failure.round, failure.cause, failure.detail, failure.failed_at)
    shown = what.of_hidden_run() if hidden else what
    return lambda work: work.ended("failed", shown).with_package(package, failed=True)


def _known(db: sa.Connection, updates: Sequence[UpdateRecord]) -> dict[tuple[object, ...], UpdateRecord]:
    """The records in the ledger of the same clients in the same exchanges."""
    known: dict[tuple[object, ...], UpdateRecord] = {}
    for exchange in {(update.run_id, update.round, update.exchange) for update in updates}:
        clients = {update.client_id for update in updates if _key(update)[:3] == exchange}
        values = dict(zip(("run_id", "round", "exchange"), exchange, strict=True))
        for row in db.execute(_OF_CLIENTS, {**values, "clients": list(clients)}).mappings():
            record = sql.update_of(row)
            known[_key(record)] = record
    return known


def _key(update: UpdateRecord) -> tuple[object, ...]:
    return update.run_id, update.round, update.exchange, update.client_id


_KEY = ("run_id", "round", "exchange", "attempt", "stage")


class StageLedger(Transactions):
    """The part of the `Store` for rounds with secure aggregation."""

    def open_stage(self, stage: StageRecord, seconds: float, why: HistoryRecord | None = None) -> None:
        """Write that a stage is open, with its members and its time. The same key again changes nothing."""
        with self._transaction(f"open the stage {stage.stage} of run {stage.run_id!r} round {stage.round}") as db:
            if sql.find(db, schema.secure_stages, **{name: getattr(stage, name) for name in _KEY}) is None:
                db.execute(sa.insert(schema.secure_stages), sql.to_row(stage))
                attempt = {name: getattr(stage, name) for name in _KEY[:-1]}
                sql.replace(db, schema.attempts, attempt, {"seconds_left": seconds})
                sql.write_history(db, why)

    def stages(self, run_id: str, round: int) -> list[StageRecord]:
        """The stages of a round's latest draw, in the order in which they were opened."""
        stages = [sql.stage_of(row) for row in self._rows("stages", schema.secure_stages, run_id=run_id, round=round)]
        latest = max((stage.attempt for stage in stages), default=0)
        return sorted((each for each in stages if each.attempt == latest), key=lambda stage: STAGES.index(stage.stage))

    def add_answer(self, answer: AnswerRecord) -> bytes:
        """Write a client's first answer to a stage. Returns the answer that stands: another one changes nothing."""
        key = {name: getattr(answer, name) for name in (*_KEY, "client_id")}
        doing = f"write the answer of {answer.client_id!r} to the stage {answer.stage} of run {answer.run_id!r}"
        with self._transaction(doing) as db:
            if (first := sql.find(db, schema.secure_answers, **key)) is not None:
                return bytes(first["content"])
            db.execute(sa.insert(schema.secure_answers), sql.to_row(answer))
            return answer.content

    def answers(self, run_id: str, round: int, attempt: int) -> Mapping[str, dict[str, bytes]]:
        """Stage -> client -> answer, of one draw of a round."""
        by_stage: dict[str, dict[str, bytes]] = {}
        key = {"run_id": run_id, "round": round, "attempt": attempt}
        for row in self._rows("answers of stages", schema.secure_answers, **key):
            by_stage.setdefault(row["stage"], {})[row["client_id"]] = bytes(row["content"])
        return by_stage
