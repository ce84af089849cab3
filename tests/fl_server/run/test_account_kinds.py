"""The privacy account of a run whose cohorts have a fixed size, as with secure aggregation."""

from __future__ import annotations

from typing import Any

import pytest

from fl_common.privacy.accountant import Mechanism
from fl_server.errors import InvalidInput
from fl_server.privacy_accounts import Account
from fl_server.rounds.effects import OpenAttempt
from fl_server.run_settings.config import RunConfig
from fl_server.run_settings.spec import from_values
from fl_server.store.records import ChargeRecord
from fl_server.store.state_directory import RunSecrets

PRIVACY = {"unit": "client", "noise_multiplier": 4.0, "clip": 0.5, "delta": 0.01, "max_epsilon": 9.0}


def config(**sections: Any) -> RunConfig:
    """A run that draws 5 of at least 50 clients."""
    round_ = {"clients_per_round": 5, "min_clients": 50}
    return from_values({"name": "r", "task": {"name": "digits"}, "privacy": PRIVACY, "round": round_, **sections})


SECURE = config(secure_aggregation={"clip": 0.5})
POISSON = config(round={"sampling": "bernoulli", "rate": 0.1})


def charged(of: RunConfig) -> ChargeRecord:
    """The first charge of a run."""
    return Account.of("r", of, ()).charge("r", OpenAttempt(0, 0, 0, ("a",)), 1, 0.5)


def test_a_draw_is_charged_as_a_sample_of_a_fixed_size() -> None:
    """Of the share 5 / 50, and of everybody for who sees the cohorts."""
    account = Account.of("r", SECURE, ())
    assert (charged(SECURE).fixed_size, charged(SECURE).rate) == (True, 0.1)
    assert account.spent(3) == {Mechanism(4.0, 0.1, fixed_size=True): 3}
    assert account.spent(3, seen=True) == {Mechanism(4.0, 1.0, fixed_size=True): 3}
    assert 0 < account.epsilon(3) < account.epsilon(3, seen=True)


@pytest.mark.parametrize(("of", "before"), [(SECURE, POISSON), (POISSON, SECURE)])
def test_an_account_has_draws_of_one_kind(of: RunConfig, before: RunConfig) -> None:
    """Their neighbours differ, so nobody knows what they cost together."""
    with pytest.raises(InvalidInput, match=r"^privacy\.account: expected an account of its own"):
        Account.of("other", of, [charged(before)])
    assert Account.of("other", before, [charged(before)]).others.total() == 1


def test_charges_that_a_backup_lacks_keep_their_kind(tmp_path: Any) -> None:
    """The file beside the ledger knows it."""
    secrets = RunSecrets(tmp_path)
    secrets.counted(charged(SECURE))
    (made,) = secrets.missing({})
    assert (made.fixed_size, made.rate, made.noise_multiplier) == (True, 0.1, 4.0)
