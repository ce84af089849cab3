"""The account of a device's data: it adds up, it is durable before it is used, and no crash makes it smaller."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fl_client.errors import StateError
from fl_client.privacy.account import REMEMBERED, Account, read_account, write_account
from fl_common.privacy.accountant import Mechanism, epsilon_of

ONE, TWO = Mechanism(1.0, 0.1), Mechanism(2.0, 0.5)


def charged() -> Account:
    """An account with two charges."""
    return Account.new().with_charge(b"a", ONE, 10, 1e-5).with_charge(b"b", TWO, 3, 1e-6)


def test_charges_add_up_over_runs() -> None:
    """Steps of one mechanism are counted together; epsilon is at the smallest delta of all."""
    account = charged().with_charge(b"c", ONE, 5, 1e-4)
    assert account.spent == {ONE: 15, TWO: 3}
    assert account.delta == 1e-6
    assert account.epsilon() == epsilon_of({ONE: 15, TWO: 3}, 1e-6)
    assert account.epsilon(1e-3) < account.epsilon()
    assert Account.new().epsilon() == 0.0


def test_the_file_is_private_and_keeps_everything(tmp_path: Path) -> None:
    """Only the owner reads the secret, whatever the umask."""
    before = os.umask(0)
    try:
        write_account(tmp_path / "privacy.json", charged())
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "privacy.json").stat().st_mode) == 0o600
    account = charged()
    write_account(tmp_path / "privacy.json", account)
    assert read_account(tmp_path / "privacy.json") == account
    assert account.secret.hex() not in repr(account)


def test_no_file_is_no_account_and_another_content_is_never_replaced(tmp_path: Path) -> None:
    """A file that cannot be read is an error: a new account would forget what was spent."""
    path = tmp_path / "privacy.json"
    assert read_account(path) is None
    good = '{"secret": "' + "00" * 32 + '", "delta": 1.0, "spent": [], "charges": 0, "charged": []}'
    for content in (
        "",
        "{",
        "[]",
        "{}",
        good.replace("00", "0", 1),
        good.replace("[]", '[{"steps": -1}]', 1),
        good.replace("0,", "-1,"),
    ):
        path.write_text(content)
        with pytest.raises(StateError, match="expected the privacy account that this daemon wrote"):
            read_account(path)
    path.write_text(good)
    assert read_account(path) == Account(bytes(32))


def test_only_the_latest_work_is_remembered() -> None:
    """Older work that comes again is charged again: the account may only be too large."""
    account = Account.new()
    for number in range(REMEMBERED + 1):
        account = account.with_charge(number.to_bytes(4, "big"), ONE, 1, 1e-5)
    assert not account.has((0).to_bytes(4, "big"))
    assert account.has((1).to_bytes(4, "big"))
    assert account.spent == {ONE: REMEMBERED + 1}


class Killed(BaseException):
    """The process ends at this call."""


CALLS: dict[str, tuple[Any, str]] = {
    "before the file is made": (os, "fdopen"),
    "before its bytes are on the disk": (os, "fsync"),
    "before it has its name": (Path, "replace"),
    "before its name is on the disk": (os, "open"),
}


@pytest.mark.parametrize("at", CALLS)
def test_a_kill_at_any_write_leaves_the_old_account_or_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    """The secret is the same in both, and the writer does not return, so that no work begins uncharged."""
    path, old = tmp_path / "privacy.json", charged()
    new = old.with_charge(b"c", ONE, 7, 1e-5)
    write_account(path, old)
    owner, name = CALLS[at]
    real: Callable[..., Any] = getattr(owner, name)

    def killed(*arguments: Any, **options: Any) -> Any:
        if name == "open" and arguments[0] != tmp_path:
            return real(*arguments, **options)
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(owner, name, killed)
        with pytest.raises(Killed):
            write_account(path, new)
    assert read_account(path) == (new if name == "open" else old)
