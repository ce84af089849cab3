"""The ledger in a SQL database: `Store` with SQLAlchemy Core, the same statements on every backend."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

from sqlalchemy import Connection, Engine, RowMapping, Select, Table, bindparam, create_engine, delete, insert, select
from sqlalchemy import update as change

from fl_server.store import rows, schema
from fl_server.store.base import (
    LEFT_OUT,
    AttemptRecord,
    ClientEvaluation,
    ClientRecord,
    CommitRecord,
    HistoryRecord,
    RunRecord,
    Standing,
    StateStanding,
    StoreError,
    UpdateRecord,
    only_banned,
)
from fl_server.store.engine import database_errors, engine_for, migrate, prepare_file
from fl_server.store.files import Durability
from fl_server.store.ownership import Home, claim, identify, require_claim
from fl_server.store.postgres import postgres_engine

LEDGER = "ledger.sqlite"
"""The ledger's file in a state directory."""
ANYWHERE = Home("")
"""Of a ledger that goes with no state directory."""


def open_sqlite(path: Path | str, durability: Durability = "process", home: Home = ANYWHERE) -> SqlStore:
    """Open or make the ledger in a SQLite file (":memory:" for one that goes with the process).

    Raises StoreFull where the file may not be written, StoreError for a file that is no ledger or a newer one.
    """
    if str(path) != ":memory:":
        prepare_file(Path(path))
    return SqlStore(f"sqlite:///{path}", durability, home)


def look_at_postgres(url: str) -> SqlStore:
    """A ledger in PostgreSQL to look at while a coordinator may be writing it; what would change it is a StoreFull.

    Raises StoreError where there is none, or one of an older or newer schema.
    """
    return SqlStore(postgres_engine(url, read_only=True), home=None)


def open_read_only(path: Path | str) -> SqlStore:
    """A ledger to look at while a coordinator may be writing it; what would change it is a StoreFull.

    Raises StoreError where there is none, or one of an older or newer schema.
    """
    if not Path(path).is_file():
        raise StoreError(f"there is no ledger {path}: expected a coordinator's state directory, with {LEDGER} in it")
    return SqlStore(create_engine(f"sqlite:///file:{quote(str(path))}?mode=ro&uri=true"), home=None)


def open_ledger(
    url: str | None, state_dir: Path, durability: Durability = "process", home: Home = ANYWHERE
) -> SqlStore:
    """The ledger at a PostgreSQL URL, or without one the SQLite file in the state directory.

    Raises StoreAway while another coordinator has it or it cannot be reached, StoreError where the directory, which is
    `home`, has another ledger, or the ledger another directory: checkpoints belong to one ledger.
    """
    own = (state_dir / LEDGER).exists()
    if url is None and home.ledger and not own:
        raise StoreError(
            f"the ledger of {state_dir} is not there: it was in PostgreSQL, and then `ledger` must name it, or its "
            f"{LEDGER} was lost, and then restore the directory from a backup, or name a new one"
        )
    if url is None:
        return open_sqlite(state_dir / LEDGER, durability, home)
    if own:
        raise StoreError(
            f"{state_dir} has a ledger of its own, {LEDGER}, and `ledger` names another: its checkpoints go with its "
            "own, so leave the setting out, or name a new state directory"
        )
    return SqlStore(postgres_engine(url), durability, home)


