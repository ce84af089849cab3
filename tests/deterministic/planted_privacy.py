"""Faults planted into runs with privacy of clients: into their charges, and into the noise of their sums."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Any

from sqlalchemy import delete

from fl_common.privacy.secret_stream import derived
from fl_server.aggregation import engine
from fl_server.aggregation.private_sum import PrivateSum
from fl_server.store.database import schema
from fl_server.store.database.store import Store
from fl_server.store.run_secrets import RunSecrets
from tests.deterministic.planted import Patch


def _draws_are_free() -> Patch:
    opened = Store.open_attempt

    def open_attempt(self: Store, attempt: Any, why: Any = None, charge: Any = None) -> None:
        opened(self, attempt, why, charge if attempt.round == 0 else None)

    return Store, "open_attempt", open_attempt


def _nothing_outside() -> Patch:
    return RunSecrets, "not_counted", lambda self, charges: {}


def _charge_given_back() -> Patch:
    written = Store.commit

    def commit(self: Store, record: Any, *rest: Any, **more: Any) -> None:
        written(self, record, *rest, **more)
        with self._transaction("give a charge back") as db:
            db.execute(delete(schema.charges).filter_by(run_id=record.run_id, round=record.round))

    return Store, "commit", commit


def _one_noise_for_all() -> Patch:
    return PrivateSum, "noise_key", property(lambda self: bytes(32), lambda self, key: None)


def _noise_by_chance() -> Patch:
    def key_of_round(secret: bytes, round_: int, attempt: int, clients: Sequence[str]) -> bytes:
        return derived(secret, secrets.token_bytes(16))

    return engine, "key_of_round", key_of_round


PRIVATE: dict[str, Callable[[], Patch]] = {
    "draws after the first are free": _draws_are_free,
    "a charge that a kill left alone is not counted outside": _nothing_outside,
    "a commit gives its charge back": _charge_given_back,
    "all sums have one noise": _one_noise_for_all,
    "the noise has another key at each computation": _noise_by_chance,
}
