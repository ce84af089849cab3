"""Account and witness: a lost or older account is noticed, and a crash between two writes is none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fl_client.errors import StateError
from fl_client.privacy import files as module
from fl_client.privacy.account import FILE, write_account
from fl_client.privacy.files import WITNESS, AccountFiles
from fl_common.files import atomic_writer
from fl_common.privacy.accountant import Mechanism

ONE = Mechanism(1.0, 0.1)


def used(folder: Path, charges: int = 2) -> AccountFiles:
    """The files of a directory that a daemon has claimed, after some charges."""
    files = AccountFiles(folder)
    files.begin()
    (folder / "identity.json").write_text("{}")
    for number in range(charges):
        account = files.read()
        assert account is not None
        files.write(account.with_charge(bytes([number]), ONE, 1, 1e-5))
    return files


def test_a_new_directory_has_an_empty_account(tmp_path: Path) -> None:
    """A start before the claim makes both files once; before it there is no account, which is no fault."""
    files = AccountFiles(tmp_path)
    assert files.read() is None
    files.begin()
    first = files.read()
    files.begin()
    assert first is not None
    assert (files.read(), first.charges) == (first, 0)


def _no_account(folder: Path) -> None:
    (folder / FILE).unlink()


def _no_witness(folder: Path) -> None:
    (folder / WITNESS).unlink()


def _neither(folder: Path) -> None:
    _no_account(folder)
    _no_witness(folder)


def _another(folder: Path) -> None:
    (folder / "other").mkdir()
    used(folder / "other", 5)
    (folder / "other" / FILE).replace(folder / FILE)


def _broken(folder: Path) -> None:
    (folder / WITNESS).write_text('{"account": "", "charges": -1, "resets": 0}')


FORGETFUL: list[tuple[Callable[[Path], None], str]] = [
    (_no_account, "the privacy account is missing"),
    (_no_witness, "number of the account's charges is missing"),
    (_neither, "the privacy account is missing"),
    (_another, "another account than"),
    (_broken, "expected what this daemon wrote"),
]


@pytest.mark.parametrize(("change", "message"), FORGETFUL, ids=[row[0].__name__ for row in FORGETFUL])
@pytest.mark.parametrize("charges", [0, 2])
def test_what_would_forget_charges_is_refused(
    tmp_path: Path, change: Callable[[Path], None], message: str, charges: int
) -> None:
    """Also before the first charge, because nobody can tell then. The start makes nothing anew; a reset does."""
    files = used(tmp_path, charges)
    change(tmp_path)
    files.begin()
    with pytest.raises(StateError, match=message):
        files.read()
    files.reset(keep=False)
    account, witness = files.read(), files.witness()
    assert account is not None
    assert witness is not None
    assert (account.charges, witness.resets) == (0, 1)


def test_an_older_copy_is_refused(tmp_path: Path) -> None:
    """A backup of the account alone is behind its witness."""
    files = used(tmp_path)
    backup = (tmp_path / FILE).read_bytes()
    account = files.read()
    assert account is not None
    files.write(account.with_charge(b"new", ONE, 1, 1e-5))
    (tmp_path / FILE).write_bytes(backup)
    with pytest.raises(StateError, match="expected 3 charges or more, got an older copy with 2"):
        files.read()
    assert files.reset(keep=True) == account == files.read()


class Killed(BaseException):
    """The process ends at this call."""


@pytest.mark.parametrize("writes", [0, 1, 2])
def test_a_kill_between_the_writes_is_no_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writes: int) -> None:
    """The account is first: it is ahead of its witness or level with it, never behind."""
    files = used(tmp_path)
    old = files.read()
    assert old is not None
    new = old.with_charge(b"new", ONE, 1, 1e-5)
    done = 0

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def write(*arguments: Any) -> Any:
            nonlocal done
            if done == writes:
                raise Killed
            done += 1
            return real(*arguments)

        return write

    with monkeypatch.context() as patched:
        patched.setattr(module, "write_account", counted(write_account))
        patched.setattr(module, "atomic_writer", counted(atomic_writer))
        if writes < 2:
            with pytest.raises(Killed):
                files.write(new)
        else:
            files.write(new)
    assert files.read() == (new if writes else old)
    files.write(new)
    assert files.read() == new


@pytest.mark.parametrize("writes", [0, 1])
def test_a_kill_at_the_first_start_needs_no_reset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writes: int) -> None:
    """The directory is claimed after both writes, so the next start makes what is missing."""
    files = AccountFiles(tmp_path)

    def killed(*arguments: Any) -> Any:
        raise Killed(arguments)

    with monkeypatch.context() as patched:
        patched.setattr(module, "atomic_writer" if writes else "write_account", killed)
        with pytest.raises(Killed):
            files.begin()
    files.begin()
    account = files.read()
    assert account is not None
    assert account.charges == 0
