"""Runs, their committed rounds with evaluations, and history in the ledger; removal of old rounds and whole runs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import sqlalchemy as sa

from fl_server.rounds.metrics import EVALUATED
from fl_server.store.client_work import Arrived, ClientWork, timings
from fl_server.store.database import schema
from fl_server.store.database import transactions as sql
from fl_server.store.database.transactions import Transactions
from fl_server.store.errors import StoreError
from fl_server.store.records import (
    DELETING,
    LEFT_OUT,
    ClientEvaluation,
    CommitRecord,
    HistoryRecord,
    RunRecord,
    TotalsRecord,
)

ROUNDS_AT_ONCE = 10
LINES_AT_ONCE = 1000
DELETED = "deleted"
"""State of the row that stays of a deleted run, so that its id is never used again."""
_DETAILS = (
    schema.attempts,
    schema.updates,
    schema.failures,
    schema.accepted,
    schema.client_evaluations,
    schema.secure_stages,
    schema.secure_answers,
)
_COMMITS = (
    sql.rows_with(schema.commits, "run_id")
    .where(schema.commits.c.round >= sa.bindparam("first"))
    .order_by(schema.commits.c.round)
)
_LISTS = sql.rows_with(schema.accepted, "run_id", "round").order_by(schema.accepted.c.exchange)
_BETWEEN: Any = (sa.bindparam("first"), sa.bindparam("last"))
_LISTS_BETWEEN = (
    sql.rows_with(schema.accepted, "run_id")
    .where(schema.accepted.c.round.between(*_BETWEEN))
    .order_by(schema.accepted.c.exchange)
)
_COHORTS_BETWEEN = sql.rows_with(schema.attempts, "run_id", "exchange").where(
    schema.attempts.c.round.between(*_BETWEEN)
)
_TOTALS_WITH = sa.delete(schema.run_totals).where(
    schema.run_totals.c.run_id == sa.bindparam("run_id"), schema.run_totals.c.rounds > sa.bindparam("round")
)


class Removal(Transactions):
    """The part of the `Store` that removes, in transactions that are short however many rounds there are."""

    def deleted_runs(self) -> list[str]:
        """Ids of deleted runs, which are never used again."""
        deleted = self._read("deleted runs", sa.select(schema.runs.c.run_id).where(schema.runs.c.state == DELETED))
        return [row["run_id"] for row in deleted]

    def remove_rounds(self, run_id: str, before: int) -> bool:
        """Remove everything but the commits of a few rounds before this one, the oldest. Returns whether some are left.

        Everything: attempts, updates, accepted lists and clients' evaluations.
        """
        with self._transaction(f"remove old rounds of run {run_id!r}") as db:
            oldest = [
                db.execute(sa.select(sa.func.min(table.c.round)).where(table.c.run_id == run_id)).scalar()
                for table in _DETAILS
            ]
            first = min((round_ for round_ in oldest if round_ is not None), default=before)
            end = min(before, first + ROUNDS_AT_ONCE)
            for table in _DETAILS if first < end else ():
                db.execute(sa.delete(table).where(table.c.run_id == run_id, table.c.round < end))
            return end < before

    def remove_run_history(self, run_id: str) -> bool:
        """Remove some lines that the coordinator wrote about a run. Returns whether some are left.

        Operators' lines stay, and the line that explains the deletion.
        """
        table = schema.history
        lines = sa.select(table.c.id).where(table.c.subject == run_id, table.c.actor == "coordinator")
        lines = lines.where(table.c.event != "run_deleted")
        with self._transaction(f"remove the history of run {run_id!r}") as db:
            numbers = list(db.execute(lines.order_by(table.c.id).limit(LINES_AT_ONCE)).scalars())
            db.execute(sa.delete(table).where(table.c.id.in_(numbers)))
            return len(numbers) == LINES_AT_ONCE

    def remove_run(self, run_id: str, why: HistoryRecord) -> None:
        """Remove the rest of a run in state DELETING, except its id; fsynced. The same call again changes nothing."""
        with self._transaction(f"remove run {run_id!r}", fsynced=True) as db:
            state = db.execute(sa.select(schema.runs.c.state).where(schema.runs.c.run_id == run_id)).scalar()
            if state == DELETED:
                return
            if state != DELETING:
                raise StoreError(f"run {run_id!r} is {state or 'unknown'}: only one that is being deleted is removed")
            for table in (*_DETAILS, schema.commits, schema.run_totals, schema.client_states):
                db.execute(sa.delete(table).where(table.c.run_id == run_id))
            db.execute(sa.update(schema.runs).filter_by(run_id=run_id).values(state=DELETED, spec={}, reason=""))
            sql.write_history(db, why)


class RunLedger(Transactions):
    """The part of the `Store` for runs and history."""

    def create_run(self, run: RunRecord, why: HistoryRecord) -> None:
        """Add a run; fsynced. Raises StoreError if the id exists."""
        with self._transaction(f"create run {run.run_id!r}", fsynced=True) as db:
            if sql.find(db, schema.runs, run_id=run.run_id):
                raise StoreError(f"there is a run {run.run_id!r} already; choose another id")
            db.execute(sa.insert(schema.runs), sql.to_row(run))
            sql.write_history(db, why)

    def update_run(self, run: RunRecord, why: HistoryRecord | None = None) -> None:
        """Replace the record of run.run_id; fsynced. Raises StoreError if there is no such run."""
        with self._transaction(f"update run {run.run_id!r}", fsynced=True) as db:
            sql.replace_run(db, run)
            sql.write_history(db, why)

    def set_usage(self, run_id: str, elapsed_s: float, bytes_down: int, bytes_up: int) -> None:
        """Write the time and the bytes that a run has used. This is no change of state."""
        with self._transaction(f"write the usage of run {run_id!r}") as db:
            values = {"elapsed_s": elapsed_s, "bytes_down": bytes_down, "bytes_up": bytes_up}
            sql.replace(db, schema.runs, {"run_id": run_id}, values)

    def runs(self) -> list[RunRecord]:
        """All runs that were not deleted, oldest first."""
        transactions = self._read("runs", sa.select(schema.runs).where(schema.runs.c.state != DELETED))
        return sorted((RunRecord(**row) for row in transactions), key=lambda run: (run.created_at, run.run_id))

    def add_history(self, entry: HistoryRecord) -> None:
        """Write a line of history without any other change."""
        with self._transaction("write history") as db:
            sql.write_history(db, entry)

    def history(self, subject: str = "", limit: int = 1000) -> list[HistoryRecord]:
        """The newest `limit` lines about a subject ("" for all), oldest first."""
        query = sql.rows_where(schema.history, **({"subject": subject} if subject else {}))
        newest = query.order_by(schema.history.c.id.desc()).limit(max(limit, 0))
        return [sql.history_of(row) for row in reversed(self._read("history", newest))]

    def history_details(self, subject: str, event: str) -> list[str]:
        """The details of all lines of an event about a subject, oldest first."""
        query = sql.rows_where(schema.history, subject=subject, event=event).order_by(schema.history.c.id)
        return [row["detail"] for row in self._read("history", query)]

    def history_span(self, subject: str, limit: int, before: int = 2**63 - 1) -> tuple[int, int]:
        """Numbers of the first and the last of the newest `limit` lines about a subject with numbers under `before`.

        (0, -1) if there are none. The first is 0 if there are fewer than `limit`.
        """
        table = schema.history
        about = sa.select(table.c.id).filter_by(**({"subject": subject} if subject else {})).where(table.c.id < before)
        about = about.order_by(table.c.id.desc())
        newest = self._read("history", about.limit(1))
        if not newest or limit <= 0:
            return 0, -1
        first = self._read("history", about.offset(limit - 1).limit(1))
        return (first[0]["id"] if first else 0), newest[0]["id"]

    def history_between(self, subject: str, span: tuple[int, int], limit: int) -> list[tuple[int, HistoryRecord]]:
        """The first `limit` lines about a subject with numbers from and to those of the span, each with its number."""
        table = schema.history
        query = sql.rows_where(table, **({"subject": subject} if subject else {}))
        query = query.where(table.c.id.between(*span)).order_by(table.c.id).limit(limit)
        return [(row["id"], sql.history_of(row)) for row in self._read("history", query)]


class CommitLedger(Transactions):
    """The part of the `Store` for committed rounds."""

    def commit(self, commit: CommitRecord, why: HistoryRecord, left_out: Sequence[str] = ()) -> None:
        """Enter a round with a durable checkpoint; fsynced.

        Adds 1 to updates_counted of the clients accepted in the last exchange. Clients that the reducer left out are
        excepted, and the records of their updates are marked. The round is counted in the work of its clients.
        Quarantine records of counted clients are removed, except quarantines that have not ended. If the run's cohorts
        are hidden, none of this is done, and norms, losses and metrics of the round's single updates are removed.
        The same round again with the same model digest changes nothing; with another digest it is a StoreError.
        """
        with self._transaction(f"commit run {commit.run_id!r} round {commit.round}", fsynced=True) as db:
            entered = sql.find(db, schema.commits, run_id=commit.run_id, round=commit.round)
            if entered is None:
                db.execute(sa.insert(schema.commits), sql.to_row(commit))
                counted = [client for client in _accepted_by_exchange(db, commit)[-1] if client not in left_out]
                of_round = sa.update(schema.updates).filter_by(run_id=commit.run_id, round=commit.round)
                if sql.hides_cohorts(db, commit.run_id):
                    db.execute(of_round.values(norm=None, norms=None, training_loss=None, epochs=None))
                else:
                    sql.count_updates(db, counted)
                    sql.count_work(db, _work_in(db, commit))
                    table = schema.quarantines
                    ended = table.c.until <= commit.committed_at
                    db.execute(sa.delete(table).where(table.c.client_id.in_(counted), ended))
                if left_out:
                    accepted = of_round.filter_by(admitted=True)
                    db.execute(accepted.where(schema.updates.c.client_id.in_(left_out)).values(reason=LEFT_OUT))
                # Opened secrets are of no use any more.
                sql.remove(db, schema.secure_answers, run_id=commit.run_id, round=commit.round)
                sql.write_history(db, why)
                return
            for which, name in (("model", "model_digest"), ("averaged model", "averaged_digest")):
                if entered[name] != (came := getattr(commit, name)):
                    raise StoreError(
                        f"run {commit.run_id!r} round {commit.round} is committed with {which} {entered[name]}; "
                        f"{came} came, and the first one stands"
                    )

    def set_metrics(self, run_id: str, round: int, metrics: Mapping[str, float]) -> None:
        """Replace the evaluation of a committed round. Raises StoreError if the round is not committed.

        With metrics of clients, the sums of their evaluations are removed.
        """
        with self._transaction(f"set the metrics of run {run_id!r} round {round}") as db:
            key = {"run_id": run_id, "round": round}
            if not sql.replace(db, schema.commits, key, {"metrics": dict(metrics)}):
                raise StoreError(f"run {run_id!r} has no committed round {round} to give metrics to")
            if EVALUATED in metrics:
                # Nobody needs them any more, and they say more of a client than its metrics.
                sql.replace(db, schema.client_evaluations, key, {"sums": []})
            db.execute(_TOTALS_WITH, key)

    def set_clients_seconds_left(self, run_id: str, round: int, seconds: float) -> None:
        """Write the time left of a round's evaluation by clients. This is no change of state."""
        with self._transaction(f"write the time left to clients of run {run_id!r}") as db:
            sql.replace(db, schema.commits, {"run_id": run_id, "round": round}, {"clients_seconds_left": seconds})

    def commits(self, run_id: str, first: int = 0, limit: int | None = None) -> list[CommitRecord]:
        """Committed rounds in order, from `first` on, at most `limit`."""
        if first > sql.LARGEST:
            return []
        query = _COMMITS if limit is None else _COMMITS.limit(limit)
        return [CommitRecord.of(dict(row)) for row in self._read("commits", query, run_id=run_id, first=first)]

    def state_epochs(self, run_id: str, rounds: Sequence[int]) -> dict[int, int]:
        """The epochs of client states in these committed rounds, at most 1,000."""
        table = schema.commits
        query = sa.select(table.c.round, table.c.state_epoch).where(table.c.run_id == run_id, table.c.round.in_(rounds))
        return {row["round"]: row["state_epoch"] for row in self._read("state epochs", query)}

    def draws(self, run_id: str, first: int, last: int) -> dict[int, tuple[frozenset[str], frozenset[str]]]:
        """Round -> (clients of its cohorts, those accepted in its last exchange), of the rounds `first` to `last`.

        A round whose details were removed, or whose list is not fixed, is left out; so is each round of a run with a
        buffer, whose clients were drawn in several rounds.
        """
        counted, drawn = dict[int, frozenset[str]](), dict[int, frozenset[str]]()
        span = {"run_id": run_id, "first": first, "last": last}
        for row in self._read("accepted lists", _LISTS_BETWEEN, **span):
            if all(len(entry) == 2 for entry in row["entries"]):
                counted[row["round"]] = frozenset(client for client, _ in row["entries"])
        for row in self._read("cohorts", _COHORTS_BETWEEN, **span, exchange=0):
            drawn[row["round"]] = drawn.get(row["round"], frozenset()).union(row["cohort"])
        return {round_: (drawn.get(round_, frozenset()), clients) for round_, clients in counted.items()}

    def rounds_to_summarise(self, run_id: str, first: int = 0) -> list[int]:
        """Committed rounds, from `first` on, with evaluations by clients that are not part of their metrics yet."""
        table, answers = schema.commits, schema.client_evaluations
        answered = sa.exists().where(answers.c.run_id == table.c.run_id, answers.c.round == table.c.round)
        query = sa.select(table.c.round).where(table.c.run_id == run_id, table.c.round >= first, answered)
        query = query.where(sa.cast(table.c.metrics, sa.Text).not_like(f'%"{EVALUATED}":%')).order_by(table.c.round)
        return [row["round"] for row in self._read("evaluations", query)]

    def newest_values(self, wanted: Mapping[str, str], limit: int) -> dict[str, list[tuple[int, float]]]:
        """The newest (round, value) of a metric of each run, in order of rounds. wanted: the metric by run id."""
        table, by_run = schema.commits, dict[str, list[tuple[int, float]]]()
        for run_id, metric in wanted.items():
            # The text of the metrics is compared first: most rounds may have no evaluation.
            query = sa.select(table.c.round, table.c.metrics).where(table.c.run_id == run_id)
            query = query.where(sa.cast(table.c.metrics, sa.Text).contains(json.dumps(metric), autoescape=True))
            newest = self._read("metrics", query.order_by(table.c.round.desc()).limit(limit))
            values = [(row["round"], row["metrics"][metric]) for row in newest if metric in row["metrics"]]
            by_run[run_id] = values[::-1]
        return by_run

    def totals(self, run_id: str) -> TotalsRecord | None:
        """The totals of a run's settled rounds; None if there are none that are valid."""
        totals = self._rows("totals", schema.run_totals, run_id=run_id)
        return TotalsRecord(**totals[0]) if totals else None

    def put_totals(self, totals: TotalsRecord) -> None:
        """Replace the totals of a run's settled rounds. `set_metrics` of one of these rounds removes them."""
        with self._transaction(f"write the totals of run {totals.run_id!r}") as db:
            sql.remove(db, schema.run_totals, run_id=totals.run_id)
            db.execute(sa.insert(schema.run_totals), sql.to_row(totals))

    def record_evaluation(self, evaluation: ClientEvaluation) -> ClientEvaluation:
        """Write a client's evaluation and return it. If there is one already, change nothing and return that."""
        key = {name: getattr(evaluation, name) for name in ("run_id", "round", "client_id")}
        doing = f"record the evaluation of {evaluation.client_id!r} in run {evaluation.run_id!r}"
        with self._transaction(doing) as db:
            if first := sql.find(db, schema.client_evaluations, **key):
                return ClientEvaluation(**first)
            db.execute(sa.insert(schema.client_evaluations), sql.to_row(evaluation))
            return evaluation

    def evaluations(self, run_id: str, round: int, after: str = "", limit: int | None = None) -> list[ClientEvaluation]:
        """The clients' evaluations of a committed round, in the order of client id bytes: at most `limit` after one.

        Without their sums, which may be large.
        """
        # PostgreSQL would order by the database's language.
        table = schema.client_evaluations
        client = sa.collate(table.c.client_id, self._byte_order)
        query = sa.select(*(column for column in table.c if column.name != "sums")).filter_by(
            run_id=run_id, round=round
        )
        query = query.where(client > after).order_by(client).limit(limit)
        return [ClientEvaluation(**row) for row in self._read("evaluations", query)]

    def evaluation_sums(self, run_id: str, round: int, after: str, limit: int) -> list[tuple[str, Sequence[Any]]]:
        """Clients with the sums of their evaluations of a round, in order of id bytes: at most `limit` after one."""
        table = schema.client_evaluations
        client = sa.collate(table.c.client_id, self._byte_order)
        query = sa.select(table.c.client_id, table.c.sums).where(table.c.run_id == run_id, table.c.round == round)
        sums = self._read("sums", query.where(client > after).order_by(client).limit(limit))
        return [(row["client_id"], row["sums"]) for row in sums]


