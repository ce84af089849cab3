"""Records to write into a ledger, with the few values that a test is about."""

from fl_server.store.base import (
    AttemptRecord,
    ClientRecord,
    CommitRecord,
    HistoryRecord,
    RunRecord,
    Standing,
    UpdateRecord,
)


def why(event: str = "changed", subject: str = "r1") -> HistoryRecord:
    """A line of history."""
    return HistoryRecord(time=1.5, actor="admin:eve", event=event, subject=subject, detail="because")


def a_run(run_id: str = "r1", **changes: object) -> RunRecord:
    """A run with a nested configuration."""
    values = {"spec": {"rounds": 3, "task": {"name": "digits"}}, "state": "waiting", "reason": "", "created_at": 10.0}
    return RunRecord(run_id, **{**values, **changes})  # type: ignore[arg-type]


def an_attempt(attempt: int = 0, exchange: int = 0, cohort: tuple[str, ...] = ("a", "b")) -> AttemptRecord:
    """An attempt at round 0 of r1."""
    return AttemptRecord("r1", 0, exchange, attempt, cohort, opened_at=11.0)


def an_update(client_id: str = "a", **changes: object) -> UpdateRecord:
    """An admitted update of round 0 of r1."""
    values = {"digest": b"\1" * 32, "size_bytes": 40, "admitted": True, "num_examples": 7, "norm": 2.5}
    return UpdateRecord("r1", 0, 0, client_id, **{**values, **changes})  # type: ignore[arg-type]


def a_commit(round: int = 0, model_digest: str = "blake3:00", **changes: object) -> CommitRecord:
    """A committed round of r1."""
    values: dict[str, object] = {
        "committed_at": 20.0,
        "seconds": 3.0,
        "attempts": 1,
        "accepted": 2,
        "dropped": 0,
        "training_loss": 0.5,
    }
    values |= {"bytes_down": 2**40, "bytes_up": 7, **changes}
    return CommitRecord("r1", round, model_digest=model_digest, **values)  # type: ignore[arg-type]


def a_client(client_id: str = "a", **changes: object) -> ClientRecord:
    """A registered client."""
    return ClientRecord(client_id, registered_at=1.0, last_seen=2.0, **changes)  # type: ignore[arg-type]


def a_standing(client_id: str = "a", **changes: object) -> Standing:
    """Two refusals in a row, which is not enough for a quarantine."""
    return Standing(client_id, **{"refusals": 2, "until": 0.0, "reason": "noise", **changes})  # type: ignore[arg-type]
