"""Faults planted into private runs: into charges of the coordinator and of devices, and into the noise of both."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from sqlalchemy import delete

from fl_client.privacy import charging
from fl_client.privacy.account import Account
from fl_client.privacy.charging import PrivacyCharging
from fl_client.privacy.files import AccountFiles
from fl_client.training.private import private_work
from fl_common.privacy.secret_stream import SECRET_BYTES, derived
from fl_server.aggregation import engine
from fl_server.aggregation.privacy import PrivateSum
from fl_server.run.effects import Effects
from fl_server.store.database import schema
from fl_server.store.database.store import Store
from fl_server.store.state_directory import RunSecrets
from tests.deterministic.planted import Patch

_LATER_S = 0.5
_AFTER_TRAINING_S = 5.0


def later(work: Callable[[], object], seconds: float = _LATER_S) -> None:
    """Do it later, unless the process is killed before."""
    asyncio.get_running_loop().call_later(seconds, work)


def _work_before_cohort() -> Patch:
    opened = Effects._open_attempt

    async def open_attempt(self: Effects, command: Any) -> None:
        self._parts.dispatch.push_all(command.cohort)
        await opened(self, command)

    return Effects, "_open_attempt", open_attempt


def _work_before_charge() -> Patch:
    opened = Store.open_attempt

    def open_attempt(self: Store, attempt: Any, why: Any = None, charge: Any = None) -> None:
        opened(self, attempt, why)
        if charge is not None:
            later(lambda: self.add_charge(charge))

    return Store, "open_attempt", open_attempt


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


def _steps_before_charge() -> Patch:
    write = AccountFiles.write

    def written(self: AccountFiles, account: Account) -> None:
        if account.charges:
            later(lambda: write(self, account), _AFTER_TRAINING_S)
        else:
            write(self, account)

    return AccountFiles, "write", written


def _no_witness() -> Patch:
    write = AccountFiles._write_witness

    def written(self: AccountFiles, witness: Any) -> None:
        write(self, replace(witness, charges=0))

    return AccountFiles, "_write_witness", written


def _latest_charge_alone() -> Patch:
    charge = Account.with_charge

    def charged(self: Account, identity: bytes, mechanism: Any, steps: int, delta: float) -> Account:
        return replace(charge(self, identity, mechanism, steps, delta), spent={mechanism: steps})

    return Account, "with_charge", charged


def _no_limit() -> Patch:
    return PrivacyCharging, "_check_limit", lambda self, *accounts: None


def _charged_again() -> Patch:
    return Account, "has", lambda self, identity: False


def _private_key(key: Callable[[], bytes]) -> Callable[[], Patch]:
    """Private work gets this key for its batches and its noise."""
    return lambda: (charging, "private_work", lambda *known: replace(private_work(*known), key=key()))


PRIVATE: dict[str, Callable[[], Patch]] = {
    "draws after the first are free": _draws_are_free,
    "a charge that a kill left alone is not counted outside": _nothing_outside,
    "a commit gives its charge back": _charge_given_back,
    "work is sent before its cohort is written": _work_before_cohort,
    "work is sent before its charge is written": _work_before_charge,
    "all sums have one noise": _one_noise_for_all,
    "the noise has another key at each computation": _noise_by_chance,
    "private steps are made before their charge is written": _steps_before_charge,
    "a device does not count its charges beside the account": _no_witness,
    "a device keeps its latest charge alone": _latest_charge_alone,
    "a device does not look at its limit": _no_limit,
    "private work that is repeated is charged again": _charged_again,
    "all private work of a device has one noise": _private_key(lambda: bytes(SECRET_BYTES)),
    "private work has another noise at each start": _private_key(lambda: secrets.token_bytes(SECRET_BYTES)),
}