def _lists(db: sa.Connection, commit: CommitRecord) -> list[list[Any]]:
    """The accepted list of each exchange of a round; one empty list without any."""
    lists = db.execute(_LISTS, {"run_id": commit.run_id, "round": commit.round})
    return [row["entries"] for row in lists.mappings()] or [[]]


def _accepted_by_exchange(db: sa.Connection, commit: CommitRecord) -> list[list[str]]:
    """The accepted clients of each exchange of a round; one empty list without any."""
    return [[client_id for client_id, *_ in entries] for entries in _lists(db, commit)]


def _last_updates(db: sa.Connection, commit: CommitRecord) -> set[tuple[int, str]]:
    """The (round, client) of the accepted updates of the last exchange."""
    return {(version[0] if version else commit.round, client) for client, _, *version in _lists(db, commit)[-1]}


def _work_in(db: sa.Connection, commit: CommitRecord) -> dict[str, sql.Counted]:
    """What the round adds to the work of its clients. The times are of its last exchange."""
    lists, table = _accepted_by_exchange(db, commit), schema.updates
    numbers, in_last = Counter(client for clients in lists for client in clients), _last_updates(db, commit)
    columns = sa.select(table.c.round, table.c.client_id, table.c.received_at, table.c.work_s, table.c.transfer_s)
    last = columns.filter_by(run_id=commit.run_id, exchange=len(lists) - 1)
    last = last.where(table.c.round.in_({round_ for round_, _ in in_last}))
    times = timings([Arrived(*times) for round_, *times in db.execute(last) if (round_, times[0]) in in_last])
    return {
        client: partial(ClientWork.in_round, updates=number, timing=times.get(client))
        for client, number in numbers.items()
    }