class SqlStore:
    """`Store` over a SQLAlchemy engine or database URL; opening it brings an older schema to this version's.

    Each method is one transaction, durable against SIGKILL when it returns. What an operator says of a run, accepted
    lists and commits are fsynced; with durability "power" every write is. A write is a StoreTaken once somebody else
    has opened the ledger.
    """

    def __init__(
        self, url_or_engine: str | Engine, durability: Durability = "process", home: Home | None = ANYWHERE
    ) -> None:
        """home: the state directory that the ledger must go with; None for one who only looks."""
        with database_errors("open the ledger"):
            self._engine = engine_for(url_or_engine)
        self._reads = self._engine.execution_options(reads=True)
        self._fsynced = self._engine.execution_options(fsynced=True)
        self._writes = self._fsynced if durability == "power" else self._engine
        try:
            with database_errors("open the ledger"), self._fsynced.begin() as db:
                migrate(db)
                self._claim = None if home is None else claim(db, home)
                self._coordinator_id = identify(db)
        except StoreError:
            self.close()
            raise

    @property
    def coordinator_id(self) -> str:
        """Random id of this ledger, made once with it."""
        return self._coordinator_id

    def close(self) -> None:
        """Release files and connections."""
        self._engine.dispose()

    @contextmanager
    def _transaction(self, doing: str, *, fsynced: bool = False) -> Iterator[Connection]:
        """All or nothing; `doing` completes "could not ..." in errors."""
        with database_errors(doing), (self._fsynced if fsynced else self._writes).begin() as db:
            if self._claim is not None:
                require_claim(db, self._claim)
            yield db

    def _read(self, doing: str, query: Select[tuple[object, ...]]) -> list[RowMapping]:
        with database_errors(f"read {doing}"), self._reads.begin() as db:
            return list(db.execute(query).mappings())

    # runs
    def create_run(self, run: RunRecord, why: HistoryRecord) -> None:
        """Add a run; fsynced. Raises StoreError if the id is taken."""
        with self._transaction(f"create run {run.run_id!r}", fsynced=True) as db:
            if db.execute(_of(schema.runs, run_id=run.run_id)).first():
                raise StoreError(f"there is a run {run.run_id!r} already; choose another id")
            db.execute(insert(schema.runs), rows.to_row(run))
            _explain(db, why)

    def update_run(self, run: RunRecord, why: HistoryRecord | None = None) -> None:
        """Replace what is stored for run.run_id; fsynced. Raises StoreError if there is no such run."""
        with self._transaction(f"update run {run.run_id!r}", fsynced=True) as db:
            _replace_run(db, run)
            _explain(db, why)

    def runs(self) -> list[RunRecord]:
        """All runs, oldest first."""
        found = map(rows.run, self._read("runs", select(schema.runs)))
        return sorted(found, key=lambda run: (run.created_at, run.run_id))

    # the round under way
    def open_attempt(self, attempt: AttemptRecord, why: HistoryRecord | None = None) -> None:
        """Write a cohort down. The same record again changes nothing; another of its key is a StoreError."""
        key = {name: getattr(attempt, name) for name in ("run_id", "round", "exchange", "attempt")}
        doing = f"open attempt {attempt.attempt} of run {attempt.run_id!r} round {attempt.round}"
        with self._transaction(doing) as db:
            found = db.execute(_of(schema.attempts, **key)).mappings().first()
            if found is None or rows.attempt(found) != attempt:
                db.execute(insert(schema.attempts), rows.to_row(attempt))
                _explain(db, why)

    def attempts(self, run_id: str, round: int) -> list[AttemptRecord]:
        """Attempts of a round, by exchange and attempt."""
        table = schema.attempts
        query = _of(table, run_id=run_id, round=round).order_by(table.c.exchange, table.c.attempt)
        return [rows.attempt(row) for row in self._read("attempts", query)]

    def set_seconds_left(self, run_id: str, attempt: tuple[int, int, int], seconds: float) -> None:
        """Write down how long an attempt, named by (round, exchange, attempt), still has; pass over one that is not."""
        key = {"run_id": run_id, **dict(zip(("round", "exchange", "attempt"), attempt, strict=True))}
        with self._transaction(f"write down the time left to run {run_id!r}") as db:
            db.execute(change(schema.attempts).filter_by(**key).values(seconds_left=seconds))

    def record_update(
        self, update: UpdateRecord, standing: Standing | None = None, why: HistoryRecord | None = None
    ) -> UpdateRecord:
        """Write the first word on an update and return it; if there is one already, change nothing and return that.

        Counts towards the client's updates_refused when it is not admitted. standing: replaces what stands against
        the client, where it is known.
        """
        key = {name: getattr(update, name) for name in ("run_id", "round", "exchange", "client_id")}
        with self._transaction(f"record the update of {update.client_id!r} in run {update.run_id!r}") as db:
            if first := db.execute(_of(schema.updates, **key)).mappings().first():
                return rows.update(first)
            db.execute(insert(schema.updates), rows.to_row(update))
            if not update.admitted:
                _count(db, [update.client_id], "updates_refused")
            _replace_standing(db, standing, why)
            return update

    def update_of(self, run_id: str, round: int, exchange: int, client_id: str) -> UpdateRecord | None:
        """The ledger's line, if there is one."""
        if max(round, exchange) > _LARGEST:
            return None
        query = _of(schema.updates, run_id=run_id, round=round, exchange=exchange, client_id=client_id)
        return next((rows.update(row) for row in self._read("an update", query)), None)

    def updates_of(self, run_id: str, exchange: int, rounds: Sequence[int], client_id: str) -> list[UpdateRecord]:
        """The ledger's lines on one client in an exchange of these rounds; by the primary key, so no other is read."""
        possible = [round_ for round_ in rounds if round_ <= _LARGEST]
        if not possible or exchange > _LARGEST:
            return []
        query = _of(schema.updates, run_id=run_id, exchange=exchange, client_id=client_id)
        return [rows.update(row) for row in self._read("updates", query.where(schema.updates.c.round.in_(possible)))]

    def updates(self, run_id: str, round: int, exchange: int) -> list[UpdateRecord]:
        """The ledger's lines of an exchange, in the order of client id bytes."""
        query = _of(schema.updates, run_id=run_id, round=round, exchange=exchange)
        return sorted(map(rows.update, self._read("updates", query)), key=lambda each: each.client_id.encode())

    def drop_update(self, run_id: str, round: int, exchange: int, client_id: str, why: HistoryRecord) -> None:
        """Take back the line of an update whose file is torn or gone, so that it can be sent again.

        Where there is no such line nothing is done, and nothing is explained.
        """
        key = {"run_id": run_id, "round": round, "exchange": exchange, "client_id": client_id}
        with self._transaction(f"drop the update of {client_id!r} in run {run_id!r}") as db:
            if db.execute(delete(schema.updates).filter_by(**key)).rowcount:
                _explain(db, why)

    def refuse_accepted(
        self, refused: Sequence[UpdateRecord], standings: Sequence[Standing], whys: Sequence[HistoryRecord]
    ) -> None:
        """Take updates out of the accepted list that one exchange was closed with, and forget that list.

        All in one transaction, with what it means for their clients as in `record_update`. refused: the lines as they
        are to be, of one exchange. The same again changes nothing; a committed round is a StoreError.
        """
        first = refused[0]
        of_round = {"run_id": first.run_id, "round": first.round}
        with self._transaction(f"refuse accepted updates of run {first.run_id!r}") as db:
            if db.execute(_of(schema.commits, **of_round)).first():
                raise StoreError(f"round {first.round} of run {first.run_id!r} is committed: its list stands")
            if not db.execute(delete(schema.accepted).filter_by(**of_round, exchange=first.exchange)).rowcount:
                return
            for update in refused:
                key = {**of_round, "exchange": update.exchange, "client_id": update.client_id}
                db.execute(change(schema.updates).filter_by(**key).values(rows.to_row(update)))
            _count(db, [update.client_id for update in refused], "updates_refused")
            for standing in standings:
                _replace_standing(db, standing, None)
            for why in whys:
                _explain(db, why)

    def fix_accepted(self, run_id: str, round: int, exchange: int, accepted: Sequence[tuple[str, bytes]]) -> None:
        """Write down, once and for all, which (client, digest) make the exchange; fsynced.

        Without that a power cut might leave a checkpoint and not the list that it was made of. The same list again
        changes nothing; a different one is a StoreError.
        """
        entries = [[client_id, digest.hex()] for client_id, digest in accepted]
        key = {"run_id": run_id, "round": round, "exchange": exchange}
        with self._transaction(f"fix the accepted list of run {run_id!r} round {round}", fsynced=True) as db:
            fixed = db.execute(_of(schema.accepted, **key)).mappings().first()
            if fixed is None:
                db.execute(insert(schema.accepted).values(**key, entries=entries))
            elif fixed["entries"] != entries:
                raise StoreError(
                    f"the accepted list of run {run_id!r} round {round} exchange {exchange} is fixed with "
                    f"{len(fixed['entries'])} updates; another list of {len(entries)} came, and the first one stands"
                )

    def accepted(self, run_id: str, round: int, exchange: int) -> list[tuple[str, bytes]] | None:
        """The list as it was fixed; None before that."""
        found = self._read("an accepted list", _of(schema.accepted, run_id=run_id, round=round, exchange=exchange))
        return [(client_id, bytes.fromhex(digest)) for client_id, digest in found[0]["entries"]] if found else None

    def restart_round(self, run: RunRecord, round: int, why: HistoryRecord) -> None:
        """Forget the attempts, updates and accepted lists of an uncommitted round, and replace run's row.

        A round that has been committed is a StoreError.
        """
        key = {"run_id": run.run_id, "round": round}
        with self._transaction(f"restart round {round} of run {run.run_id!r}") as db:
            if db.execute(_of(schema.commits, **key)).first():
                raise StoreError(f"round {round} of run {run.run_id!r} is committed: it cannot be restarted")
            for table in (schema.attempts, schema.updates, schema.accepted):
                db.execute(delete(table).filter_by(**key))
            _replace_run(db, run)
            _explain(db, why)

    # commits
    def commit(self, commit: CommitRecord, why: HistoryRecord, left_out: Sequence[str] = ()) -> None:
        """Enter a round whose checkpoint is durable; fsynced. Also adds 1 to updates_counted of its accepted clients.

        Those of a round with several exchanges are the accepted of the last one, without those whom the reducer left
        out: the lines of their updates say so. Nothing stands against those who count any more, but what keeps one from
        being drawn at that time. Entering the same round again with the same model digest changes nothing; with another
        it is a StoreError.
        """
        with self._transaction(f"commit run {commit.run_id!r} round {commit.round}", fsynced=True) as db:
            entered = db.execute(_of(schema.commits, run_id=commit.run_id, round=commit.round)).mappings().first()
            if entered is None:
                db.execute(insert(schema.commits), rows.to_row(commit))
                counted = [each for each in _clients_of(db, commit) if each not in left_out]
                _count(db, counted, "updates_counted")
                if left_out:
                    of_round = change(schema.updates).filter_by(run_id=commit.run_id, round=commit.round, admitted=True)
                    db.execute(of_round.where(schema.updates.c.client_id.in_(left_out)).values(reason=LEFT_OUT))
                table = schema.standings
                db.execute(delete(table).where(table.c.client_id.in_(counted), table.c.until <= commit.committed_at))
                _explain(db, why)
            elif entered["model_digest"] != commit.model_digest:
                raise StoreError(
                    f"run {commit.run_id!r} round {commit.round} is committed with model {entered['model_digest']}; "
                    f"{commit.model_digest} came, and the first one stands"
                )

    def set_metrics(self, run_id: str, round: int, metrics: Mapping[str, float]) -> None:
        """Add the evaluation of a committed round, in place of an earlier one. StoreError if it is not committed."""
        with self._transaction(f"set the metrics of run {run_id!r} round {round}") as db:
            query = change(schema.commits).filter_by(run_id=run_id, round=round).values(metrics=dict(metrics))
            if not db.execute(query).rowcount:
                raise StoreError(f"run {run_id!r} has no committed round {round} to give metrics to")

    def set_clients_seconds_left(self, run_id: str, round: int, seconds: float) -> None:
        """Write down how long the clients' evaluation of a committed round still has; pass over one that is not."""
        with self._transaction(f"write down the time left to clients of run {run_id!r}") as db:
            query = change(schema.commits).filter_by(run_id=run_id, round=round)
            db.execute(query.values(clients_seconds_left=seconds))

    def commits(self, run_id: str) -> list[CommitRecord]:
        """Committed rounds in order."""
        query = _of(schema.commits, run_id=run_id).order_by(schema.commits.c.round)
        return [rows.commit(row) for row in self._read("commits", query)]

    def record_evaluation(self, evaluation: ClientEvaluation) -> ClientEvaluation:
        """Write a client's evaluation down and return it; if there is one already, change nothing and return that."""
        key = {name: getattr(evaluation, name) for name in ("run_id", "round", "client_id")}
        doing = f"record the evaluation of {evaluation.client_id!r} in run {evaluation.run_id!r}"
        with self._transaction(doing) as db:
            if first := db.execute(_of(schema.client_evaluations, **key)).mappings().first():
                return rows.evaluation(first)
            db.execute(insert(schema.client_evaluations), rows.to_row(evaluation))
            return evaluation

    def evaluations(self, run_id: str, round: int) -> list[ClientEvaluation]:
        """The clients' evaluations of a committed round, in the order of client id bytes."""
        found = self._read("evaluations", _of(schema.client_evaluations, run_id=run_id, round=round))
        return sorted(map(rows.evaluation, found), key=lambda each: each.client_id.encode())

    # clients
    def put_clients(self, clients: Sequence[ClientRecord], whys: Sequence[HistoryRecord] = ()) -> None:
        """Add or replace clients, except their counters, which only updates and commits move; the last of one counts.

        whys: lines of history that go with them, in their order.
        """
        table, latest = schema.clients, {client.client_id: rows.to_row(client) for client in clients}
        with self._transaction(f"write {', '.join(latest)[:200]} down") as db:
            known = set(db.execute(select(table.c.client_id).where(table.c.client_id.in_(latest))).scalars())
            fresh = [row | _NO_UPDATES for client_id, row in latest.items() if client_id not in known]
            again = [_without_counters(latest[client_id]) for client_id in latest if client_id in known]
            # A list of rows is one statement; an empty one would be a row of defaults.
            if fresh:
                db.execute(insert(table), fresh)
            if again:
                db.execute(change(table).where(table.c.client_id == bindparam("id_of_row")), again)
            if whys:
                db.execute(insert(schema.history), [rows.to_row(why) for why in whys])

    def forget_client(self, client_id: str, why: HistoryRecord) -> bool:
        """Remove a client from the roster; False if there was none. History, ledger and a ban stay."""
        with self._transaction(f"forget client {client_id!r}") as db:
            found = db.execute(_of(schema.clients, client_id=client_id)).mappings().first()
            if found is None:
                return False
            db.execute(delete(schema.clients).filter_by(client_id=client_id))
            if found["banned"]:
                db.execute(insert(schema.clients), rows.to_row(only_banned(rows.client(found))))
            for table in (schema.standings, schema.state_standings):
                db.execute(delete(table).filter_by(client_id=client_id))
            _explain(db, why)
            return True

    def client(self, client_id: str) -> ClientRecord | None:
        """One client; None if it is not on the roster."""
        found = self._read("a client", _of(schema.clients, client_id=client_id))
        return rows.client(found[0]) if found else None

    def clients(self) -> list[ClientRecord]:
        """All clients in the order of id bytes."""
        found = map(rows.client, self._read("clients", select(schema.clients)))
        return sorted(found, key=lambda client: client.client_id.encode())

    def standings(self) -> list[Standing]:
        """What stands against clients, in the order of id bytes."""
        found = map(rows.standing, self._read("standings", select(schema.standings)))
        return sorted(found, key=lambda standing: standing.client_id.encode())

    def put_standing(self, standing: Standing, why: HistoryRecord | None = None) -> None:
        """Replace what stands against a client, where it is known; an unknown client is passed over."""
        with self._transaction(f"write down what stands against {standing.client_id!r}") as db:
            _replace_standing(db, standing, why)

    def clear_standing(self, client_id: str, why: HistoryRecord) -> bool:
        """Take back what stands against a client, and count its lost states from zero in every run.

        False if nothing did, and then nothing is explained.
        """
        states = schema.state_standings
        lost = change(states).where(states.c.client_id == client_id, states.c.losses > 0)
        with self._transaction(f"clear what stands against {client_id!r}") as db:
            found = db.execute(delete(schema.standings).filter_by(client_id=client_id)).rowcount > 0
            found = db.execute(lost.values(losses=0)).rowcount > 0 or found
            if found:
                _explain(db, why)
            return found

    # client states
    def state_standings(self, run_id: str) -> list[StateStanding]:
        """What is known of clients' states in a run, in the order of id bytes."""
        found = map(rows.state_standing, self._read("client states", _of(schema.state_standings, run_id=run_id)))
        return sorted(found, key=lambda state: state.client_id.encode())

    def put_state_standings(
        self, states: Sequence[StateStanding], standing: Standing | None = None, whys: Sequence[HistoryRecord] = ()
    ) -> None:
        """Add or replace these, with what stands against one of the clients and lines of history, in one transaction.

        A client that is not known is passed over.
        """
        with self._transaction("write down what is known of client states") as db:
            for state in states:
                if db.execute(_of(schema.clients, client_id=state.client_id)).first():
                    db.execute(delete(schema.state_standings).filter_by(run_id=state.run_id, client_id=state.client_id))
                    db.execute(insert(schema.state_standings), rows.to_row(state))
            _replace_standing(db, standing, None)
            for why in whys:
                _explain(db, why)

    # history
    def add_history(self, entry: HistoryRecord) -> None:
        """Write a line of history that goes with no other change."""
        with self._transaction("write history") as db:
            _explain(db, entry)

    def history(self, subject: str = "", limit: int = 1000) -> list[HistoryRecord]:
        """The newest `limit` lines about a subject ("" for all), oldest first."""
        query = _of(schema.history, **({"subject": subject} if subject else {}))
        newest = query.order_by(schema.history.c.id.desc()).limit(max(limit, 0))
        return [rows.history(row) for row in reversed(self._read("history", newest))]


