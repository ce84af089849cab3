"""Records to write into a ledger, and short reads of one. Tests give only the values that matter to them."""

from typing import Any

from fl_server.store.database.store import Store
from fl_server.store.records import (
    AttemptRecord,
    ClientRecord,
    CommitRecord,
    HistoryRecord,
    QuarantineRecord,
    RunRecord,
    UpdateRecord,
)


def why(event: str = "changed", subject: str = "r1") -> HistoryRecord:
    """A history entry."""
    return HistoryRecord(time=1.5, actor="admin:eve", event=event, subject=subject, detail="because")


def a_run(run_id: str = "r1", **changes: Any) -> RunRecord:
    """A run with a nested configuration."""
    values: dict[str, Any] = {
        "spec": {"rounds": 3, "task": {"name": "digits"}},
        "state": "waiting",
        "reason": "",
        "created_at": 10.0,
    }
    return RunRecord(run_id, **{**values, **changes})


def an_attempt(attempt: int = 0, exchange: int = 0, cohort: tuple[str, ...] = ("a", "b")) -> AttemptRecord:
    """An attempt at round 0 of r1."""
    return AttemptRecord("r1", 0, exchange, attempt, cohort, opened_at=11.0)


def an_update(client_id: str = "a", **changes: Any) -> UpdateRecord:
    """An admitted update of round 0 of r1."""
    values: dict[str, Any] = {"digest": b"\1" * 32, "size_bytes": 40, "admitted": True, "num_examples": 7, "norm": 2.5}
    return UpdateRecord("r1", 0, 0, client_id, **{**values, **changes})


def a_commit(round: int = 0, model_digest: str = "blake3:00", **changes: Any) -> CommitRecord:
    """A committed round of r1."""
    values: dict[str, Any] = {
        "committed_at": 20.0,
        "seconds": 3.0,
        "attempts": 1,
        "accepted": 2,
        "dropped": 0,
        "training_loss": 0.5,
    }
    values |= {"bytes_down": 2**40, "bytes_up": 7, **changes}
    return CommitRecord("r1", round, model_digest=model_digest, **values)


def a_client(client_id: str = "a", **changes: Any) -> ClientRecord:
    """A registered client."""
    return ClientRecord(client_id, registered_at=1.0, last_seen=2.0, **changes)


def a_quarantine_record(client_id: str = "a", **changes: Any) -> QuarantineRecord:
    """Two refusals in a row: too few for a quarantine."""
    return QuarantineRecord(client_id, **{"refusals": 2, "until": 0.0, "reason": "noise", **changes})


def events(store: Store, subject: str = "") -> list[str]:
    """The events of the history, oldest first."""
    return [entry.event for entry in store.history(subject)]


def counters(store: Store, client_id: str = "a") -> tuple[int, int]:
    """A client's numbers of counted and refused updates."""
    client = next(each for each in store.clients() if each.client_id == client_id)
    return client.updates_counted, client.work.refused