def _of(table: Table, **key: object) -> Select[tuple[object, ...]]:
    """The rows of a table with these values."""
    return select(table).filter_by(**key)


def _replace_run(db: Connection, run: RunRecord) -> None:
    table = schema.runs
    if not db.execute(change(table).where(table.c.run_id == run.run_id).values(rows.to_row(run))).rowcount:
        raise StoreError(f"there is no run {run.run_id!r} to update; create it first")


def _replace_standing(db: Connection, standing: Standing | None, why: HistoryRecord | None) -> None:
    """Of a client that is known; of any other nothing is written."""
    if standing is not None and db.execute(_of(schema.clients, client_id=standing.client_id)).first():
        db.execute(delete(schema.standings).filter_by(client_id=standing.client_id))
        db.execute(insert(schema.standings), rows.to_row(standing))
        _explain(db, why)


_LARGEST = 2**31 - 1
"""Number of a round or exchange that a ledger can have; clients name larger ones, for which PostgreSQL has no type."""
_NO_UPDATES = {"updates_counted": 0, "updates_refused": 0}


def _without_counters(row: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in row.items() if name not in _NO_UPDATES} | {"id_of_row": row["client_id"]}


def _explain(db: Connection, why: HistoryRecord | None) -> None:
    """Write the line of history that goes with a change."""
    if why is not None:
        db.execute(insert(schema.history), rows.to_row(why))


def _count(db: Connection, client_ids: Sequence[str], counter: str) -> None:
    """Add 1 to a counter of clients; those that the roster has forgotten are passed over."""
    table = schema.clients
    db.execute(change(table).where(table.c.client_id.in_(client_ids)).values({counter: table.c[counter] + 1}))


def _clients_of(db: Connection, commit: CommitRecord) -> list[str]:
    """Whose updates a round counted: the accepted clients of its last exchange."""
    last = _of(schema.accepted, run_id=commit.run_id, round=commit.round)
    found = db.execute(last.order_by(schema.accepted.c.exchange.desc()).limit(1)).mappings().first()
    return [client_id for client_id, _ in found["entries"]] if found else []
